"""Hooks of the AccumulateGrad nodes of leaves: ``p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)``.

A pass captures the gradient of a leaf and does not run its node, so such hooks would not fire.  A node does not tell
whether it has hooks, but torch calls a Python function when one is registered.  From then on the nodes of all leaves
run too, for their hooks only: what they write to ``.grad``, and what a prehook returns, is dropped.  This costs a call
of torch's engine for each leaf, and other threads may see such a ``.grad``, so it is done under ``telegrad.compat``
only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import _HookMixin
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from telegrad.autograd.accumulate import Leaves

_seen = [False]


def watch(leaves: Leaves) -> None:
    """Replaces torch's function that registers hooks, so that hooks of the nodes of these leaves fire."""

    def after(leaf: Node, gradient: Tensor) -> None:
        if _seen[0]:
            fire(leaf, gradient, leaves)

    leaves.after = after
    register: Any = _HookMixin._register_hook
    if hasattr(register, "_telegrad"):
        return

    def remember(backward_hooks: Any, hook: Any) -> Any:
        _seen[0] = True
        return register(backward_hooks, hook)

    remember._telegrad = True  # type: ignore[attr-defined]
    _HookMixin._register_hook = staticmethod(remember)  # type: ignore[method-assign]


def fire(leaf: Node, gradient: Tensor, leaves: Leaves) -> None:
    """Runs the node of a leaf.  The hooks of its tensor have fired, or will, elsewhere."""
    variable: Any = leaf.variable  # type: ignore[attr-defined]
    with leaves.swapping:
        before, variable.grad = variable.grad, None
        taken = [(hooks, dict(hooks)) for hooks in _tensor_hooks(variable)]
        for hooks, _ in taken:
            hooks.clear()
        try:
            _engine_run_backward((GradientEdge(leaf, 0),), (gradient,), False, False, (), True, accumulate_grad=True)
        finally:
            for hooks, kept in taken:
                hooks.update(kept)
            variable.grad = before


def _tensor_hooks(variable: Any) -> list[Any]:
    return [hooks for hooks in (variable._backward_hooks, variable._post_accumulate_grad_hooks) if hooks]
