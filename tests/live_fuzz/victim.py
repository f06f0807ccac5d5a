"""The process under attack: a live worker, and a door by which members of its job come in.

``python -m tests.live_fuzz.victim`` with a :class:`Setup` on standard input; it says on standard output when it is
ready, and answers each line on standard input with its figures.
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import gc
import json
import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.link import Link, StreamLink
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._current import set_process_worker
from telegrad._transport.sockets import SocketStream, connect_unix, listen_unix
from telegrad._wire.values import Route
from telegrad._worker import Worker

from . import functions  # noqa: F401 (what others may call)

VICTIM, HONEST, FIRST_HOSTILE = 0, 1, 2
HELLO = struct.Struct("<I")  # who comes in, or who dials out
_SPARE_MEMORY = 3 << 30  # bytes that the process may allocate beyond what it has when it is ready
_QUIET_SECONDS = 30.0


@dataclass(frozen=True)
class Setup:
    hostile: int  # how many
    attacker: str  # where the attacker listens for what the victim dials
    honest: str  # where the honest worker does
    pid: int  # of both
    shared_memory_fd: int
    shared_memory_token: str  # base64
    allow_pickle: bool

    def records(self) -> list[WorkerRecord]:
        token = base64.b64decode(self.shared_memory_token)
        names = ["victim", "honest", *(f"hostile{number}" for number in range(self.hostile))]
        return [
            WorkerRecord(
                number,
                name,
                self.pid,
                shared_memory_fd=self.shared_memory_fd,
                shared_memory_token=token,
                allow_pickle=self.allow_pickle,
            )
            for number, name in enumerate(names)
        ]


class Counting:
    """Between the links and the agent: counts what came in."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.frames = 0
        self.broken = 0

    def arrived(self, link: Any, frames: Any) -> Any:
        if link.peer_id >= FIRST_HOSTILE:
            self.frames += len(frames)
        return self._agent.arrived(link, frames)

    def link_broken(self, link: Any, reason: str) -> None:
        if link.peer_id >= FIRST_HOSTILE:
            self.broken += 1
        self._agent.link_broken(link, reason)


class Victim:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._records = setup.records()
        options = AgentOptions(allow_pickle=setup.allow_pickle, timeout=20.0)
        self.worker = Worker(
            self._records[VICTIM], options, self._dial, lambda to: Route(to.worker_id, setup.allow_pickle)
        )
        for record in self._records:
            self.worker.add_peer(record)
        self.agent = self.worker.agent
        self.events = Counting(self.agent)
        self._gone = {record.worker_id: threading.Event() for record in self._records}
        self._handlers = list(self.agent.lost_handlers)
        self.agent.lost_handlers[:] = [self._after_loss]
        self.worker.start()
        set_process_worker(self.worker)
        self._door, self.address = listen_unix()
        threading.Thread(target=self._let_in, name="door", daemon=True).start()

    # --- links ----------------------------------------------------------------------------------------------------

    def _dial(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        address = self._setup.honest if peer.id == HONEST else self._setup.attacker
        sock = connect_unix(address, timeout)
        sock.sendall(HELLO.pack(peer.id))
        link = self._link(sock, peer.id, True)
        link.start()
        return link

    def _link(self, sock: socket.socket, peer_id: int, dialled: bool) -> StreamLink:
        lend = self.agent.marshal.buffers.lend
        return StreamLink(SocketStream(sock), peer_id, dialled, self.agent.pool, self.events, lend, self._setup.pid)

    def _let_in(self) -> None:
        while True:
            sock, _ = self._door.accept()
            (peer_id,) = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
            if peer_id >= FIRST_HOSTILE:
                self.forgive(peer_id)
            link = self._link(sock, peer_id, False)
            self.agent.accepted(link)
            link.start()

    # --- a hostile worker is lost for good; here it gets another life ---------------------------------------------

    def _after_loss(self, worker: int) -> None:
        try:
            for handler in self._handlers:
                handler(worker)
        finally:
            self._gone[worker].set()

    def lose(self, peer_id: int) -> None:
        """Ends what is left of a worker's life, and waits until all know of its end."""
        peer = self.agent.peer(peer_id)
        self.agent.peer_gone(peer, PeerState.LOST, "it starts again")
        if not self._gone[peer_id].wait(_QUIET_SECONDS):
            raise TimeoutError(f"the handlers of the loss of worker {peer_id} have not run: {self.agent!r}")
        for link in peer.links:  # of one that left
            link.close()

    def forgive(self, peer_id: int) -> None:
        """As if a worker of that name had never been."""
        self.lose(peer_id)
        self._gone[peer_id].clear()
        record = self._records[peer_id]
        self.agent.mail.lost(peer_id)
        self.agent.liveness.forget(peer_id)
        self.agent.marshal._peer_segments.pop(peer_id, None)
        self.worker.references._lost.discard(peer_id)
        self.worker.references.ledger._lost.discard(peer_id)  # type: ignore[arg-type]
        self.worker.autograd.registry._ended.pop(peer_id, None)
        fresh = Peer(record, self.agent.peer(peer_id).route)
        self.agent._peers[peer_id] = self.agent._names[record.name] = fresh

    # --- figures --------------------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        return {"inputs": self.events.frames + self.events.broken}

    def measure(self) -> dict[str, int]:
        """What is there when all hostile workers are gone."""
        for record in self._records[FIRST_HOSTILE:]:
            self.forgive(record.worker_id)
        self._wait_until_quiet()
        gc.collect()
        self.worker.references.let_go()
        self._wait_until_quiet()  # what was collected is let go of by the pool
        self.agent.marshal.trim()
        ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        references = self.worker.references
        return self.count() | {
            "memory": process.memory_info().rss,
            "threads": process.num_threads(),
            "busy": self.agent.pool.busy,
            "descriptors": process.num_fds(),
            "contexts": len(self.worker.autograd.registry),
            "values": len(references._owned),
            "references": sum(references.ledger.counts().values()),
            "broken references": len(references.broken),
            "calls": len(self.agent.calls),
            "lent": len(self.agent._lent),
            "notes": self.agent.mail.unacknowledged,
        }

    def _wait_until_quiet(self) -> None:
        deadline = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < deadline and not self._is_quiet():
            time.sleep(0.01)

    def _is_quiet(self) -> bool:
        return not (self.agent.pool.busy or len(self.agent.calls) or len(self.agent.pool._backlog))


class _Deaths(logging.Filter):
    """In a job a worker is lost once; these die all the time, and each loss is a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "is lost" not in record.msg


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("telegrad.agent").addFilter(_Deaths())
    victim = Victim(Setup(**json.loads(sys.stdin.readline())))
    # What asks for more gets an error, and does not take the machine along.
    here = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (here + _SPARE_MEMORY, here + _SPARE_MEMORY))
    _say({"address": victim.address, "pid": os.getpid()})
    for line in sys.stdin:
        match line.strip():
            case "count":
                _say(victim.count())
            case "measure":
                _say(victim.measure())
            case "stacks":
                faulthandler.dump_traceback(all_threads=True)
                _say({})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def encode_setup(setup: Setup) -> str:
    return json.dumps(asdict(setup)) + "\n"


if __name__ == "__main__":
    main()
