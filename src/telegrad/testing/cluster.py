"""Many workers in one process, each pair connected by sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.peers import Peer, WorkerRecord
from telegrad._core.interface import Link
from telegrad._current import acting_as
from telegrad._wire.values import Route
from telegrad._worker import Worker
from telegrad.errors import UnknownWorkerError
from telegrad.rpc.options import check_name
from telegrad.testing.faults import Fault, Faults, FaultyStream, Kind


class Cluster:
    """Several workers in one process. Make it with :func:`cluster`, which also ends it.

    ``workers["name"]`` and ``workers[0]`` are its workers; it can be iterated, and has a length.

    Args:
        names (list): The names of the workers.
        options (AgentOptions): How they run.
    """

    def __init__(self, names: Sequence[str], options: AgentOptions) -> None:
        self.faults = Faults()
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
        me = agent.me.worker_id
        ours, theirs = socket.socketpair()
        worker.agent.accepted(
            worker.agent.plane.adopt(FaultyStream(theirs, self.faults, peer.id, me), me, dialled=False)
        )
        return agent.plane.adopt(FaultyStream(ours, self.faults, me, peer.id), peer.id, dialled=True)

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
        """Lets the calling thread act for one of the workers: inside, ``telegrad.rpc`` and the other modules work.

        Functions that a worker runs for another worker already act for it. A thread that the program starts does not:
        enter this context manager on it again.

        Args:
            which (str or int): The name or the rank of the worker.

        Returns:
            A context manager.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        with acting_as(self[which]) as worker:
            yield worker

    # --- faults -------------------------------------------------------------------------------------------------

    def fault(
        self,
        kind: Kind,
        *types: type | str,
        sender: str | None = None,
        receiver: str | None = None,
        count: int | None = None,
        seconds: float = 0.0,
        bytes: int = 0,
    ) -> Fault:
        """Declares what happens to the connection from one worker to another.

        There are two connections between a pair of workers: each carries the requests and the internal messages of the
        worker that made it, and the answers of the other.  Calls of a worker to itself have no faults.

        Args:
            kind: ``"stall"``: the message, and all after it on the same connection, is held back until
                ``faults.clear()``.  ``"delay"``: the same, for ``seconds``.  ``"cut"``: the connection ends after
                ``bytes`` of the message, or after all of it if it is shorter; both workers take each other for lost,
                as they would if the other process died.  ``"half-close"``: the message and all after it is lost, and
                the receiver sees the end of the stream.  :meth:`kill` ends a worker, :meth:`cut` the connections
                between two.
            types: The messages at which it happens, by name; all if none is given.  ``"Call"`` is a request of
                ``rpc_sync`` or ``rpc_async``, ``"RemoteCall"`` of ``remote``, ``"Fetch"`` of ``to_here``; ``"Reply"``
                and ``"Failure"`` answer them; ``"Gradients"`` is the message of a backward pass.  ``_wire/messages.py``
                has all of them.
            sender: The worker that sends the message; None: any.
            receiver: The worker that it is for; None: any.
            count: At how many messages it happens; None: at all that match.
            seconds: For a ``"delay"``.
            bytes: For a ``"cut"``: how much of the message still arrives.

        Returns:
            The fault.  Its ``hits`` says at how many messages it has happened.

        Raises:
            UsageError: There is no such kind of fault or message.
            UnknownWorkerError: There is no such worker.

        Example::

            with cluster("trainer", "ps", timeout=1.0) as workers, workers.on("trainer"):
                stalled = workers.fault("stall", "Reply", sender="ps")
                with pytest.raises(RpcTimeoutError):
                    rpc.rpc_sync("ps", abs, (-1,))
                assert stalled.hits == 1
                workers.faults.clear()
                assert rpc.rpc_sync("ps", abs, (-1,)) == 1

                workers.fault("cut", "Call", receiver="ps", bytes=10)
                with pytest.raises(WorkerLostError):
                    rpc.rpc_sync("ps", abs, (-1,))
        """
        return self.faults.add(
            Fault(
                kind,
                types,
                self[sender].id if sender is not None else None,
                self[receiver].id if receiver is not None else None,
                count,
                seconds,
                bytes,
            )
        )

    def cut(self, one: str, other: str) -> None:
        """Cuts the connections between two workers; each of them then counts the other as lost.

        Args:
            one (str): A worker.
            other (str): The other worker.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        for here, there in ((self[one], self[other]), (self[other], self[one])):
            for link in here.agent.peer(there.id).links:
                link.fail("the connection was cut")

    def kill(self, which: str) -> None:
        """Ends a worker as ``kill -9`` ends a process: its connections close, without a goodbye.

        Args:
            which (str): The worker.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        self[which].abandon()

    # --- the end ------------------------------------------------------------------------------------------------

    def shutdown(self, graceful: bool = True, timeout: float = 30.0) -> None:
        """Shuts all workers down, each on a thread of its own, as they would in their processes.

        Args:
            graceful (bool, optional): As for :func:`telegrad.rpc.shutdown` (default: True).
            timeout (float, optional): Seconds that a graceful shutdown may take (default: 30).

        Raises:
            Exception: The first error of a worker.
        """
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
        if errors:
            raise errors[0]


@contextmanager
def cluster(*names: str | int, graceful: bool = True, **options: Any) -> Iterator[Cluster]:
    """Runs several workers in this process, over sockets, for tests of programs that use telegrad.

    Calls, references, autograd, optimizers and modules work as between processes: arguments are copied, functions run
    on the callee's threads. Inside ``with workers.on(name)`` the calling thread acts for a worker. Module-level
    variables are shared by all workers, since they are in one process.

    At the end all workers shut down, gracefully unless the block raised an exception.

    Args:
        *names (str): The names of the workers; or one int, for so many workers ``worker0``, ``worker1``, ….
        graceful (bool, optional): If False, the workers do not wait for each other at the end (default: True).
        **options (Any): ``threads``, ``timeout``, ``heartbeat`` and ``allow_pickle``, which are ``num_worker_threads``,
            ``rpc_timeout``, ``heartbeat`` and ``allow_pickle`` of ``RpcBackendOptions``.

    Returns:
        A context manager that gives a :class:`Cluster`.

    Raises:
        UsageError: A name cannot be the name of a worker.

    Example::

        >>> from telegrad.errors import WorkerLostError
        >>> from telegrad.testing import cluster
        >>> with cluster("trainer", "server", timeout=10) as workers, workers.on("trainer"):
        ...     print(rpc.rpc_sync("server", torch.add, args=(torch.ones(2), 1)))
        ...     workers.kill("server")
        ...     try:
        ...         rpc.rpc_sync("server", abs, args=(-1,))
        ...     except WorkerLostError:
        ...         print("lost")
        tensor([2., 2.])
        lost
    """
    if len(names) == 1 and isinstance(names[0], int):
        names = tuple(f"worker{number}" for number in range(names[0]))
    workers = Cluster([check_name(name) for name in names], AgentOptions(**options))
    try:
        yield workers
    except BaseException:
        workers.faults.clear()
        workers.shutdown(graceful=False)
        raise
    workers.faults.clear()
    workers.shutdown(graceful)
