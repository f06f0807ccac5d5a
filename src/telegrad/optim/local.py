"""The part of a ``DistributedOptimizer`` that runs on an owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad._torch import tree_map_only
from telegrad._wire.callables import export
from telegrad.autograd.context import add_up
from telegrad.optim.fanout import local_tensors

Group = dict[str, Any]


class LocalOptimizer:
    def __init__(self, make: Any, groups: Sequence[Group], args: Sequence[Any], options: Group) -> None:
        own = [{**group, "params": local_tensors(group["params"])} for group in groups]
        self._parameters: list[Tensor] = [tensor for group in own for tensor in group["params"]]
        self._optimizer: torch.optim.Optimizer = make(own, *args, **options)
        self._kept: list[Tensor | None] = []  # gradients, for the next step; empty if none were kept

    @property
    def settings(self) -> tuple[Group, list[Group]]:
        """The defaults, and what is set for each group."""
        return self._optimizer.defaults, [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    def accumulate(self, context_id: int) -> int:
        """Keeps the gradients of a context for the next step; how many there are."""
        with current_worker().autograd.swapping:
            new = gradients_of(context_id, self._parameters)
            self._kept = self._with_kept(new)
            return _count(new)

    def _with_kept(self, new: list[Tensor | None]) -> list[Tensor | None]:
        if not self._kept:
            return new
        return [
            one if two is None else two if one is None else add_up(one, two)
            for one, two in zip(self._kept, new, strict=True)
        ]

    def step(self, context_id: int | None, changes: Sequence[Group]) -> int:
        """One step with the gradients of a context and those that were kept; how many parameters had one."""
        with current_worker().autograd.swapping.of(self._parameters):
            if context_id is None:
                gradients = self._kept or [None] * len(self._parameters)
            else:
                gradients = self._with_kept(gradients_of(context_id, self._parameters))
            self._kept = []
            for group, change in zip(self._optimizer.param_groups, changes, strict=False):
                group.update(change)
            with _in_place(self._parameters, gradients):
                self._optimizer.step()
            return _count(gradients)

    def forget(self) -> None:
        with current_worker().autograd.swapping:
            self._kept = []

    def state(self) -> dict[int, Any]:
        """By index among the parameters of this owner; copies, which the next step does not change."""
        with current_worker().autograd.swapping:
            live = self._optimizer.state_dict()["state"]
            state: dict[int, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), live)
            return state

    def load(self, state: dict[int, Any], settings: Sequence[Group]) -> None:
        with current_worker().autograd.swapping:
            known = self._optimizer.state_dict()["param_groups"]
            groups = [{**new, "params": old["params"]} for old, new in zip(known, settings, strict=True)]
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _count(gradients: Sequence[Tensor | None]) -> int:
    return len([gradient for gradient in gradients if gradient is not None])


@contextmanager
def _in_place(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside, ``.grad`` holds these gradients; after it, what it held before."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def gradients_of(context_id: int, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of these parameters in a context; none if this worker took no part, an error if it has ended."""
    return current_worker().autograd.registry.gradients_for(context_id, parameters)


# --- called by the driver; exported, so that they work without pickle -------------------------------------------------


@export
def make(
    optimizer: Any, groups: Sequence[Group], args: Sequence[Any], options: Group
) -> tuple[RRef[LocalOptimizer], tuple[Group, list[Group]]]:
    if isinstance(optimizer, str):
        optimizer = getattr(torch.optim, optimizer)
    local = LocalOptimizer(optimizer, groups, args, options)
    return RRef(local), local.settings


@export
def step(local: RRef[LocalOptimizer], context_id: int | None, changes: Sequence[Group]) -> int:
    return local.local_value().step(context_id, changes)


@export
def accumulate(local: RRef[LocalOptimizer], context_id: int) -> int:
    return local.local_value().accumulate(context_id)


@export
def forget(local: RRef[LocalOptimizer]) -> None:
    local.local_value().forget()


@export
def get_state(local: RRef[LocalOptimizer]) -> dict[int, Any]:
    return local.local_value().state()


@export
def set_state(local: RRef[LocalOptimizer], state: dict[int, Any], settings: Sequence[Group]) -> None:
    local.local_value().load(state, settings)
