"""The things that a program may save, and the workers that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from telegrad._rref.rref import RRef
from telegrad.errors import UsageError
from telegrad.nn import RemoteModule
from telegrad.nn.parts import REMOTE, OwnState
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.fanout import ask_all, by_owner

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # it becomes part of a file's name


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a ``DistributedOptimizer`` that one owner has."""

    numbers: list[int]
    parameters: list[RRef[Tensor]]
    groups: list[dict[str, Any]] | None = None  # the driver's settings, which one of the owners writes


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a thing that one owner has.

    Of a module that has RemoteModules in it, some owners have one or more of these.  Each goes by the prefix that its
    keys have in the state of the whole, as ``"layers.0."``; the prefix of the thing itself is empty.
    """

    name: str
    references: dict[str, RRef[Any]]  # by prefix
    prefixes: frozenset[str] = frozenset(("",))  # those that all owners have
    share: Share | None = None


def targets_of(things: Mapping[str, Any], timeout: float) -> dict[str, list[Target]]:
    """By owner, what it has of these."""
    if not isinstance(things, Mapping) or not things:
        raise UsageError(f'a checkpoint is of named things, {{"model": model, …}}, not of {things!r}')
    roots: dict[str, RRef[Any]] = {}
    found: dict[str, list[Target]] = {}
    for name, thing in things.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"a thing's name has letters, digits, '_', '-' and '.' only and at most 100 of them; {name!r} has not"
            )
        if not isinstance(thing, DistributedOptimizer):
            roots[name] = _reference(thing)
    parts = _find_parts(roots, timeout)
    for name, thing in things.items():
        targets = _module_targets(name, parts[name]) if name in roots else _shares(name, thing)
        for owner, target in targets.items():
            found.setdefault(owner, []).append(target)
    return found


def _reference(thing: Any) -> RRef[Any]:
    if callable(getattr(thing, "get_module_rref", None)):  # a RemoteModule; it is a local module as well, an empty one
        thing = thing.get_module_rref()
    return thing if isinstance(thing, RRef) else RRef(thing)


def _find_parts(roots: Mapping[str, RRef[Any]], timeout: float) -> dict[str, dict[str, RRef[Any]]]:
    """Of each, itself and all RemoteModules in it and in these, by the prefix of their keys in its state."""
    found = {name: {"": root} for name, root in roots.items()}
    pending = [_Part(name, "", root, ()) for name, root in roots.items()]
    while pending:
        asked: dict[str, list[_Part]] = {}
        for part in pending:
            asked.setdefault(part.reference.owner_name(), []).append(part)
        answers = ask_all(
            find_parts, {owner: ([part.reference for part in parts],) for owner, parts in asked.items()}, timeout
        )
        pending = [
            part.inner(prefix, reference)
            for owner, parts in asked.items()
            for part, inside in zip(parts, answers[owner], strict=True)
            for prefix, reference in inside.items()
        ]
        for part in pending:
            found[part.name][part.prefix] = part.reference
    return found


class _Part(NamedTuple):
    """A module in which there may be RemoteModules."""

    name: str
    prefix: str
    reference: RRef[Any]
    outer: tuple[RRef[Any], ...]  # those that it is in

    def inner(self, prefix: str, reference: RRef[Any]) -> _Part:
        outer = (*self.outer, self.reference)
        if any(reference._rref_id == each._rref_id for each in outer):
            raise UsageError(f"{self.name} contains itself: as its part {self.prefix + prefix!r}")
        return _Part(self.name, self.prefix + prefix, reference, outer)


def _module_targets(name: str, parts: Mapping[str, RRef[Any]]) -> dict[str, Target]:
    owners: dict[str, dict[str, RRef[Any]]] = {}
    for prefix, reference in parts.items():
        owners.setdefault(reference.owner_name(), {})[prefix] = reference
    return {owner: Target(name, references, frozenset(parts)) for owner, references in owners.items()}


def _shares(name: str, optimizer: DistributedOptimizer) -> dict[str, Target]:
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
    found = {}
    for reference in optimizer.remote_optimizers:
        owner = reference.owner_name()
        share = Share(numbers[owner], [parameters[number] for number in numbers[owner]], groups)
        found[owner] = Target(name, {"": reference}, share=share)
        groups = None  # one of them is enough
    return found


# --- RemoteModules inside modules -------------------------------------------------------------------------------------


def find_parts(references: Sequence[RRef[Any]]) -> list[dict[str, RRef[nn.Module]]]:
    """Of each: the RemoteModules in it, by the prefix of their keys."""
    values = [reference.local_value() for reference in references]
    return [remote_parts(own_state(value)) if isinstance(value, nn.Module) else {} for value in values]


def own_state(module: nn.Module) -> dict[str, Any]:
    """Its ``state_dict()``, with a reference to each RemoteModule in it in the place of that one's values."""
    if any(isinstance(part, RemoteModule) for _, part in module.named_modules(set())):
        return cast(dict[str, Any], module.state_dict(destination=OwnState()))
    return module.state_dict()


def remote_parts(state: Mapping[str, Any]) -> dict[str, RRef[nn.Module]]:
    """The references in an ``own_state``, by prefix."""
    return {key.removesuffix(REMOTE): value for key, value in state.items() if isinstance(value, RRef)}


def prefix_of(key: str, prefixes: Iterable[str]) -> str:
    """Of the part that this key of a whole state belongs to: the longest that fits."""
    return max((prefix for prefix in prefixes if key.startswith(prefix)), key=len)
