"""Big tensors there and back through ``rpc_sync``, from 1 MB to 256 MB (1 MB = 2**20 bytes)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.library import Library
from bench.row import Case, Near, Plan, Row, WrongReplyError

__all__ = ["ECHOES"]

_MB = 2**20
_STRIDE = 1024
"""One float in every 4 KB page carries the call's index, so that no page of an earlier call can pass for this one's."""


def echo(tensor: Tensor) -> Tensor:
    """Runs on the callee."""
    return tensor


class _Echo(Case[Tensor]):
    held = 1

    def __init__(self, library: Library, peer: str, *, megabytes: int) -> None:
        self._rpc_sync = library.rpc.rpc_sync
        self._peer = peer
        self._tensor = torch.arange(megabytes * _MB // 4, dtype=torch.float32)

    def prepare(self, index: int) -> None:
        self._tensor[::_STRIDE] = -1.0 - index

    def run(self, index: int) -> Tensor:
        return self._rpc_sync(self._peer, echo, args=(self._tensor,))  # type: ignore[no-any-return]

    def check(self, index: int, reply: Tensor) -> None:
        """The whole reply, and that it has memory of its own: writing to it must not reach the argument."""
        if reply.data_ptr() == self._tensor.data_ptr():
            raise WrongReplyError(f"echo {index} returned the argument's own memory")
        if reply.dtype != self._tensor.dtype or not torch.equal(reply, self._tensor):
            raise WrongReplyError(f"echo {index} came back changed")

    def finish(self, calls: int) -> None:
        """Two replies alive at once must not share memory either, as a careless buffer pool would have them do."""
        self.prepare(calls)
        first = self.run(calls)
        kept = self._tensor.clone()
        self.prepare(calls + 1)
        second = self.run(calls + 1)
        self.check(calls + 1, second)
        if not torch.equal(first, kept):
            raise WrongReplyError("an echo changed while its caller still held it")


def _row(megabytes: int, plan: Plan, quick: Plan | None, floor: float, goal: float) -> Row:
    return Row(
        name=f"echo_{megabytes}mb",
        title=f"echo {megabytes} MB",
        case=partial(_Echo, megabytes=megabytes),
        plan=plan,
        quick=quick,
        floor=floor,
        goal=goal,
        payload=2 * megabytes * _MB,
        near=Near("memcpy"),
    )


ECHOES = (
    _row(1, Plan(warmup=20, samples=200), Plan(warmup=1, samples=3), floor=1.5, goal=3.0),
    _row(16, Plan(warmup=5, samples=20), None, floor=2.0, goal=4.0),
    _row(64, Plan(warmup=3, samples=8), None, floor=3.0, goal=5.0),
    _row(256, Plan(warmup=2, samples=4), None, floor=3.0, goal=5.0),
)
