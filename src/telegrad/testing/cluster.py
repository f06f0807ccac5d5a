"""Many workers in one process, over memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.link import Link
from telegrad._agent.loopback import connect
from telegrad._agent.peers import Peer, WorkerRecord
from telegrad._current import acting_as
from telegrad._wire.values import Route
from telegrad._worker import Worker
from telegrad.errors import UnknownWorkerError
from telegrad.rpc.options import check_name
from telegrad.testing.faults import Fault, FaultyCarrier, Kind


class Cluster:
    """Workers that know each other and nothing else.  Use :func:`cluster`, which also ends them."""

    def __init__(self, names: Sequence[str], options: AgentOptions) -> None:
        self.carrier = FaultyCarrier()
        self._options = options
        self._workers: dict[str, Worker] = {}
        records = [WorkerRecord(number, name, allow_pickle=options.allow_pickle) for number, name in enumerate(names)]
        for record in records:
            worker = Worker(record, options, self._dial, lambda to: Route(to.worker_id, options.allow_pickle))
            self._workers[record.name] = worker
            for other in records:
                worker.add_peer(other)
        for worker in self:
            worker.start()

    def _dial(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        worker = self[peer.id]
        if worker.closed:
            raise ConnectionRefusedError(f"worker {peer.name!r} is not there")
        here, there = connect(agent, worker.agent, self.carrier)
        worker.agent.accepted(there)
        return here

    def __getitem__(self, which: str | int) -> Worker:
        for worker in self:
            if which in (worker.name, worker.id):
                return worker
        raise UnknownWorkerError(f"no worker {which!r} in this cluster")

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @contextmanager
    def on(self, which: str | int) -> Iterator[Worker]:
        """Inside, the calling thread acts for that worker, and ``telegrad.rpc``'s functions work."""
        with acting_as(self[which]) as worker:
            yield worker

    # --- faults -------------------------------------------------------------------------------------------------

    def fault(
        self,
        kind: Kind,
        *types: type,
        sender: str | None = None,
        receiver: str | None = None,
        count: int | None = None,
        seconds: float = 0.0,
    ) -> Fault:
        """Declares what happens to messages of these types on their way from sender to receiver."""
        return self.carrier.add(
            Fault(
                kind,
                types,
                self[sender].id if sender is not None else None,
                self[receiver].id if receiver is not None else None,
                count,
                seconds,
            )
        )

    def cut(self, one: str, other: str) -> None:
        """Cuts the links between two workers; each takes the other for lost."""
        for here, there in ((self[one], self[other]), (self[other], self[one])):
            peer = here.agent.peer(there.id)
            for link in peer.links:
                here.agent.link_broken(link, "the link was cut")

    def kill(self, which: str) -> None:
        """Ends a worker as ``kill -9`` would: no goodbye, its links just close."""
        self[which].abandon()

    # --- the end ------------------------------------------------------------------------------------------------

    def shutdown(self, graceful: bool = True, timeout: float = 30.0) -> None:
        """Shuts all workers down, each on a thread of its own, as they would in their processes."""
        errors: list[BaseException] = []

        def end(worker: Worker) -> None:
            try:
                worker.shutdown(graceful, timeout)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=end, args=(worker,), daemon=True) for worker in self]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout + 10)
        self.carrier.close()
        if errors:
            raise errors[0]


@contextmanager
def cluster(*names: str | int, graceful: bool = True, **options: Any) -> Iterator[Cluster]:
    """``with cluster("a", "b") as workers:`` runs workers of these names, ``cluster(128)`` so many of them.

    The options are those of ``AgentOptions``.
    """
    if len(names) == 1 and isinstance(names[0], int):
        names = tuple(f"worker{number}" for number in range(names[0]))
    workers = Cluster([check_name(name) for name in names], AgentOptions(**options))
    try:
        yield workers
    except BaseException:
        workers.carrier.clear()
        workers.shutdown(graceful=False)
        raise
    workers.carrier.clear()
    workers.shutdown(graceful)
