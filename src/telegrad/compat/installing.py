"""Puts telegrad in the place of torch's modules.

1. torch's modules for RPC and distributed autograd are replaced in ``sys.modules`` by telegrad's, under torch's names.
2. ``DistributedOptimizer`` and ``RemoteModule`` are replaced one by one, because their packages hold other names too.
3. In modules that have imported any of these before, such as torch's DDP and TorchScript, they are replaced too.
4. Child processes do the same (``children``).

None of these modules and names has to exist: on a torch that was built without RPC, or from which RPC was removed,
telegrad's are added where torch's would be.
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
    """Puts telegrad in the place of torch's RPC, in this process and in those that it starts.

    From now on ``torch.distributed.rpc``, ``torch.distributed.autograd``, ``DistributedOptimizer`` and ``RemoteModule``
    are telegrad's. Call it first: what other modules took from torch's RPC before is replaced too, but not what they
    made of it, such as classes that are derived from ``RRef``. A second call does nothing.

    Raises:
        UsageError: torch's own RPC is running in this process.

    Example::

        # $ telegrad run --workers 2 program.py
        import os

        from telegrad import compat

        compat.install()

        import torch.distributed.rpc as rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        if rank == 0:
            print(rpc.rpc_sync("worker1", max, args=(1, 2)), rpc.rpc_sync.__module__.split(".")[0])
            # prints worker0 | 2 telegrad
        rpc.shutdown()
    """
    _import_if_there(_RPC)
    torch_rpc = sys.modules.get(_RPC)
    if torch_rpc is None:
        _put_modules()
    elif torch_rpc.__name__ != _RPC:
        return  # telegrad is installed already
    elif hasattr(torch_rpc, "_is_current_rpc_agent_set") and torch_rpc._is_current_rpc_agent_set():
        raise UsageError("torch's own RPC is running in this process: call telegrad.compat.install() before init_rpc")
    for name in _NAMES:
        _import_if_there(name)
    old_modules = {name: sys.modules[name] for name in _MODULES if name in sys.modules and torch_rpc is not None}
    replaced: dict[int, Any] = {}
    for name, old in old_modules.items():
        _note(replaced, old, importlib.import_module(_MODULES[name]))
    for name, (ours, names) in _NAMES.items():
        module = _module_at(name)
        for each in names:
            new = getattr(importlib.import_module(ours), each)
            if hasattr(module, each):
                replaced[id(getattr(module, each))] = new
            else:
                setattr(module, each, new)
    _replace_everywhere(replaced, {id(old) for old in old_modules.values()})
    _put_modules()
    adopt_children(os.environ)


def _put_modules() -> None:
    for name, ours in _MODULES.items():
        _put(name, importlib.import_module(ours))


def _import_if_there(name: str) -> None:
    """Imports a module of torch's that this torch may lack."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # the module exists, and an import in it failed
            raise


def _module_at(name: str) -> ModuleType:
    """The module of this name; an empty one, and its packages, where torch has none."""
    found = sys.modules.get(name)
    if found is None:
        found = ModuleType(name, "Made by telegrad.compat: this torch has no such module.")
        found.__path__ = []  # a package, because its submodules may be imported
        _put(name, found)
    return found


def _put(name: str, module: ModuleType) -> None:
    """Makes a module importable under this name."""
    package, _, attribute = name.rpartition(".")
    sys.modules[name] = module
    setattr(_module_at(package), attribute, module)


def _note(replaced: dict[int, Any], old: ModuleType, new: ModuleType) -> None:
    """A module, and the names that it and telegrad's module have in common, if they were defined there."""
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
