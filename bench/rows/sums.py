"""Sums of two 2x2 tensors, shared by the rows that add remotely: only the function that adds differs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.library import Library
from bench.row import Case, WrongReplyError

__all__ = ["Sum"]

_DISTINCT = 64
"""Argument pairs are made once and used in turn; no two neighbours have the same sum."""


class Sum(Case[Tensor]):
    """``function(a, b)`` on the callee, where ``function`` adds."""

    def __init__(self, library: Library, peer: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._rpc_sync = library.rpc.rpc_sync
        self._peer = peer
        self._function = function
        base = torch.arange(4, dtype=torch.float32).reshape(2, 2)
        self._arguments = [(base + turn, base * turn) for turn in range(_DISTINCT)]
        self._sums = [a + b for a, b in self._arguments]

    def run(self, index: int) -> Tensor:
        return self._rpc_sync(self._peer, self._function, args=self._arguments[index % _DISTINCT])  # type: ignore[no-any-return]

    def check(self, index: int, reply: Tensor) -> None:
        expected = self._sums[index % _DISTINCT]
        if reply.dtype != expected.dtype or not torch.equal(reply, expected):
            raise WrongReplyError(f"call {index} returned {reply}, not {expected}")
