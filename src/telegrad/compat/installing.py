"""Puts telegrad in the place of torch's modules.

1. torch's modules for RPC and distributed autograd leave ``sys.modules``, and ours take their places and names.
2. ``DistributedOptimizer`` and ``RemoteModule`` are replaced one by one, for their packages hold other things too.
3. Whoever has imported any of these before, torch's DDP and TorchScript among them, gets ours instead.
4. Children will do the same (``children``).
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from telegrad.compat.children import adopt_children
from telegrad.errors import UsageError

_RPC = "torch.distributed.rpc"
_PARTS = (
    "_utils",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "internal",
    "options",
    "rref_proxy",
    "server_process_global_profiler",
)
_MODULES = {
    _RPC: "telegrad.compat.rpc",
    "torch.distributed.autograd": "telegrad.compat.autograd",
    **{f"{_RPC}.{part}": f"telegrad.compat.rpc.{part}" for part in _PARTS},
}
_NAMES = {
    "torch.distributed.optim": ("telegrad.compat.optim", ("DistributedOptimizer",)),
    "torch.distributed.optim.optimizer": ("telegrad.compat.optim", ("DistributedOptimizer",)),
    "torch.distributed.nn": ("telegrad.compat.nn", ("RemoteModule",)),
    "torch.distributed.nn.api.remote_module": (
        "telegrad.compat.nn",
        ("RemoteModule", "_REMOTE_MODULE_PICKLED_ATTRIBUTES", "_RemoteModule"),
    ),
}


def install() -> None:
    """From now on, in this process and in those that it starts, torch's RPC is telegrad's.

    The sooner the better: what other modules took from torch's RPC before is replaced too, but not what they made of
    it, such as classes that are derived from ``RRef``.
    """
    torch_rpc = sys.modules.get(_RPC) or importlib.import_module(_RPC)
    if torch_rpc.__name__ != _RPC:
        return  # it is ours already
    if torch_rpc._is_current_rpc_agent_set():
        raise UsageError("torch's own RPC is running in this process: call telegrad.compat.install() before init_rpc")
    old_modules = {name: importlib.import_module(name) for name in [*_MODULES, *_NAMES]}
    replaced: dict[int, Any] = {}
    for name, ours in _MODULES.items():
        _note(replaced, old_modules[name], importlib.import_module(ours))
    for name, (ours, names) in _NAMES.items():
        for each in names:
            replaced[id(getattr(old_modules[name], each))] = getattr(importlib.import_module(ours), each)
    _replace_everywhere(replaced, {id(old_modules[name]) for name in _MODULES})
    for name, ours in _MODULES.items():
        sys.modules[name] = sys.modules[ours]
    adopt_children(os.environ)


def _note(replaced: dict[int, Any], old: ModuleType, new: ModuleType) -> None:
    """A module, and what it and ours both have, if it was made there."""
    replaced[id(old)] = new
    for name, value in vars(old).items():
        home = getattr(value, "__module__", "") or ""
        if home.startswith((_RPC, "torch.distributed.autograd", "torch._C._distributed_")) and hasattr(new, name):
            replaced[id(value)] = getattr(new, name)


def _replace_everywhere(replaced: dict[int, Any], left_alone: set[int]) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or id(module) in left_alone or module.__name__.startswith("telegrad."):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
