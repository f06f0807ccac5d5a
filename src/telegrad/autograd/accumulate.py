"""Puts the gradients of leaves into the context, never into ``.grad``."""

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
        self.swapping = Swapping()  # while a gradient of a context is in ``.grad``, for a hook or an optimizer
        self.after: Callable[[Node, Tensor], None] | None = None  # called with each leaf and its gradient

    def add(self, this: Pass, leaves: Sequence[Node], gradients: list[Tensor | None]) -> None:
        """Adds the gradients of leaves, and takes them out of the list.  Each leaf gets memory of its own.

        If nothing else refers to a gradient, its leaf takes it over, as ``AccumulateGrad`` does locally.  Others are
        copied: those that a custom function or a hook has kept, that several leaves got, or that go to another worker.
        """
        differentiable = this.head.create_graph
        own: list[tuple[Node, Any, Tensor]] = []
        addresses = [None if differentiable or each is None else _own_address(each) for each in gradients]
        uses = Counter(addresses) if len(addresses) > 1 else {}
        for index, leaf in enumerate(leaves):
            gradient, address = gradients[index], addresses[index]
            gradients[index] = None
            if gradient is None:
                continue
            if differentiable:
                mine = gradient
            elif address is None or uses.get(address, 1) > 1 or address in this.memory_in_use:
                mine = gradient.detach().clone()
            else:
                mine = gradient.data  # the same memory, in a tensor that does not keep the first one alive
                held_elsewhere = weakref.ref(gradient)
                del gradient
                if held_elsewhere() is not None:
                    mine = mine.clone()
                this.memory_in_use.add(address)
            own.append((leaf, leaf.variable, mine))  # type: ignore[attr-defined]
        # A hook may change a gradient in place, so each has its own memory before the first hook runs.
        for leaf, variable, gradient in own:
            if this.reductions is not None:
                with this.lock:
                    held_back = this.reductions.hold_back(variable, gradient)
                if held_back:
                    continue
            this.context.add_gradient(variable, gradient)
            if post_accumulate_hooks(variable):
                self._after_accumulation(this.context, variable)
            if self.after is not None:
                with self.swapping.of([variable]):
                    self.after(leaf, gradient)

    def _after_accumulation(self, context: Context, variable: Any) -> None:
        """Calls hooks that expect the sum in ``.grad``, and may change it there."""
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
    """Address of the memory of a gradient; of a sparse one, of its values: nothing changes its indices."""
    if gradient.layout is torch.sparse_coo:
        gradient = sparse_parts(gradient)[1]
    return gradient.untyped_storage().data_ptr() if gradient.layout is torch.strided else 0


def _own_address(gradient: Tensor) -> int | None:
    """Address of a gradient that fills its memory; None if a leaf cannot keep it as it is."""
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
