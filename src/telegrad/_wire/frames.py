"""Bytes to frames and back, without I/O.

A frame is a prefix (magic, length of the header, length of what follows it), the header, and the message's big buffers
one after the other.  The reader says where the next bytes should be stored, so that a big buffer is received into its
final memory and not copied.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad._wire.messages import Message
from telegrad.errors import ProtocolError

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"tgr\x01"
MAX_HEADER = 256 << 20
_CHUNK = 64 << 10


class Frame(NamedTuple):
    """One message and its buffers: writable memory that nothing else uses."""

    message: Message
    buffers: list[Any]


#: The prefix of a frame, made of the sizes of its header and of what follows.
prefix: Callable[[int, int], bytes] = functools.partial(PREFIX.pack, MAGIC)


class FrameReader:
    """Parses frames.  The caller stores bytes in ``space()`` and calls ``advance`` with their number."""

    def __init__(
        self,
        decode: Callable[[memoryview], Message],
        sizes: Callable[[Message], list[int]],
        allocate: Callable[[int], Any],
    ) -> None:
        self._decode = decode
        self._sizes = sizes
        self._allocate = allocate
        self._memory = memoryview(bytearray(_CHUNK))
        self._start = self._end = 0
        self._message: Message | None = None  # the message whose buffers are being filled
        self._buffers: list[Any] = []
        self._empty: memoryview | None = None  # the unfilled part of the last buffer
        self._sizes_left: list[int] = []  # sizes of buffers without memory yet, the last first

    def space(self) -> memoryview:
        """Where the next bytes should go; never empty."""
        if self._empty is not None:
            return self._empty
        return self._memory[self._end :] if self._end else self._memory

    def advance(self, count: int) -> list[Frame]:
        """Takes ``count`` bytes that were stored in the space; returns the frames that they complete."""
        frames: list[Frame] = []
        if self._empty is not None:
            self._fill(self._empty, count, frames)
            return frames
        self._end += count
        while self._end - self._start >= PREFIX.size:
            magic, header_size, stream_size = PREFIX.unpack_from(self._memory, self._start)
            if magic != MAGIC:
                raise ProtocolError(f"a frame begins with {magic!r} and not with {MAGIC!r}")
            if header_size > MAX_HEADER:
                raise ProtocolError(f"a header of {header_size:,} bytes is larger than {MAX_HEADER:,}")
            begin = self._start + PREFIX.size
            if self._end - begin < header_size:
                self._make_room(PREFIX.size + header_size)
                return frames
            self._start = begin + header_size
            message = self._decode(self._memory[begin : self._start])
            if stream_size == 0:
                frames.append(Frame(message, []))
            elif not self._open(message, stream_size, frames):
                break
        if self._start < self._end:
            self._make_room(PREFIX.size)
        else:
            self._start = self._end = 0
            if len(self._memory) > _CHUNK:
                self._memory = memoryview(bytearray(_CHUNK))
        return frames

    def _open(self, message: Message, stream_size: int, frames: list[Frame]) -> bool:
        """Copies the bytes already received into the message's buffers; True if that fills all of them."""
        sizes = self._sizes(message)
        if sum(sizes) != stream_size or min(sizes) <= 0:
            raise ProtocolError(f"{stream_size:,} bytes follow a header that announces {sum(sizes):,}")
        self._message = message
        self._sizes_left = sizes[::-1]
        self._open_buffer()
        while self._empty is not None and self._start < self._end:
            target = self._empty
            count = min(len(target), self._end - self._start)
            target[:count] = self._memory[self._start : self._start + count]
            self._start += count
            self._fill(target, count, frames)
        return self._empty is None

    def _open_buffer(self) -> None:
        """Allocates the next buffer.  One at a time, after the bytes before it have arrived: a header could announce
        many small buffers that take far more memory than itself."""
        size = self._sizes_left.pop()
        try:
            buffer = self._allocate(size)
        except (MemoryError, OverflowError, ValueError, OSError) as error:
            raise ProtocolError(f"no memory for the {size:,} bytes that a header announces: {error}") from error
        self._buffers.append(buffer)
        self._empty = memoryview(buffer)

    def _fill(self, target: memoryview, count: int, frames: list[Frame]) -> None:
        if count < len(target):
            self._empty = target[count:]
        elif self._sizes_left:
            self._open_buffer()
        else:
            assert self._message is not None
            frames.append(Frame(self._message, self._buffers))
            self._message, self._buffers, self._empty = None, [], None

    def _make_room(self, needed: int) -> None:
        """Moves the incomplete frame to the start of a buffer that can hold ``needed`` bytes."""
        held = self._end - self._start
        fits = self._start + needed <= len(self._memory)
        if self._end < len(self._memory) and (fits or self._start == 0):
            return
        rest = bytes(self._memory[self._start : self._end])
        if needed > len(self._memory):
            # Grows by doubling as bytes arrive, so that a large announced length alone takes no memory.
            self._memory = memoryview(bytearray(min(needed, max(_CHUNK, 2 * held))))
        self._memory[:held] = rest
        self._start, self._end = 0, held
