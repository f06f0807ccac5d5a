"""Stands in for what ``torch.distributed.nn`` has for RPC: telegrad's ``RemoteModule``, with torch's words.

==================================== ================================================================================
torch's private name                 what stands in for it
==================================== ================================================================================
_RemoteModule                        RemoteModule; the interface of a TorchScript module is refused
_REMOTE_MODULE_PICKLED_ATTRIBUTES    what a handle that was sent shows in its ``__dict__``
==================================== ================================================================================
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from telegrad import nn
from telegrad.compat.error_texts import speaks_as_torch
from telegrad.compat.rref import RRef
from telegrad.errors import SerializationError, UsageError
from telegrad.nn import remote_side
from telegrad.nn.remote_module import Passenger
from telegrad.nn.unsupported import INSTEAD

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)


class RemoteModule(nn.RemoteModule):
    generated_methods = ("forward_async", "forward")

    @speaks_as_torch
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @staticmethod
    @speaks_as_torch
    def init_from_module_rref(remote_device: Any, module_rref: Any, _module_interface_cls: Any = None) -> RemoteModule:
        handle = nn.RemoteModule.init_from_module_rref(remote_device, module_rref, _module_interface_cls)
        handle.__class__ = RemoteModule
        return handle  # type: ignore[return-value]

    @speaks_as_torch
    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: torch's RemoteModule has no ``state_dict``."""
        raise UsageError(
            "a RemoteModule has no state_dict() in torch: telegrad.nn.RemoteModule has, and checkpoints too"
        )

    @speaks_as_torch
    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("a RemoteModule has no load_state_dict() in torch: telegrad.nn.RemoteModule has")

    def __reduce__(self) -> Any:
        return _receive, (self.on, self.device, self.is_device_map_set, _Passenger(self.module_rref))


for _name in INSTEAD:
    setattr(RemoteModule, _name, speaks_as_torch(getattr(nn.RemoteModule, _name)))

_RemoteModule = RemoteModule


class _Passenger(Passenger):
    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: "
            "to save it, save its state_dict()"
        )


class _Received(RemoteModule):
    """A handle that came in a call.  As in torch, its ``__dict__`` has what was sent, and nothing else.

    The other attributes of ``nn.Module`` are in the class.  They never change: a handle takes no hooks or parts.
    """

    _function = staticmethod(remote_side.forward)
    _module_name = "module"

    @property
    def _first(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (tuple(self.module_rref._rref_id),)


for _name, _value in vars(torch.nn.Module()).items():
    setattr(_Received, _name, _value)


def _receive(on: str, device: str, is_device_map_set: bool, module_rref: RRef[Any]) -> RemoteModule:
    remote = _Received.__new__(_Received)
    values = (on, device, is_device_map_set, False, RemoteModule.generated_methods, module_rref)
    remote.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    remote.__dict__.update(forward_async=remote.forward_async, forward=remote.forward)
    return remote
