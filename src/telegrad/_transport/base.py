"""The interface of a connection: a stream of bytes to one peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    """A byte stream to one peer, written by one thread at a time and read by one thread at a time."""

    def fileno(self) -> int:
        """The descriptor to poll: when it is readable, call ``recv_into``."""

    def recv_into(self, buffer: memoryview) -> int:
        """Reads without blocking.  ``BlockingIOError``: no bytes now.  0: the peer has closed."""

    def send(
        self, buffers: Sequence[bytes | bytearray | memoryview], deadline: float = math.inf
    ) -> Sequence[memoryview]:
        """Blocks until the kernel has taken all bytes, or until the deadline.  Returns the rest, which must be sent
        before anything else.  ``OSError``: the peer is gone."""

    def watch_host(self, seconds: float) -> None:
        """Makes the connection break when the peer's host does not respond for about that long."""

    def host_is_silent(self, seconds: float) -> bool:
        """Whether the peer's host has acknowledged nothing for that long, although there is unacknowledged data."""

    def close(self) -> None:
        """Closes both directions and wakes a thread that is blocked in ``send``.  May be called twice."""

    def disown(self) -> None:
        """In a forked child: closes this process's descriptor without shutting down the parent's connection."""
