"""Gradients that have come to a leaf: into the context, never into ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.context import Context
from telegrad.autograd.passes import Pass
from telegrad.autograd.reducers import Swapping

_OURS = 3  # references to a gradient that nobody else has: the engine's result, a variable, and the question itself


class Leaves:
    def __init__(self) -> None:
        self.swapping = Swapping()  # while a context's gradient stands in ``.grad``, for a hook or an optimizer
        self.after: Callable[[Node, Tensor], None] | None = None  # called with each gradient that has come to a leaf

    def add(
        self,
        this: Pass,
        leaves: Sequence[Node],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Adds what torch's engine computed."""
        if not leaves:
            return
        differentiable = this.head.create_graph
        taken = set() if differentiable else {_address(tensor) for tensor in this.root_gradients}
        own: list[tuple[Node, Any, Tensor]] = []
        for index, leaf in enumerate(leaves):
            gradient = gradients[index]
            if gradient is None:
                continue
            if not differentiable:
                # A custom function, or a hook, may have kept what it returned.
                gradient = gradient.clone() if sys.getrefcount(gradient) > _OURS else _own(gradient, taken)
            own.append((leaf, leaf.variable, gradient))  # type: ignore[attr-defined]
        # A hook may change a gradient in place, so none runs before each has its own memory.
        for leaf, variable, gradient in own:
            if not this.add_gradient(variable, gradient):
                continue
            if variable._post_accumulate_grad_hooks:
                self._after_accumulation(this.context, variable)
            if self.after is not None:
                with self.swapping.of([variable]):
                    self.after(leaf, gradient)

    def _after_accumulation(self, context: Context, variable: Any) -> None:
        """Hooks that expect to find the sum in ``.grad``, and may change it there."""
        with self.swapping.of([variable]):
            before = variable.grad
            variable.grad = context.gradient(variable)
            try:
                for hook in list(variable._post_accumulate_grad_hooks.values()):
                    hook(variable)
                context.set_gradient(variable, variable.grad)
            finally:
                variable.grad = before


def _address(tensor: Tensor) -> int:
    """Equal for tensors that share memory; 0 where there is none to share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _own(gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient in memory of its own: torch hands one tensor to several leaves, or back what it was given."""
    if gradient.layout is torch.strided:
        parts: tuple[Tensor, ...] = (gradient,)
    elif gradient.layout is torch.sparse_coo:
        parts = (gradient._indices(), gradient._values())
    else:
        return gradient.clone()
    addresses = set()
    for part in parts:
        memory = part.untyped_storage()
        address = memory.data_ptr()
        if address in taken or memory.nbytes() != part.nbytes:
            return gradient.clone()
        addresses.add(address)
    taken |= addresses
    return gradient
