"""Workers of one process over socket pairs, with a record of every frame that they send."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.peers import Peer, WorkerRecord
from telegrad._core.interface import Link
from telegrad._current import acting_as
from telegrad._transport.shared_memory import Proof
from telegrad._transport.sockets import SocketStream
from telegrad._wire.frames import PREFIX
from telegrad._wire.values import Route
from telegrad._worker import Worker


class RecordedStream(SocketStream):
    """Keeps what it sends."""

    def __init__(self, sock: socket.socket, dialled: bool, into: list[tuple[bool, bytearray]]) -> None:
        super().__init__(sock)
        self._record = bytearray()
        into.append((dialled, self._record))

    def send(self, buffers: Sequence[Any], deadline: float = float("inf")) -> Sequence[memoryview]:
        rest = super().send(buffers, deadline)
        sent = b"".join(buffers)
        self._record += sent[: len(sent) - sum(len(view) for view in rest)]
        return rest


class RecordedJob:
    """``streams``: of each end of each connection, whether it was the end that dialled, and all that it sent."""

    def __init__(self, names: Sequence[str], allow_pickle: bool, proof: Proof) -> None:
        self.streams: list[tuple[bool, bytearray]] = []
        self._lock = threading.Lock()
        options = AgentOptions(allow_pickle=allow_pickle, timeout=20.0)
        records = [
            WorkerRecord(
                number,
                name,
                os.getpid(),
                shared_memory_fd=proof.fd,
                shared_memory_token=proof.token,
                allow_pickle=allow_pickle,
            )
            for number, name in enumerate(names)
        ]
        self._workers = {
            record.name: Worker(record, options, self._dial, lambda to: Route(to.worker_id, allow_pickle))
            for record in records
        }
        for worker in self._workers.values():
            for record in records:
                worker.add_peer(record)
        for worker in self._workers.values():
            worker.start()

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def _dial(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        callee = self._workers[peer.name].agent
        if callee.closing:
            raise ConnectionRefusedError(f"worker {peer.name!r} is not there")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            link = self._link(here, agent, peer.id, True)
            accepted = self._link(there, callee, agent.me.worker_id, False)
        callee.accepted(accepted)
        return link

    def _link(self, sock: socket.socket, agent: Agent, peer_id: int, dialled: bool) -> Link:
        stream = RecordedStream(sock, dialled, self.streams)
        return agent.plane.adopt(stream, peer_id, dialled, os.getpid())

    def frames(self) -> Iterator[tuple[bool, bytes]]:
        """Each frame, with whether the side that had dialled sent it."""
        for dialled, data in self.streams:
            at = 0
            while len(data) - at >= PREFIX.size:
                _, header_size, stream_size = PREFIX.unpack_from(data, at)
                end = at + PREFIX.size + header_size + stream_size
                if end > len(data):
                    break
                yield dialled, bytes(data[at:end])
                at = end

    @contextmanager
    def on(self, name: str) -> Iterator[Worker]:
        with acting_as(self._workers[name]) as worker:
            yield worker

    def segments(self) -> list[Any]:
        """Shared memory that frames name; whoever sends them again must keep it."""
        return [segment for worker in self._workers.values() for segment in worker.agent.marshal.segments._segments]

    def shutdown(self) -> None:
        workers = list(self._workers.values())
        threads = [threading.Thread(target=worker.shutdown, args=(True, 20.0), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)


@contextmanager
def recorded_job(*names: str, allow_pickle: bool, proof: Proof) -> Iterator[RecordedJob]:
    job = RecordedJob(names, allow_pickle, proof)
    try:
        yield job
    finally:
        job.shutdown()
