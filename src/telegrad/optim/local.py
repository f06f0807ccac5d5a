"""What runs on an owner: its part of a ``DistributedOptimizer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import add_up
from telegrad.current import current_worker
from telegrad.optim.owners import local_tensors
from telegrad.rref.rref import RRef

Group = dict[str, Any]


class LocalOptimizer:
    def __init__(self, make: Any, groups: Sequence[Group], args: Sequence[Any], options: Group) -> None:
        own = [{**group, "params": local_tensors(group["params"])} for group in groups]
        self._parameters: list[Tensor] = [tensor for group in own for tensor in group["params"]]
        self._optimizer: torch.optim.Optimizer = make(own, *args, **options)
        self._accumulated: dict[Tensor, Tensor] = {}

    @property
    def settings(self) -> tuple[Group, list[Group]]:
        """The defaults, and what is set for each group."""
        return self._optimizer.defaults, [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    def accumulate(self, context_id: int) -> int:
        """Keeps the gradients of a context for the next step; how many there are."""
        with current_worker().autograd.swapping:
            gradients = gradients_of(context_id)
            mine = [parameter for parameter in self._parameters if parameter in gradients]
            for parameter in mine:
                known, new = self._accumulated.get(parameter), gradients[parameter]
                self._accumulated[parameter] = new if known is None else add_up(known, new)
            return len(mine)

    def step(self, context_id: int | None, changes: Sequence[Group]) -> int:
        """One step with the gradients of a context and those that were kept; how many parameters had one."""
        with current_worker().autograd.swapping:
            if context_id is not None:
                self.accumulate(context_id)
            for group, change in zip(self._optimizer.param_groups, changes, strict=False):
                group.update(change)
            gradients, self._accumulated = self._accumulated, {}
            with _in_place(self._parameters, gradients):
                self._optimizer.step()
            return len(gradients)

    def forget(self) -> None:
        with current_worker().autograd.swapping:
            self._accumulated.clear()

    def state(self) -> dict[int, Any]:
        """By index among the parameters of this owner."""
        with current_worker().autograd.swapping:
            state: dict[int, Any] = self._optimizer.state_dict()["state"]
            return state

    def load(self, state: dict[int, Any], settings: Sequence[Group]) -> None:
        with current_worker().autograd.swapping:
            known = self._optimizer.state_dict()["param_groups"]
            groups = [{**new, "params": old["params"]} for old, new in zip(known, settings, strict=True)]
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextmanager
def _in_place(parameters: Sequence[Tensor], gradients: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, ``.grad`` holds these gradients, or none; after it, what it held before."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = gradients.get(parameter)
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def gradients_of(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients of a context here; none where it has never come, but an error if it has ended."""
    return current_worker().autograd.registry.gradients(context_id)


# --- called by the driver ---------------------------------------------------------------------------------------------


def make(
    optimizer: Any, groups: Sequence[Group], args: Sequence[Any], options: Group
) -> tuple[RRef[LocalOptimizer], tuple[Group, list[Group]]]:
    local = LocalOptimizer(optimizer, groups, args, options)
    return RRef(local), local.settings


def step(local: RRef[LocalOptimizer], context_id: int | None, changes: Sequence[Group]) -> int:
    return local.local_value().step(context_id, changes)


def accumulate(local: RRef[LocalOptimizer], context_id: int) -> int:
    return local.local_value().accumulate(context_id)


def forget(local: RRef[LocalOptimizer]) -> None:
    local.local_value().forget()


def get_state(local: RRef[LocalOptimizer]) -> dict[int, Any]:
    return local.local_value().state()


def set_state(local: RRef[LocalOptimizer], state: dict[int, Any], settings: Sequence[Group]) -> None:
    local.local_value().load(state, settings)
