"""The two libraries under test, as namespaces with the same names.

A row gets a ``Library`` and uses ``library.rpc.rpc_sync`` and so on; it cannot tell which one it runs on.  The modules
are imported on first use, since a process measures only one library and must not pay for the other.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

__all__ = ["LIBRARIES", "Library"]


@dataclass(frozen=True)
class Library:
    """``package`` is what a program changes in its imports when it moves over."""

    name: str
    package: str
    fast: bool = False
    """Whether ``backward`` runs in telegrad's FAST mode; torch knows no other."""

    @cached_property
    def rpc(self) -> Any:
        """``init_rpc``, ``rpc_sync``, ``rpc_async``, ``remote``, ..."""
        return importlib.import_module(f"{self.package}.rpc")

    @cached_property
    def autograd(self) -> Any:
        """``context``, ``backward``, ``get_gradients``."""
        return importlib.import_module(f"{self.package}.autograd")

    @cached_property
    def backward(self) -> Any:
        """``autograd.backward`` in the mode that is being measured."""
        return partial(self.autograd.backward, mode="fast") if self.fast else self.autograd.backward

    @cached_property
    def optim(self) -> Any:
        """``DistributedOptimizer``."""
        return importlib.import_module(f"{self.package}.optim")

    @cached_property
    def nn(self) -> Any:
        """``RemoteModule``."""
        return importlib.import_module(f"{self.package}.nn")


LIBRARIES = {
    "telegrad": Library("telegrad", "telegrad"),
    "torch": Library("torch", "torch.distributed"),
}
