"""The process under attack: a live worker, and a door by which members of its job come in.

``python -m tests.live_fuzz.victim`` with a :class:`Setup` on standard input; it says on standard output when it is
ready, and answers each line on standard input with its figures.
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import gc
import importlib
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
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._core.interface import Link
from telegrad._core.python.link import PythonLink
from telegrad._core.python.plane import PythonPlane
from telegrad._current import set_process_worker
from telegrad._transport.sockets import SocketStream, connect_unix, listen_unix
from telegrad._wire.frames import Frame
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


class CountedLink(PythonLink):
    """A link to a hostile worker that counts what came in, for all of them."""

    inputs = 0  # frames, and what broke a link
    _counting = threading.Lock()

    def receive(self) -> list[Frame]:
        frames = super().receive()
        self._count(len(frames))
        return frames

    def fail(self, reason: str) -> None:
        if not self.closed:
            self._count(1)
        super().fail(reason)

    @classmethod
    def _count(cls, more: int) -> None:
        with cls._counting:
            CountedLink.inputs += more


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
        assert isinstance(self.agent.plane, PythonPlane)
        self.plane = self.agent.plane
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
        return self._link(sock, peer.id, True)

    def _link(self, sock: socket.socket, peer_id: int, dialled: bool) -> Link:
        stream, plane = SocketStream(sock), self.plane
        if peer_id < FIRST_HOSTILE:
            return plane.adopt(stream, peer_id, dialled, self._setup.pid)
        return CountedLink(stream, peer_id, dialled, self._setup.pid, self.agent.marshal.buffers.lend, plane)

    def _let_in(self) -> None:
        while True:
            sock, _ = self._door.accept()
            (peer_id,) = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
            if peer_id >= FIRST_HOSTILE:
                self.forgive(peer_id)
            self.agent.accepted(self._link(sock, peer_id, False))

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
        self.agent.liveness.forget(peer_id)
        self.agent.marshal._peer_segments.pop(peer_id, None)
        self.worker.references._lost.discard(peer_id)
        self.worker.references.ledger._lost.discard(peer_id)  # type: ignore[arg-type]
        self.worker.autograd.registry._ended.pop(peer_id, None)
        fresh = Peer(record, self.agent.peer(peer_id).route)
        self.agent._peers[peer_id] = self.agent._names[record.name] = fresh

    # --- figures --------------------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        return {"inputs": CountedLink.inputs}

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
            "busy threads": len(self.plane._threads) - self.plane._scheduler.idle,
            "unfinished": self.plane.unfinished,
            "descriptors": process.num_fds(),
            "contexts": len(self.worker.autograd.registry),
            "values": len(references._owned),
            "references": sum(references.ledger.counts().values()),
            "broken references": len(references.broken),
            "calls": len(self.agent.calls),
            "running calls": self.plane.calls_running,
            "links": len(self.plane._poller.links),
            "owned links": len(self.plane._scheduler.owned),
            "borrowed segments": len(self.agent.marshal._borrowed),
        }

    def _wait_until_quiet(self) -> None:
        deadline = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < deadline and not self._is_quiet():
            time.sleep(0.01)

    def _is_quiet(self) -> bool:
        return not (self.plane.unfinished or self.agent.plane.pending)


class _Deaths(logging.Filter):
    """In a job a worker is lost once; these die all the time, and each loss is a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "is lost" not in record.msg


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("telegrad.agent").addFilter(_Deaths())
    setup = Setup(**json.loads(sys.stdin.readline()))
    importlib.import_module("torch._dynamo")  # 70 MB, which torch imports when a function first gets a meta tensor
    victim = Victim(setup)
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
