"""Runs on the worker that has a thing: takes its state, compares it with a saved one, and sets it.

==============  ==========================================  ============================================================
a thing         its state                                   what must be the same before it is loaded
==============  ==========================================  ============================================================
module          ``state_dict()``, without that of the       all keys, and the dtypes and shapes of all tensors
                RemoteModules in it, which their owners
                take
optimizer       ``state_dict()``                            the names of its settings, the groups, all parameters
share           what one owner has of a                     its parameters (the driver sees to the rest)
                ``DistributedOptimizer``, parameters
                numbered as the driver numbers them
object          ``state_dict()``                            the keys at the top; the rest is for the object to judge
==============  ==========================================  ============================================================
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad.checkpoint.json_state import TensorName
from telegrad.checkpoint.manifest import Kind, Parameter, Thing
from telegrad.checkpoint.targets import Share, Target, own_state, prefix_of, remote_parts
from telegrad.checkpoint.tensors import Memory, describe, dtype_name, memory_of
from telegrad.errors import UsageError
from telegrad.nn.parts import REMOTE
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.fanout import local_tensors
from telegrad.optim.local import LocalOptimizer


class Stateful(Protocol):
    def take(self) -> Thing:
        """The state, with its tensors, and what describes it."""

    def compare(self, name: str, saved: Thing) -> list[str]:
        """The reasons why the saved state cannot be loaded."""

    def load(self, state: Any, saved: Thing) -> None: ...


def stateful_of(target: Target) -> Stateful:
    values = {prefix: reference.local_value() for prefix, reference in target.references.items()}
    if all(isinstance(each, nn.Module) for each in values.values()):
        return _Module(target, values)
    value = values[""]
    if isinstance(value, LocalOptimizer) and target.share is not None:
        return _Share(value, target.share)
    if isinstance(value, DistributedOptimizer):
        raise UsageError(f"{target.name} is a DistributedOptimizer of another worker: that one must save and load it")
    if isinstance(value, torch.optim.Optimizer) and type(value).state_dict is torch.optim.Optimizer.state_dict:
        return _Optimizer(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _Object(value)
    raise UsageError(f"{target.name} is a {type(value).__qualname__}, which has no state_dict and load_state_dict")


class _Module:
    """A module, or those of its remote parts that are on this worker, or both."""

    def __init__(self, target: Target, modules: Mapping[str, nn.Module]) -> None:
        self._prefixes, self._modules = target.prefixes, modules

    def take(self) -> Thing:
        """With None in the place of each remote part, under its prefix without the last dot."""
        state: dict[str, Any] = {}
        versions: dict[str, int] = {}
        for prefix, module in self._modules.items():
            own = own_state(module)
            for part in remote_parts(own):
                if prefix + part not in self._prefixes:
                    raise UsageError(f"a RemoteModule, {prefix + part!r}, was added while the module was being saved")
            state |= {_without_mark(prefix + key): None if isinstance(v, RRef) else v for key, v in own.items()}
            notes: Mapping[str, Mapping[str, Any]] = getattr(own, "_metadata", {})
            for layer, note in notes.items():
                if type(note.get("version")) is int:
                    versions[(prefix + layer).removesuffix(".")] = note["version"]
        return Thing("module", state, versions=versions)

    def compare(self, name: str, saved: Thing) -> list[str]:
        wrong = compare_kind(name, "module", saved)
        if wrong:
            return wrong
        mine = {
            prefix + key: value
            for prefix, module in self._modules.items()
            for key, value in own_state(module).items()
            if not isinstance(value, RRef)
        }
        wrong = compare_keys(name, mine, saved.state)
        for key, value in mine.items():
            if key in saved.state:
                wrong += _compare_value(f"{name}.{key}", value, saved.state[key], saved)
        return wrong or _compare_ties(name, mine, saved)

    def load(self, state: Any, saved: Thing) -> None:
        parts: dict[str, Any] = {prefix: OrderedDict() for prefix in self._modules}
        for key, value in state.items():
            prefix = prefix_of(key, self._prefixes)
            parts[prefix][key.removeprefix(prefix)] = value
        for prefix, part in parts.items():
            module = self._modules[prefix]
            part._metadata = {
                f"{layer}.".removeprefix(prefix).removesuffix("."): {"version": version}
                for layer, version in saved.versions.items()
                if f"{layer}.".startswith(prefix)
            }
            with current_worker().autograd.swapping:
                part.update({key: value for key, value in own_state(module).items() if isinstance(value, RRef)})
                module.load_state_dict(part)


def _without_mark(key: str) -> str:
    return key.removesuffix(f".{REMOTE}")


class _Optimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def take(self) -> Thing:
        return Thing(
            "optimizer",
            self._optimizer.state_dict(),
            parameters=[_parameter(each) for each in self._parameters],
            settings=sorted(self._optimizer.defaults),
        )

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def compare(self, name: str, saved: Thing) -> list[str]:
        return compare_optimizer(name, self._optimizer, saved) or _compare_parameters(
            name, range(len(saved.parameters)), self._parameters, saved
        )

    def load(self, state: Any, saved: Thing) -> None:
        with current_worker().autograd.swapping:
            self._optimizer.load_state_dict(state)


class _Share:
    """Its state has the owner's parameters only, under the driver's numbers when it is taken, its own when loaded."""

    def __init__(self, optimizer: LocalOptimizer, share: Share) -> None:
        self._optimizer, self._numbers, self._groups = optimizer, share.numbers, share.groups
        self._parameters = local_tensors(share.parameters)

    def take(self) -> Thing:
        state: dict[str, Any] = {
            "state": {self._numbers[place]: each for place, each in self._optimizer.state().items()}
        }
        if self._groups is not None:
            state["param_groups"] = self._groups
        return Thing("optimizer", state, parameters=[_parameter(each) for each in self._parameters])

    def compare(self, name: str, saved: Thing) -> list[str]:
        return _compare_parameters(name, self._numbers, self._parameters, saved)

    def load(self, state: Any, saved: Thing) -> None:
        self._optimizer.load(state["state"], state["param_groups"])


class _Object:
    """An object of the user.  Its code may call other workers, so it runs in the constructor, outside of locks."""

    def __init__(self, value: Any) -> None:
        self._value, self._state = value, value.state_dict()

    def take(self) -> Thing:
        return Thing("object", self._state)

    def compare(self, name: str, saved: Thing) -> list[str]:
        return compare_kind(name, "object", saved) or compare_keys(name, self._state, saved.state)

    def load(self, state: Any, saved: Thing) -> None:
        self._value.load_state_dict(state)


# --- comparing --------------------------------------------------------------------------------------------------------


def compare_kind(name: str, kind: Kind, saved: Thing) -> list[str]:
    if kind == saved.kind:
        return []
    return [f"{name} is of kind {kind!r} here, but {saved.kind!r} in the checkpoint"]


def compare_keys(name: str, mine: Any, saved: Any) -> list[str]:
    if not isinstance(mine, dict) or not isinstance(saved, dict):
        return []
    return [
        *[f"{name}.{key} is not in the checkpoint" for key in mine if key not in saved],
        *[f"{name}.{key} is left over: it is in the checkpoint, but not here" for key in saved if key not in mine],
    ]


def compare_optimizer(name: str, mine: torch.optim.Optimizer, saved: Thing) -> list[str]:
    """All but the parameters themselves."""
    wrong = compare_kind(name, "optimizer", saved)
    if wrong:
        return wrong
    here, there = set(mine.defaults), set(saved.settings)
    if here != there:
        differences = [f"only here {key!r}" for key in sorted(here - there)]
        differences += [f"only there {key!r}" for key in sorted(there - here)]
        wrong.append(f"{name} is another kind of optimizer: of its settings, {', '.join(differences)}")
    sizes = [len(group["params"]) for group in mine.param_groups]
    given = [len(group["params"]) for group in saved.state["param_groups"]]
    if sizes != given:
        wrong.append(f"{name} has groups of {sizes} parameters, but in the checkpoint groups of {given}")
    return wrong


def _parameter(tensor: Tensor) -> Parameter:
    return Parameter(dtype_name(tensor), tuple(tensor.shape))


def _compare_parameters(name: str, numbers: Sequence[int], mine: Sequence[Tensor], saved: Thing) -> list[str]:
    wrong = []
    for number, tensor, parameter in zip(numbers, mine, saved.parameters, strict=True):
        if _parameter(tensor) != parameter:
            wrong.append(
                f"parameter {number} of {name} is {describe(dtype_name(tensor), tensor.shape)}, but in the checkpoint "
                f"{describe(parameter.dtype, parameter.shape)}"
            )
    return wrong


def _compare_value(path: str, mine: Any, saved: Any, thing: Thing) -> list[str]:
    here = isinstance(mine, Tensor)
    if here != isinstance(saved, TensorName):
        return [f"{path} is {'a' if here else 'no'} tensor, but {'none' if here else 'one'} in the checkpoint"]
    if not here or is_lazy(mine):  # which takes any shape
        return []
    record = thing.tensors[saved.name]
    found = describe(dtype_name(mine), mine.shape)
    return [] if found == str(record) else [f"{path} is {found}, but {record} in the checkpoint"]


def _compare_ties(name: str, mine: Mapping[str, Any], saved: Thing) -> list[str]:
    """Two keys of one tensor here need one value there."""
    wrong = []
    first: dict[Memory, str] = {}
    for key, value in mine.items():
        memory = memory_of(value) if isinstance(value, Tensor) else None
        other = key if memory is None else first.setdefault(memory, key)
        if other != key and _sum_of(other, saved) != _sum_of(key, saved):
            wrong.append(f"{name}.{other} and {name}.{key} are one tensor here, but two in the checkpoint")
    return wrong


def _sum_of(key: str, saved: Thing) -> int:
    return saved.tensors[saved.state[key].name].crc32
