"""One small call in a context of its own: the price of a distributed backward pass as such."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bench.library import Library
from bench.row import Near, Plan, Row
from bench.rows.passes import RemoteTask, WholePass
from bench.rows.weights import multiply

__all__ = ["CONTEXT_SMALL", "OneCall"]


class OneCall(RemoteTask):
    """A 2x2 tensor times the callee's parameter."""

    def __init__(self, library: Library, peer: str) -> None:
        super().__init__(library, [peer])
        self._rpc_sync = library.rpc.rpc_sync
        self._peer = peer

    def remotely(self, tensor: Tensor) -> Tensor:
        return self._rpc_sync(self._peer, multiply, args=(tensor,))  # type: ignore[no-any-return]

    def locally(self, tensor: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return tensor * weights[0]


def _case(library: Library, peer: str) -> WholePass:
    return WholePass(library, OneCall(library, peer))


CONTEXT_SMALL = Row(
    name="context_small",
    title="context: one small call",
    case=_case,
    plan=Plan(warmup=50, samples=250),
    quick=Plan(warmup=2, samples=10),
    floor=3.0,
    goal=5.0,
    near=Near("hand_made_call"),
    modes=True,
)
