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
from typing import Any

import numpy as np
from numpy.typing import NDArray

Memory = NDArray[np.uint8]

POOLED_FROM = 64 << 10
_HUGE_FROM = 2 << 20


class _Loan(weakref.ref[Memory]):
    """Remembers the slab of a lent array, which itself cannot be a dictionary's key."""

    __slots__ = ("slab",)
    slab: mmap.mmap


def _new_slab(size: int) -> mmap.mmap:
    """Fresh memory.  Not an array: numpy would let views of a lent array refer to the slab and not to the lent array,
    which would then seem unused."""
    slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_FROM:
        with contextlib.suppress(OSError, AttributeError):
            slab.madvise(mmap.MADV_HUGEPAGE)
    return slab


class BufferPool:
    """Lends arrays of bytes; an array comes back by itself when the last tensor over it is gone."""

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size class
        self._idle_bytes = 0
        self._lent: dict[int, _Loan] = {}
        # The callback of a weak reference may run anywhere, even inside this class: it only appends.
        self._returned: deque[Any] = deque()

    def lend(self, size: int) -> Memory:
        """An array of that many bytes, with whatever was in it before."""
        if size < POOLED_FROM:
            return np.empty(size, np.uint8)
        size_class = _size_class(size)
        with self._lock:
            self._collect()
            idle = self._idle.get(size_class)
            slab = idle.pop() if idle else None
            if slab is not None:
                self._idle_bytes -= size_class
        if slab is None:
            slab = _new_slab(size_class)
        lent = np.frombuffer(slab, np.uint8, size)
        loan = _Loan(lent, self._returned.append)
        loan.slab = slab
        self._lent[id(loan)] = loan
        return lent

    def _collect(self) -> None:
        while self._returned:
            slab = self._lent.pop(id(self._returned.popleft())).slab
            size = len(slab)
            if self._idle_bytes + size <= self._keep_bytes:
                self._idle.setdefault(size, []).append(slab)
                self._idle_bytes += size

    def trim(self) -> None:
        """Gives half of the idle memory back to the system; called now and then, so that what is unused fades away."""
        with self._lock:
            self._collect()
            for size_class, idle in list(self._idle.items()):
                gone = (len(idle) + 1) // 2
                del idle[:gone]
                self._idle_bytes -= gone * size_class
                if not idle:
                    del self._idle[size_class]

    def __repr__(self) -> str:
        return f"<BufferPool lent={len(self._lent)} idle={self._idle_bytes:,} bytes>"


def _size_class(size: int) -> int:
    """The next of eight steps per power of two: at most an eighth is wasted, and a class is met again soon."""
    step = max(1 << (size.bit_length() - 4), 4096)
    return -(-size // step) * step
