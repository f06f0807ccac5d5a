"""``torch.add`` by itself.  TensorPipe runs built-in operators without Python on the callee: its best case."""

from __future__ import annotations

import torch

from bench.library import Library
from bench.row import Plan, Row
from bench.rows.sums import Sum

__all__ = ["BUILTIN_OPERATOR"]


def _case(library: Library, peer: str) -> Sum:
    return Sum(library, peer, torch.add)


BUILTIN_OPERATOR = Row(
    name="builtin_operator",
    title="built-in operator",
    case=_case,
    plan=Plan(warmup=100, samples=400),
    quick=Plan(warmup=5, samples=20),
    floor=2.5,
    goal=4.0,
)
