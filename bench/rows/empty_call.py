"""A Python function that does nothing: the price of a call as such."""

from __future__ import annotations

from bench.library import Library
from bench.row import Case, Near, Plan, Row, WrongReplyError
from bench.rows.tally import Tally, noop

__all__ = ["EMPTY_CALL"]


class _EmptyCall(Case[None]):
    def __init__(self, library: Library, peer: str) -> None:
        self._rpc_sync = library.rpc.rpc_sync
        self._peer = peer
        self._tally = Tally(library, peer)

    def run(self, index: int) -> None:
        return self._rpc_sync(self._peer, noop)  # type: ignore[no-any-return]

    def check(self, index: int, reply: None) -> None:
        if reply is not None:
            raise WrongReplyError(f"call {index} returned {reply!r}, not None")

    def finish(self, calls: int) -> None:
        self._tally.expect(calls)


EMPTY_CALL = Row(
    name="empty_call",
    title="empty Python call",
    case=_EmptyCall,
    plan=Plan(warmup=100, samples=400),
    quick=Plan(warmup=5, samples=20),
    floor=3.0,
    goal=5.0,
    near=Near("round_trip", floor=3.0, goal=2.0),
)
