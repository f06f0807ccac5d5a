"""Pooled receive memory.

Copying 64 MB into memory just allocated runs at 0.2-1.5 GB/s, because the kernel has to fault in and clear each page;
into memory used before it runs at 8 GB/s.  So memory that a received tensor leaves behind is kept for the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Memory = NDArray[np.uint8]
T = TypeVar("T")

POOLED_FROM = 64 << 10
_HUGE_FROM = 2 << 20


class _Loan(weakref.ref[Memory], Generic[T]):
    """Remembers what an array was made of, which itself cannot be a dictionary's key."""

    __slots__ = ("behind",)
    behind: T


class Loans(Generic[T]):
    """Arrays that were handed out, each with what lies behind it; tells of those over which no tensor lives any more.

    What lies behind must not be an array: numpy would let views of a lent array refer to that one and not to the lent
    array, which would then seem unused.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Loan[T]] = {}
        # The callback of a weak reference may run anywhere, even inside this class: it only appends.
        self.back: deque[Any] = deque()  # what came back, and ``returned`` has yet to tell of

    def add(self, memory: Memory, behind: T) -> None:
        loan: _Loan[T] = _Loan(memory, self.back.append)
        loan.behind = behind
        self._lent[id(loan)] = loan

    def returned(self) -> Iterator[T]:
        """What came back since the last time."""
        while True:
            try:
                loan = self.back.popleft()
            except IndexError:
                return
            known = self._lent.pop(id(loan), None)
            if known is not None:
                yield known.behind

    def leave(self, which: Callable[[T], bool]) -> list[T]:
        """Forgets some of those that are still out: they will not come back."""
        chosen = [loan for loan in list(self._lent.values()) if which(loan.behind)]
        return [loan.behind for loan in chosen if self._lent.pop(id(loan), None) is not None]

    def __len__(self) -> int:
        return len(self._lent)


class Idle(Generic[T]):
    """Memory that nobody uses at the moment, by size class."""

    def __init__(self, keep_bytes: int) -> None:
        self.bytes = 0
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, list[T]] = {}
        self._spare: dict[int, int] = {}  # how many of a class were idle all the time since the last trim

    def take(self, size_class: int) -> T | None:
        with self._lock:
            segments = self._segments.get(size_class)
            if not segments:
                return None
            self.bytes -= size_class
            segment = segments.pop()
            self._spare[size_class] = min(self._spare.get(size_class, 0), len(segments))
            return segment

    def put(self, size_class: int, segment: T) -> bool:
        """Keeps it for the next; False if there is enough already."""
        with self._lock:
            if self.bytes + size_class > self._keep_bytes:
                return False
            self._segments.setdefault(size_class, []).append(segment)
            self.bytes += size_class
            return True

    def trim(self) -> None:
        """Gives up what nobody asked for since the last trim."""
        gone: list[T] = []  # freed when the lock is: unmapping takes long
        with self._lock:
            for size_class, segments in list(self._segments.items()):
                spare = self._spare.get(size_class, 0)
                gone += segments[:spare]
                del segments[:spare]
                self.bytes -= spare * size_class
                self._spare[size_class] = len(segments)
                if not segments:
                    del self._segments[size_class], self._spare[size_class]


class BufferPool:
    """Lends arrays of bytes; an array comes back by itself when the last tensor over it is gone."""

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._idle: Idle[mmap.mmap] = Idle(keep_bytes)
        self._loans: Loans[mmap.mmap] = Loans()

    def lend(self, size: int) -> Memory:
        """An array of that many bytes, with whatever was in it before."""
        if size < POOLED_FROM:
            return np.empty(size, np.uint8)
        self._collect()
        segment = self._idle.take(size_class(size)) or _new_segment(size_class(size))
        lent = np.frombuffer(segment, np.uint8, size)
        self._loans.add(lent, segment)
        return lent

    def _collect(self) -> None:
        for segment in self._loans.returned():
            self._idle.put(len(segment), segment)

    def trim(self) -> None:
        self._collect()
        self._idle.trim()

    def __repr__(self) -> str:
        return f"<BufferPool lent={len(self._loans)} idle={self._idle.bytes:,} bytes>"


def _new_segment(size: int) -> mmap.mmap:
    segment = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_FROM:
        with contextlib.suppress(OSError, AttributeError):
            segment.madvise(mmap.MADV_HUGEPAGE)
    return segment


def size_class(size: int) -> int:
    """The next of eight steps per power of two: at most an eighth is wasted, and a class is met again soon."""
    step = max((1 << size.bit_length()) >> 4, 4096)
    return -(-size // step) * step
