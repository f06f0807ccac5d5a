"""What runs on the workers that a backward pass goes through: each has one parameter, and multiplies with it."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.library import LIBRARIES

__all__ = ["gradient_of_weight", "hop", "multiply", "new_weight", "set_weight"]


def new_weight(value: float) -> Tensor:
    """Small whole numbers in double precision: no rounding, so gradients can be compared exactly."""
    return torch.full((2, 2), value, dtype=torch.float64).requires_grad_()


_weight = new_weight(1.0)


def set_weight(value: float) -> None:
    """So that each worker of a row has a parameter that differs from the others'."""
    _weight.data.fill_(value)


def multiply(tensor: Tensor) -> Tensor:
    """One step of a forward pass."""
    return tensor * _weight


def hop(tensor: Tensor, library: str, further: tuple[str, ...]) -> Tensor:
    """Multiply here, then on each of the further workers, by calls within calls."""
    product = multiply(tensor)
    if not further:
        return product
    call = LIBRARIES[library].rpc.rpc_sync
    return call(further[0], hop, args=(product, library, further[1:]))  # type: ignore[no-any-return]


def gradient_of_weight(library: str, context_id: int) -> Tensor | None:
    """What this worker's parameter got in a context."""
    return LIBRARIES[library].autograd.get_gradients(context_id).get(_weight)  # type: ignore[no-any-return]
