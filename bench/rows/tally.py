"""The empty function of the rows that call one, with a tally.

The tally costs some 40 ns and shows at the end of a round that every call really ran on the callee, once: a reply of
``None`` alone would not.  ``itertools.count`` is atomic under the interpreter lock, so worker threads may share it.
"""

from __future__ import annotations

import itertools

from bench.library import Library
from bench.row import WrongReplyError

__all__ = ["Tally", "noop"]

_calls = itertools.count()


def noop() -> None:
    """Runs on the callee."""
    next(_calls)


def _bump() -> int:
    return next(_calls)


class Tally:
    """Reads the callee's tally now, and later checks how far it has come."""

    def __init__(self, library: Library, peer: str) -> None:
        self._library = library
        self._peer = peer
        self._start: int = library.rpc.rpc_sync(peer, _bump)

    def expect(self, calls: int) -> None:
        """Raise unless exactly ``calls`` calls of ``noop`` ran since this tally was made."""
        ran = self._library.rpc.rpc_sync(self._peer, _bump) - self._start - 1
        if ran != calls:
            raise WrongReplyError(f"{calls} calls were answered, but {ran} ran on the callee")
