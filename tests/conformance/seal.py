"""Breaks torch's own C++ RPC and distributed autograd, so that nothing of it can do telegrad's work unnoticed.

Every function of torch's two C++ modules is replaced by one that raises, there and wherever torch's Python modules hold
it; classes can no longer be made.  What it cannot reach from Python (operators inside TorchScript) finds no agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

_MODULES = ("_distributed_rpc", "_distributed_autograd", "_distributed_rpc_testing")
_STARTERS = ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init")


class SealedError(RuntimeError):
    """torch's own C++ was called while telegrad stands in its place."""


class Entries:
    """The ways into torch's C++, as they are now: to be made before others stand in their place."""

    def __init__(self) -> None:
        import torch

        modules = [module for name in _MODULES if (module := getattr(torch._C, name, None)) is not None]
        found = [(module, name, value) for module in modules for name, value in vars(module).items()]
        found += [(torch._C, name, getattr(torch._C, name)) for name in _STARTERS]
        self._entries = [
            (f"{module.__name__}.{name}", value)
            for module, name, value in found
            if callable(value) and not name.startswith("__")
        ]
        self._holders = [*modules, torch._C, *_python_modules()]

    def seal(self) -> int:
        """Breaks them; returns how many raise now."""
        functions: dict[int, Callable[..., NoReturn]] = {}
        for name, value in self._entries:
            if isinstance(value, type):
                value.__init__ = _raiser(name)  # type: ignore[misc]
            else:
                functions[id(value)] = _raiser(name)
        for holder in self._holders:
            for name, value in list(vars(holder).items()):
                if id(value) in functions:
                    setattr(holder, name, functions[id(value)])
        return len(self._entries)


def _python_modules() -> list[ModuleType]:
    """torch's Python modules that hold C++ functions."""
    prefixes = (
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        "torch.distributed.optim",
        "torch.distributed.nn",
    )
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefixes)]


def _raiser(name: str) -> Callable[..., NoReturn]:
    def sealed(*_: Any, **__: Any) -> NoReturn:
        raise SealedError(f"torch's own {name} was called")

    return sealed
