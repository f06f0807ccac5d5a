"""Values to bodies and back, over one link: where the lane, the references and the two interceptors come in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from telegrad.agent.link import Link
from telegrad.agent.peers import Peer
from telegrad.errors import TelegradError, WorkerLostError
from telegrad.transport import lane
from telegrad.transport.buffers import BufferPool
from telegrad.wire import codec, values
from telegrad.wire.messages import Body, InPeer, RRefFork, Taken

Scope = AbstractContextManager[None]
Incoming = Callable[[int, Any, list[Tensor]], Scope | None]


class Bodies:
    """The outgoing interceptor is part of a peer's route; ``incoming`` and ``make_reference`` are set by the worker."""

    def __init__(self, allow_pickle: bool) -> None:
        self.buffers = BufferPool()
        self.incoming: Incoming | None = None
        self.make_reference: Callable[[RRefFork], Any] = _no_references
        self._allow_pickle = allow_pickle

    def pack(self, peer: Peer, link: Link, value: Any) -> values.Parcel:
        return values.pack(value, peer.route, codec.encode, lane.LANE_LIMIT if link.lane_open else None)

    def open(self, peer: Peer, link: Link, token: int, body: Body, streamed: list[Any]) -> tuple[Any, Scope | None]:
        """The value of a body, and the scope in which the incoming interceptor wants it used."""
        scope = None
        rrefs = [self.make_reference(fork) for fork in body.rrefs] if body.rrefs else []
        fetched = self._fetch(peer, link, token, body)
        buffers = codec.complete(body, streamed, fetched) if body.buffers else []
        tensors = values.tensors_of(body, buffers)
        if body.extra is not None and self.incoming is not None:
            scope = self.incoming(link.peer_id, body.extra, tensors)
        return values.unpack(body, buffers, rrefs, tensors, self._allow_pickle), scope

    def _fetch(self, peer: Peer, link: Link, token: int, body: Body) -> list[Any]:
        """Copies the buffers that wait in the peer's memory."""
        remote = [buffer for buffer in body.buffers if type(buffer) is InPeer]
        if not remote:
            return []
        fetched = []
        try:
            for buffer in remote:
                memory = self.buffers.lend(buffer.size)
                lane.fetch(peer.record.pid, buffer.address, memory, peer.name)
                fetched.append(memory)
        finally:
            link.post(Taken(token))  # with the answer, or the next call: a send of its own would only wake the peer
        if not link.peer_is_there():  # then it may have freed that memory while we read it
            raise WorkerLostError(f"worker {peer.name!r} went away while its memory was read")
        return fetched

    def discard(self, link: Link, token: int, body: Body) -> None:
        """A body that nobody wants any more: lets go of what it holds over there."""
        if any(type(buffer) is InPeer for buffer in body.buffers):
            link.post(Taken(token))
        for fork in body.rrefs:
            self.make_reference(fork)


def _no_references(fork: RRefFork) -> Any:
    raise TelegradError("a reference came to a worker that has no references")
