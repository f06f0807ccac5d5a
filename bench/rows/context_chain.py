"""A chain through 4 workers: each multiplies with a parameter of its own, and calls the next one to go on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bench.library import Library
from bench.row import CALLEES, CALLER, Near, Plan, Row
from bench.rows.passes import RemoteTask, WholePass
from bench.rows.weights import hop

__all__ = ["CONTEXT_CHAIN"]

_CHAIN = (CALLER, *CALLEES[:3])


class _Chain(RemoteTask):
    def __init__(self, library: Library) -> None:
        super().__init__(library, _CHAIN)

    def remotely(self, tensor: Tensor) -> Tensor:
        return hop(tensor, self.library.name, _CHAIN[1:])

    def locally(self, tensor: Tensor, weights: Sequence[Tensor]) -> Tensor:
        for weight in weights:
            tensor = tensor * weight
        return tensor


def _case(library: Library, peer: str) -> WholePass:
    return WholePass(library, _Chain(library))


CONTEXT_CHAIN = Row(
    name="context_chain",
    title="context: chain of 4 workers",
    case=_case,
    plan=Plan(warmup=20, samples=100),
    quick=Plan(warmup=2, samples=5),
    floor=2.5,
    goal=4.0,
    workers=len(_CHAIN),
    near=Near("hand_made_chain"),
    modes=True,
)
