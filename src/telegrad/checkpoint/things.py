"""What a program may save, and who has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from telegrad.checkpoint.holders import Share, Target
from telegrad.errors import UsageError
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.owners import by_owner
from telegrad.rref.rref import RRef

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # it becomes part of a file's name


def targets_of(things: Mapping[str, Any]) -> dict[str, list[Target]]:
    """By owner, what it has of these."""
    if not isinstance(things, Mapping) or not things:
        raise UsageError(f'a checkpoint is of named things, {{"model": model, …}}, not of {things!r}')
    found: dict[str, list[Target]] = {}
    for name, thing in things.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"a thing's name has letters, digits, '_', '-' and '.' only and at most 100 of them; {name!r} has not"
            )
        for target in _targets(name, thing):
            found.setdefault(target.reference.owner_name(), []).append(target)
    return found


def _targets(name: str, thing: Any) -> list[Target]:
    if isinstance(thing, DistributedOptimizer):
        return _shares(name, thing)
    if callable(getattr(thing, "get_module_rref", None)):  # a RemoteModule; it is a local module as well, an empty one
        thing = thing.get_module_rref()
    return [Target(name, thing if isinstance(thing, RRef) else RRef(thing))]


def _shares(name: str, optimizer: DistributedOptimizer) -> list[Target]:
    parameters = [rref for group in optimizer.param_groups for rref in group["params"]]
    counter = iter(range(len(parameters)))
    groups: list[dict[str, Any]] | None = [  # as state_dict gives them
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [next(counter) for _ in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    numbers = by_owner(parameters)
    found = []
    for reference in optimizer.remote_optimizers:
        mine = numbers[reference.owner_name()]
        found.append(Target(name, reference, Share(mine, [parameters[number] for number in mine], groups)))
        groups = None  # one of them is enough
    return found
