"""A Python function on two 2x2 tensors: the price of a tensor that is too small to matter."""

from __future__ import annotations

from torch import Tensor

from bench.library import Library
from bench.row import Plan, Row
from bench.rows.sums import Sum

__all__ = ["SMALL_TENSOR"]


def add(a: Tensor, b: Tensor) -> Tensor:
    """Runs on the callee."""
    return a + b


def _case(library: Library, peer: str) -> Sum:
    return Sum(library, peer, add)


SMALL_TENSOR = Row(
    name="small_tensor",
    title="small-tensor Python call",
    case=_case,
    plan=Plan(warmup=100, samples=400),
    quick=Plan(warmup=5, samples=20),
    floor=3.0,
    goal=5.0,
)
