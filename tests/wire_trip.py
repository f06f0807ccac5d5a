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
from telegrad._wire.messages import Body, InPeer, Reply
from telegrad._wire.values import Parcel, Route

#: How many examples a fuzz test runs; `make fuzz` asks for many.
FUZZ_EXAMPLES = int(os.environ.get("TELEGRAD_FUZZ_EXAMPLES", "300"))


@dataclass
class Trip:
    """What was sent, and what came out."""

    parcel: Parcel
    body: Body  # as the receiver read it
    tensors: list[Tensor]
    value: Any

    @property
    def pickled(self) -> bool:
        return self.parcel.body.pickle >= 0

    @property
    def bytes_sent(self) -> int:
        """The sizes of all buffers, whichever way they went."""
        return sum(size_of(buffer) for buffer in self.parcel.body.buffers)

    @property
    def ways(self) -> set[str]:
        names = {int: "stream", InPeer: "lane"}
        return {names.get(type(buffer), "inline") for buffer in self.parcel.body.buffers}


def size_of(buffer: Any) -> int:
    if isinstance(buffer, int):
        return buffer
    return buffer.size if isinstance(buffer, InPeer) else len(buffer)


def frame_of(parcel: Parcel) -> bytes:
    header = codec.encode(Reply(1, parcel.body))
    return b"".join([prefix(len(header), sum(map(len, parcel.stream))), header, *parcel.stream])


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
    """A sender and a receiver in one process, and the lane between them for buffers from a limit on."""

    def __init__(self, limit: int) -> None:
        word = secrets.token_bytes(32)
        self.limit = limit
        self.shelf = SegmentPool(word)
        self.window = PeerSegments(os.getpid(), word)

    def lane(self, address: int, size: int) -> Segment | None:
        return self.shelf.put(address, size) if size >= self.limit else None

    def borrow(self, body: Body) -> list[Any]:
        """What of a body lies in segments, as the receiver sees it."""
        shared = [buffer for buffer in body.buffers if isinstance(buffer, InPeer)]
        return [self.window.view(buffer.segment, buffer.fd, buffer.size) for buffer in shared]


def receive(
    body: Body, streamed: list[Any], rrefs: Any = (), allow_pickle: bool = True, borrowed: Any = ()
) -> tuple[list[Tensor], Any]:
    buffers = codec.complete(body, streamed, list(borrowed))
    tensors = values.tensors_of(body, buffers)
    return tensors, values.unpack(body, buffers, rrefs, tensors, allow_pickle)


def trip(value: Any, lane_limit: int | None = None, rrefs: Any = (), **route: Any) -> Trip:
    """With a limit, bigger buffers go by a lane that ends with the trip; what came is the receiver's own."""
    neighbours = Neighbours(lane_limit) if lane_limit is not None else None
    parcel = values.pack(value, Route(1, **route), codec.encode, neighbours.lane if neighbours else None)
    reader = FrameReader(codec.decode, codec.stream_sizes, lambda size: np.empty(size, np.uint8))
    ((message, streamed),) = feed(reader, frame_of(parcel))
    borrowed = neighbours.borrow(message.body) if neighbours else ()
    tensors, value = receive(message.body, streamed, rrefs, borrowed=borrowed)
    return Trip(parcel, message.body, tensors, value)
