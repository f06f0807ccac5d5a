"""Gradients that have come to a leaf: into the context, never into ``.grad``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad._torch import is_view, post_accumulate_hooks, sparse_parts
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.context import Context
from telegrad.autograd.ddp import Swapping


class Leaves:
    def __init__(self) -> None:
        self.swapping = Swapping()  # while a context's gradient stands in ``.grad``, for a hook or an optimizer
        self.after: Callable[[Node, Tensor], None] | None = None  # called with each gradient that has come to a leaf

    def add(self, this: Pass, leaves: Sequence[Node], gradients: list[Tensor | None]) -> None:
        """Adds what leaves got, and takes it out of the list: each leaf gets memory that no other gradient has.

        Where nothing else holds a gradient, its leaf takes it over, as ``AccumulateGrad`` does locally.  All else is
        copied: what a custom function or a hook has kept, what several leaves got, and what goes to another worker.
        """
        differentiable = this.head.create_graph
        own: list[tuple[Node, Any, Tensor]] = []
        addresses = [None if differentiable or each is None else _own_address(each) for each in gradients]
        uses = Counter(addresses)
        for index, leaf in enumerate(leaves):
            gradient, address = gradients[index], addresses[index]
            gradients[index] = None
            if gradient is None:
                continue
            if differentiable:
                mine = gradient
            elif address is None or uses[address] > 1 or address in this.memory_in_use:
                mine = gradient.detach().clone()
            else:
                mine = gradient.data  # the same memory, in a tensor that does not keep the first one alive
                held_elsewhere = weakref.ref(gradient)
                del gradient
                if held_elsewhere() is not None:
                    mine = mine.clone()
                this.memory_in_use.add(address)
            own.append((leaf, leaf.variable, mine))  # type: ignore[attr-defined]
        # A hook may change a gradient in place, so none runs before each has its own memory.
        for leaf, variable, gradient in own:
            if self._hold_back(this, variable, gradient):
                continue
            this.context.add_gradient(variable, gradient)
            if post_accumulate_hooks(variable):
                self._after_accumulation(this.context, variable)
            if self.after is not None:
                with self.swapping.of([variable]):
                    self.after(leaf, gradient)

    @staticmethod
    def _hold_back(this: Pass, variable: Tensor, gradient: Tensor) -> bool:
        """Whether the gradient waits for a reduction of DDP."""
        if this.reductions is None:
            return False
        with this.lock:
            return this.reductions.hold_back(variable, gradient)

    def _after_accumulation(self, context: Context, variable: Any) -> None:
        """Hooks that expect to find the sum in ``.grad``, and may change it there."""
        with self.swapping.of([variable]):
            before = variable.grad
            variable.grad = context.gradient(variable)
            try:
                for hook in list((post_accumulate_hooks(variable) or {}).values()):
                    hook(variable)
                context.set_gradient(variable, variable.grad)
            finally:
                variable.grad = before


def address_of(gradient: Tensor) -> int:
    """Where the memory of a gradient begins; of a sparse one, that of its values: nothing changes its indices."""
    if gradient.layout is torch.sparse_coo:
        gradient = sparse_parts(gradient)[1]
    return gradient.untyped_storage().data_ptr() if gradient.layout is torch.strided else 0


def _own_address(gradient: Tensor) -> int | None:
    """The address of a gradient that is all of its memory; None if a leaf cannot keep it as it is."""
    if gradient.requires_grad or gradient.is_inference():
        return None
    if gradient.layout is torch.strided:
        values = gradient
        if is_view(gradient):
            return None
    elif gradient.layout is torch.sparse_coo:
        values = sparse_parts(gradient)[1]
    else:
        return None
    memory = values.untyped_storage()
    return memory.data_ptr() if memory.nbytes() == values.nbytes else None
