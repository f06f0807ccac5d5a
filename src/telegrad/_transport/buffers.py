"""Pools of memory for received buffers.

Copying 64 MB into newly allocated memory runs at 0.2-1.5 GB/s, because the kernel must fault in and clear each page;
into memory used before it runs at 8 GB/s.  So the memory of a received tensor is kept for the next one.
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

POOLED_FROM = 64 << 10  # bytes from which a buffer comes from the pool
_HUGE_FROM = 2 << 20  # bytes from which huge pages are requested


class _Loan(weakref.ref[Memory], Generic[T]):
    """A weak reference to a lent array, with the memory behind it: arrays are not hashable."""

    __slots__ = ("behind",)
    behind: T


class Loans(Generic[T]):
    """Arrays that were lent, each with the memory behind it; reports those that no tensor uses any more.

    The memory behind must not be an array: views of a lent array would refer to that one and not to the lent array,
    which would then seem unused.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Loan[T]] = {}
        # The callback of a weak reference may run anywhere, even inside this class, so it only appends.
        self.back: deque[Any] = deque()  # weak references whose array is gone, for ``returned``

    def add(self, memory: Memory, behind: T) -> None:
        loan: _Loan[T] = _Loan(memory, self.back.append)
        loan.behind = behind
        self._lent[id(loan)] = loan

    def returned(self) -> Iterator[T]:
        """The memory behind arrays that are gone since the last call."""
        while True:
            try:
                loan = self.back.popleft()
            except IndexError:
                return
            known = self._lent.pop(id(loan), None)
            if known is not None:
                yield known.behind

    def leave(self, which: Callable[[T], bool]) -> list[T]:
        """Stops tracking the chosen arrays that are still in use; returns the memory behind them."""
        chosen = [loan for loan in list(self._lent.values()) if which(loan.behind)]
        return [loan.behind for loan in chosen if self._lent.pop(id(loan), None) is not None]

    def __len__(self) -> int:
        return len(self._lent)


class Idle(Generic[T]):
    """Unused memory, by size class."""

    def __init__(self, keep_bytes: int) -> None:
        self.bytes = 0
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, list[T]] = {}
        self._spare: dict[int, int] = {}  # per class, how many were unused all the time since the last trim

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
        """Keeps it for the next ``take``; False if ``keep_bytes`` would be exceeded."""
        with self._lock:
            if self.bytes + size_class > self._keep_bytes:
                return False
            self._segments.setdefault(size_class, []).append(segment)
            self.bytes += size_class
            return True

    def trim(self) -> None:
        """Frees what was unused all the time since the last trim."""
        gone: list[T] = []  # freed after the lock is released: unmapping is slow
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
    """Lends arrays of bytes; an array returns to the pool when the last tensor over it is gone."""

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._idle: Idle[mmap.mmap] = Idle(keep_bytes)
        self._loans: Loans[mmap.mmap] = Loans()

    def lend(self, size: int) -> Memory:
        """An array of that many bytes, not cleared."""
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
    """The size rounded up to one of eight steps per power of two: at most an eighth is wasted, and sizes recur."""
    step = max((1 << size.bit_length()) >> 4, 4096)
    return -(-size // step) * step
