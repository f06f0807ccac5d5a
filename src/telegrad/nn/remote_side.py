"""The functions of a RemoteModule that run on the worker that holds the module."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad._current import current_worker
from telegrad._ids import GlobalId
from telegrad._rref.rref import RRef
from telegrad._torch import tree_map_only
from telegrad.errors import UsageError
from telegrad.nn.placement import goes

Module = RRef[nn.Module]
State = dict[str, Any]


def create(module_cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> tuple[Module, bool]:
    """A new module, and whether it is in training mode."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # an AssertionError, a RuntimeError or a NotImplementedError
        reason = str(error).splitlines()[0]
        raise UsageError(f"worker {current_worker().name!r} has no device {device!r}: {reason}") from error
    module: nn.Module = module_cls(*args, **kwargs)
    module.to(device)
    return RRef(module), module.training


def describe(module_rref: Module) -> tuple[str, bool]:
    """The name of its class, and whether it is in training mode."""
    module: object = module_rref.local_value()
    if not isinstance(module, nn.Module):
        raise UsageError(f"{module_rref!r} refers to a {type(module).__qualname__}, not to a torch.nn.Module")
    return type(module).__qualname__, module.training


def forward(rref_id: tuple[int, int], /, *args: Any, **kwargs: Any) -> Any:
    return _held(rref_id)(*args, **kwargs)


def forward_on(rref_id: tuple[int, int], device: str, caller: int, /, *args: Any, **kwargs: Any) -> Any:
    """Forward on another device than the CPU: tensors go there first, and come back if they cannot be sent as they are.

    As in torch, but with containers and single tensors too.
    """
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    route = current_worker().agent.peer(caller).route
    return tree_map_only(
        Tensor,
        lambda tensor: tensor if goes(route, tensor.device) else _on_cpu(tensor),
        _held(rref_id)(*args, **kwargs),
    )


def _held(rref_id: tuple[int, int]) -> nn.Module:
    """A module to which the caller holds a reference for as long as its call runs.

    So the call can name it by its id.  Sending the reference, which both sides would count, takes 280 us instead of
    100.
    """
    module: nn.Module = current_worker().references.owned(GlobalId(*rref_id)).get()
    return module


def parameters(module_rref: Module, recurse: bool) -> list[RRef[Tensor]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def train(module_rref: Module, mode: bool) -> None:
    module_rref.local_value().train(mode)


# --- its state --------------------------------------------------------------------------------------------------------


def sendable(value: Any) -> Any:
    """A tensor without its history, on a device that every worker has; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return _on_cpu(value.detach() if value.requires_grad and not is_lazy(value) else value)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.cpu()


def get_state(module_rref: Module) -> tuple[State, State]:
    """The state, and the versions that torch keeps beside it."""
    # Not under the lock: remote parts of the module are read over RPC, possibly from this worker.
    state = module_rref.local_value().state_dict()
    with current_worker().autograd.swapping:  # no step of an optimizer runs at the same time
        values = {name: sendable(value) for name, value in state.items()}
        # In one call, so that tensors that share memory still share it.
        values |= copy.deepcopy({name: value for name, value in values.items() if isinstance(value, Tensor)})
    return values, dict(getattr(state, "_metadata", {}))


def set_state(module_rref: Module, given: State, metadata: State | None, strict: bool) -> tuple[list[str], list[str]]:
    """Loads a state as a whole or not at all; returns the missing and the unexpected names.

    Without metadata, the state is taken to be of the versions that run here.
    """
    module = module_rref.local_value()
    own = module.state_dict()
    state: Any = OrderedDict(given)
    state._metadata = getattr(own, "_metadata", {}) if metadata is None else metadata
    if _fits(own, state) and _is_plain(module):
        # Without a copy: an embedding table may fill half of the memory.
        missing, unexpected = module.load_state_dict(state, strict)
        return missing, unexpected
    before = copy.deepcopy(own)
    try:
        missing, unexpected = module.load_state_dict(state, strict)
    except Exception as error:
        _restore(module, own, before)
        if type(error) is RuntimeError:  # torch's own, which names the keys
            raise UsageError(f"nothing was changed on worker {current_worker().name!r}. {error}") from None
        raise
    return missing, unexpected


def _fits(own: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether names and shapes are the same, so that torch finds nothing wrong half-way.

    If not, only the module itself can decide: it may accept the names of an older version.
    """
    if own.keys() != given.keys() or any(map(is_lazy, own.values())):
        return False
    return all(getattr(given[name], "shape", None) == getattr(value, "shape", None) for name, value in own.items())


def _is_plain(module: nn.Module) -> bool:
    """Whether no part of the module has its own code for loading a state, which could raise half-way."""
    return all(
        type(part)._load_from_state_dict is nn.Module._load_from_state_dict
        and type(part).set_extra_state is nn.Module.set_extra_state
        and not part._load_state_dict_pre_hooks
        and not part._load_state_dict_post_hooks
        for _, part in module.named_modules(set())
    )


def _restore(module: nn.Module, own: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Restores the previous state.  Tensors are set directly, because the hook that raised may raise again."""
    with torch.no_grad():
        for name, value in before.items():
            if isinstance(value, Tensor) and not is_lazy(value):
                own[name].copy_(value)
    with suppress(Exception):
        module.load_state_dict(before, strict=False)
