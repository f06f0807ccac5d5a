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

_OURS = 3  # references to a gradient that nobody else has: the sequence of them, a variable, and the question itself
_ALONE = 2  # references to its memory: the tensor, and the question itself
_references: Any = torch._C._storage_Use_Count


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
        """Adds what leaves got.  Each gradient gets memory of its own, so that a user may change it in place."""
        differentiable = this.head.create_graph
        own: list[tuple[Node, Any, Tensor]] = []
        for index, leaf in enumerate(leaves):
            gradient = gradients[index]
            if gradient is None:
                continue
            # A custom function, or a hook, may have kept it; torch hands one tensor to several leaves, or back what it
            # was given; and some of it may still be on its way to another worker.
            if not differentiable and (sys.getrefcount(gradient) > _OURS or not _has_own_memory(gradient)):
                gradient = gradient.detach().clone()
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


def _has_own_memory(gradient: Tensor) -> bool:
    """Whether it can be kept as it is: no other tensor has its memory, as far as torch knows, or a part of it.

    Indices may be another's: nobody changes them.
    """
    if gradient.requires_grad or gradient.is_inference():
        return False
    if gradient.layout is torch.strided:
        values, alone = gradient, _ALONE
    elif gradient.layout is torch.sparse_coo:
        values, alone = gradient._values(), _ALONE + 1  # the tensor's own, and an alias of it
    else:
        return False
    memory = values.untyped_storage()
    return memory.nbytes() == values.nbytes and bool(_references(memory._cdata) <= alone)
