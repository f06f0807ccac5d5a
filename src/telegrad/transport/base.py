"""What the agent asks of a transport: a stream of bytes to one peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    """A byte stream to one peer, written by one thread at a time and read by one thread at a time."""

    def fileno(self) -> int:
        """The descriptor whose readability means that ``recv_into`` has something to say."""

    def recv_into(self, buffer: memoryview) -> int:
        """Reads without blocking.  ``BlockingIOError``: nothing there now.  0: the peer has closed."""

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Blocks until the kernel has all the bytes.  ``OSError``: the peer is gone."""

    def close(self) -> None:
        """Closes both directions and wakes a thread that is blocked in ``send``.  May be called twice."""

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptor, and leaves the connection to the parent."""
