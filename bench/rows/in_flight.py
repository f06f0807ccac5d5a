"""A thousand empty calls in flight at once: the rate at which a library gets through a backlog."""

from __future__ import annotations

import torch

from bench.library import Library
from bench.row import Case, Plan, Row, WrongReplyError
from bench.rows.tally import Tally, noop

__all__ = ["IN_FLIGHT"]

_CALLS = 1000


class _InFlight(Case[list[None]]):
    held = 1

    def __init__(self, library: Library, peer: str) -> None:
        self._rpc_async = library.rpc.rpc_async
        self._peer = peer
        self._tally = Tally(library, peer)

    def run(self, index: int) -> list[None]:
        rpc_async, peer = self._rpc_async, self._peer
        return torch.futures.wait_all([rpc_async(peer, noop) for _ in range(_CALLS)])

    def check(self, index: int, reply: list[None]) -> None:
        if reply != [None] * _CALLS:
            raise WrongReplyError(f"batch {index} did not return {_CALLS} times None")

    def finish(self, calls: int) -> None:
        self._tally.expect(calls * _CALLS)


IN_FLIGHT = Row(
    name="in_flight",
    title="1,000 calls in flight",
    case=_InFlight,
    plan=Plan(warmup=2, samples=8),
    quick=Plan(warmup=1, samples=1),
    floor=3.0,
    goal=5.0,
    calls_per_sample=_CALLS,
)
