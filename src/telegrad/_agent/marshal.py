"""Values to bodies and back, over one link: where shared memory, the references and the two interceptors come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._agent.peers import Peer
from telegrad._core.interface import Link
from telegrad._transport.buffers import BufferPool, Loans
from telegrad._transport.shared_memory import SHARED_FROM, PeerSegments, Segment, SegmentPool
from telegrad._wire import codec, values
from telegrad._wire.by_value import ReceivedFunctions
from telegrad._wire.messages import Body, InSegment, RRefFork, SegmentReleased
from telegrad._wire.unpack_tensors import unpack
from telegrad.errors import ProtocolError, SerializationError, TelegradError, WorkerLostError

Scope = AbstractContextManager[None]
Incoming = Callable[[int, Any, list[Tensor]], Scope | None]

_KEPT_SECONDS = 30.0  # a tensor that lives longer keeps its segment for good


class _Borrowed(NamedTuple):
    """A peer's segment, under a tensor of ours."""

    link: Link
    segments: PeerSegments
    segment: int
    since: float


class Marshal:
    """The outgoing interceptor is part of a peer's route; ``incoming`` and ``make_reference`` are set by the worker."""

    def __init__(self, peer: Callable[[int], Peer], allow_pickle: bool, token: bytes) -> None:
        self._peer = peer
        self.buffers = BufferPool()
        self.segments = SegmentPool(token)
        self.incoming: Incoming | None = None
        self.make_reference: Callable[[RRefFork, int], Any] = _no_references  # with the sender's id
        self._allow_pickle = allow_pickle
        self._peer_segments: dict[int, PeerSegments] = {}
        self._borrowed: Loans[_Borrowed] = Loans()
        self._functions = ReceivedFunctions()

    def pack(self, peer: Peer, link: Link, value: Any, answered: bool = False) -> values.PackedValue:
        """The link holds the value's segments until the peer gives them back, or the link breaks.

        ``answered``: the caller holds the references that it lends until the answer comes.
        """
        if self._borrowed.back:
            self.give_back()
        if value is None:
            extra = peer.route.outgoing(peer.id, []) if peer.route.outgoing is not None else None
            return values.PACKED_NONE if extra is None else values.PackedValue(Body(extra=extra))
        packed = values.pack(value, peer.route, self._to_segment if link.shares_memory else None, answered)
        for segment in packed.segments:
            link.held[segment.number] = segment
        return packed

    def bundle(self, peer: Peer, link: Link, recorded: bool) -> values.Bundle:
        """As ``pack``, for a list of tensors that may grow until ``close``; ``recorded``: the interceptor sees them."""
        if self._borrowed.back:
            self.give_back()
        return values.Bundle(peer.route, self._to_segment if link.shares_memory else None, recorded)

    def close(self, link: Link, bundle: values.Bundle) -> values.PackedValue:
        packed = bundle.packed()
        for segment in packed.segments:
            link.held[segment.number] = segment
        return packed

    def _to_segment(self, address: int, size: int) -> Segment | None:
        return self.segments.put(address, size) if size >= SHARED_FROM else None

    def segment_released(self, link: Link, message: SegmentReleased) -> None:
        segment = link.held.pop(message.segment, None)
        if segment is not None and not message.kept:
            self.segments.take_back(segment)

    def open(self, link: Link, body: Body, streamed: list[Any]) -> tuple[Any, Scope | None]:
        """The value of a body, and the scope in which the incoming interceptor wants it used."""
        scope = None
        incoming = self.incoming if body.extra is not None else None
        rrefs = [self.make_reference(fork, link.peer_id) for fork in body.rrefs] if body.rrefs else []
        buffers: Sequence[Any] = body.buffers
        for buffer in buffers:
            if type(buffer) is not bytearray:  # else all came inside the header, as most small ones do
                buffers = codec.complete(body, streamed, self._borrow(link, body))
                break
        tensors = unpack(body.tensors, buffers, recorded=incoming is not None) if body.tensors else []
        if incoming is not None:
            scope = incoming(link.peer_id, body.extra, tensors)
        return values.unpack(body, buffers, rrefs, tensors, self._allow_pickle), scope

    def function(self, link: Link, pickled: bytes) -> Any:
        """The function of a call that came without a name; None if it is part of the body."""
        if not self._allow_pickle:
            raise SerializationError(
                "the peer sent a function by value, and this worker takes none (allow_pickle=False)"
            )
        return self._functions.load(link.peer_id, pickled) if pickled else None

    def _borrow(self, link: Link, body: Body) -> list[Any]:
        """The buffers that lie in the peer's segments."""
        shared = [buffer for buffer in body.buffers if type(buffer) is InSegment]
        if not shared:
            return []
        if link.pid is None:
            raise ProtocolError(
                f"worker {self._peer(link.peer_id).name!r} names shared memory, but is not on this host"
            )
        self.give_back()
        peer = self._peer(link.peer_id)
        theirs = self._peer_segments.get(peer.id)
        if theirs is None:
            theirs = self._peer_segments[peer.id] = PeerSegments(link.pid, peer.record.shared_memory_token)
        views: list[Any] = []
        now = time.monotonic()
        for buffer in shared:
            try:
                memory = theirs.view(buffer.segment, buffer.fd, buffer.size)
            except OSError as error:
                for lost in shared[len(views) :]:
                    link.send(SegmentReleased(lost.segment))
                raise WorkerLostError(f"worker {peer.name!r} took {buffer.size:,} bytes away: {error}") from error
            self._borrowed.add(memory, _Borrowed(link, theirs, buffer.segment, now))
            views.append(memory)
        return views

    def give_back(self) -> None:
        """Tells the peers which of their segments are free: with the next message, since a send of its own would only
        wake them."""
        for loan in self._borrowed.returned():
            loan.link.send(SegmentReleased(loan.segment))

    def discard(self, link: Link, body: Body) -> None:
        """A body that nobody wants any more: lets go of what it holds over there."""
        for buffer in body.buffers:
            if type(buffer) is InSegment:
                link.send(SegmentReleased(buffer.segment))
        for fork in body.rrefs:
            try:
                self.make_reference(fork, link.peer_id)
            except TelegradError:
                pass  # a reference that the peer may not send: there is nothing to release

    def trim(self) -> None:
        """Called now and then: what was not used for a while goes back to the system, or to its present user."""
        self.give_back()
        for loan in self._borrowed.leave(lambda loan: time.monotonic() - loan.since > _KEPT_SECONDS):
            loan.segments.forget(loan.segment)
            loan.link.send(SegmentReleased(loan.segment, kept=True))
        self.buffers.trim()
        self.segments.trim()
        for theirs in list(self._peer_segments.values()):
            theirs.trim()


def _no_references(fork: RRefFork, sender: int) -> Any:
    raise TelegradError("a reference came to a worker that has no references")
