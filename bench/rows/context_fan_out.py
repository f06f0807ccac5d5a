"""One computed tensor goes into 8 calls at once, whose results are summed: their gradients meet in it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.library import Library
from bench.row import Plan, Row
from bench.rows.passes import RemoteTask, WholePass
from bench.rows.weights import multiply

__all__ = ["CONTEXT_FAN_OUT", "FanOut"]

_CALLS = 8


class FanOut(RemoteTask):
    """``calls`` calls of one worker, all in flight at once."""

    def __init__(self, library: Library, peer: str, calls: int = _CALLS) -> None:
        self._calls = calls
        self._peer = peer
        super().__init__(library, [peer])

    def remotely(self, tensor: Tensor) -> Tensor:
        rpc_async, computed = self.library.rpc.rpc_async, tensor * 2
        futures = [rpc_async(self._peer, multiply, args=(computed,)) for _ in range(self._calls)]
        return torch.stack([future.wait() for future in futures]).sum(0)

    def locally(self, tensor: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return tensor * 2 * weights[0] * self._calls


def _case(library: Library, peer: str) -> WholePass:
    return WholePass(library, FanOut(library, peer))


CONTEXT_FAN_OUT = Row(
    name="context_fan_out",
    title="context: fan-out to 8 calls",
    case=_case,
    plan=Plan(warmup=20, samples=100),
    quick=Plan(warmup=2, samples=5),
    floor=2.5,
    goal=4.0,
    modes=True,
)
