"""The whole way of a value over the wire, within one process: packed, encoded, framed, decoded, rebuilt."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from telegrad._transport.shared_memory import PeerSegments, Segment, SegmentPool
from telegrad._wire import codec, values
from telegrad._wire.frames import FrameReader, prefix
from telegrad._wire.messages import Body, InSegment, Reply
from telegrad._wire.unpack_tensors import unpack as unpack_tensors
from telegrad._wire.values import PackedValue, Route

#: How many examples a fuzz test runs; `make fuzz` asks for many.
FUZZ_EXAMPLES = int(os.environ.get("TELEGRAD_FUZZ_EXAMPLES", "300"))


@dataclass
class Trip:
    """What was sent, and what came out."""

    packed: PackedValue
    body: Body  # as the receiver read it
    tensors: list[Tensor]
    value: Any

    @property
    def pickled(self) -> bool:
        return self.packed.body.pickle >= 0

    @property
    def bytes_sent(self) -> int:
        """The sizes of all buffers, whichever way they went."""
        return sum(size_of(buffer) for buffer in self.packed.body.buffers)

    @property
    def ways(self) -> set[str]:
        names = {int: "stream", InSegment: "shared memory"}
        return {names.get(type(buffer), "inline") for buffer in self.packed.body.buffers}


def size_of(buffer: Any) -> int:
    if isinstance(buffer, int):
        return buffer
    return buffer.size if isinstance(buffer, InSegment) else len(buffer)


def frame_of(packed: PackedValue) -> bytes:
    header = codec.encode(Reply(1, packed.body))
    return b"".join([prefix(len(header), sum(map(len, packed.stream))), header, *packed.stream])


def feed(reader: FrameReader, data: bytes, at_most: int = 1 << 30) -> list[Any]:
    """Gives all of ``data`` to the reader, as a socket would; the frames that came out."""
    frames, done = [], 0
    while done < len(data):
        space = reader.space()
        count = min(len(space), at_most, len(data) - done)
        assert count > 0, "a reader without space looks like a closed connection"
        space[:count] = data[done : done + count]
        frames += reader.advance(count)
        done += count
    return frames


class Neighbours:
    """A sender and a receiver in one process, which share memory for buffers from a limit on."""

    def __init__(self, limit: int) -> None:
        token = secrets.token_bytes(32)
        self.limit = limit
        self.pool = SegmentPool(token)
        self.peer_segments = PeerSegments(os.getpid(), token)

    def to_segment(self, address: int, size: int) -> Segment | None:
        return self.pool.put(address, size) if size >= self.limit else None

    def borrow(self, body: Body) -> list[Any]:
        """What of a body lies in segments, as the receiver sees it."""
        shared = [buffer for buffer in body.buffers if isinstance(buffer, InSegment)]
        return [self.peer_segments.view(buffer.segment, buffer.fd, buffer.size) for buffer in shared]


def receive(
    body: Body, streamed: list[Any], rrefs: Any = (), allow_pickle: bool = True, borrowed: Any = ()
) -> tuple[list[Tensor], Any]:
    buffers = codec.complete(body, streamed, list(borrowed))
    tensors = unpack_tensors(body.tensors, buffers)
    return tensors, values.unpack(body, buffers, rrefs, tensors, allow_pickle)


def trip(value: Any, shared_from: int | None = None, rrefs: Any = (), **route: Any) -> Trip:
    """``shared_from``: buffers of this size or more go through shared memory, whose pool ends with the trip."""
    neighbours = Neighbours(shared_from) if shared_from is not None else None
    packed = values.pack(value, Route(1, **route), neighbours.to_segment if neighbours else None)
    reader = FrameReader(codec.decode, codec.stream_sizes, lambda size: np.empty(size, np.uint8))
    ((message, streamed),) = feed(reader, frame_of(packed))
    borrowed = neighbours.borrow(message.body) if neighbours else ()
    tensors, value = receive(message.body, streamed, rrefs, borrowed=borrowed)
    return Trip(packed, message.body, tensors, value)
