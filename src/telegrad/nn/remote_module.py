"""A module that lives on another worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from telegrad._agent.futures import Future
from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad._torch import IncompatibleKeys
from telegrad._wire.messages import RRefFork
from telegrad.errors import SerializationError, UsageError
from telegrad.nn import remote_side
from telegrad.nn.parts import REMOTE, OwnState
from telegrad.nn.placement import has_device_map, parse
from telegrad.nn.unsupported import Refusals, refuse
from telegrad.rpc.calls import rpc_async, rpc_sync


class RemoteModule(Refusals, nn.Module):
    """``module_cls(*args, **kwargs)`` on the worker and device that ``remote_device`` names: ``"ps0/cuda:1"``.

    Calling it runs the module over there, in one call, and gradients flow through it inside ``autograd.context()``.
    The other forms of ``remote_device`` are ``"ps0"`` (on the CPU), ``"rank:3/cpu"``, and ``"cpu"`` (of this worker).

    It can be a part of a local module.  The parent's ``parameters()`` are those that are here, and ``to()`` and its
    like change only them: the optimizer gets ``remote_parameters()`` as well.  ``train()`` and ``eval()`` reach over
    there.  The parent's ``state_dict()`` has copies of the remote values, under the names that a local module would
    give them, so that a checkpoint fits the same model on any placement; its ``load_state_dict()`` sends each remote
    part its share, which that takes as a whole or not at all.

    It can be sent to other workers in calls: they get another handle on the same module.
    """

    on: str
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: type[nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        _check_class(module_cls, _module_interface_cls)
        given = () if args is None else args
        if not isinstance(given, (tuple, list)):
            raise UsageError(f"args must be a tuple of the constructor's arguments, not {type(args).__qualname__}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise UsageError(f"kwargs must be a dict of the constructor's arguments, not {type(kwargs).__qualname__}")
        worker, device = parse(remote_device)
        here = current_worker()
        call = (module_cls, tuple(given), dict(kwargs or {}), str(device))
        module_rref, training = rpc_sync(here.id if worker is None else worker, remote_side.create, call)
        self._settle(module_rref, str(device), module_cls.__qualname__, training)

    @staticmethod
    def init_from_module_rref(
        remote_device: str | torch.device, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Another handle on a module that is there already, on the device that is named.

        Which worker it is on, the reference says: ``on`` is its owner, even if ``remote_device`` names another.
        """
        _check_interface(_module_interface_cls)
        if not isinstance(module_rref, RRef):
            raise UsageError(f"module_rref must be an RRef to a module, not a {type(module_rref).__qualname__}")
        worker, device = parse(remote_device)
        current_worker().info(worker)  # raises if it is unknown
        name, training = rpc_sync(module_rref.owner_name(), remote_side.describe, (module_rref,))
        return _handle(RemoteModule, module_rref, str(device), name, training)

    def _settle(self, module_rref: RRef[nn.Module], device: str, name: str, training: bool) -> None:
        worker = current_worker()
        self.on = module_rref.owner_name()
        self.device = device
        self.is_device_map_set = has_device_map(worker.agent.peer(self.on).route)
        self.is_scriptable = False
        self.module_rref = module_rref
        self.training = training
        self._module_name = name
        on_cpu = torch.device(device).type == "cpu"
        self._function = remote_side.forward if on_cpu else remote_side.forward_on
        number = tuple(module_rref._rref_id)
        self._first: tuple[Any, ...] = (number,) if on_cpu else (number, device, worker.id)

    # --- using it -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module over there and returns its result."""
        self.module_rref._check_job()  # for the call only names the module, and nobody else would notice
        return rpc_sync(self.on, self._function, (*self._first, *args), kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ``forward``, but returns a future at once."""
        self.module_rref._check_job()
        future = rpc_async(self.on, self._function, (*self._first, *args), kwargs)
        future.keeps = self.module_rref  # type: ignore[attr-defined]  # for the call only names the module
        return future

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Tensor]]:
        """An RRef to each parameter, for a ``DistributedOptimizer``."""
        references: list[RRef[Tensor]] = self._ask(remote_side.parameters, recurse)
        return references

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Sets the mode over there; ``training`` here is what this handle set last."""
        if not isinstance(mode, bool):
            raise UsageError(f"train takes True or False, not {mode!r}")
        self._ask(remote_side.train, mode)
        self.training = mode
        return self

    def _ask(self, function: Any, *args: Any) -> Any:
        self.module_rref._check_job()  # before its worker is looked for in another job
        return rpc_sync(self.on, function, (self.module_rref, *args))

    # --- its state ----------------------------------------------------------------------------------------------

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Copies of the values over there; ``keep_vars`` changes nothing, for copies have no history to keep."""
        if isinstance(destination, OwnState):
            destination[prefix + REMOTE] = self.module_rref
            return destination
        values, versions = self._ask(remote_side.get_state)
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        destination.update({prefix + name: value for name, value in values.items()})
        if hasattr(destination, "_metadata"):
            destination._metadata.update({_join(prefix, name): version for name, version in versions.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Sets the values over there, all or none; returns the missing and the unexpected names."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict takes what state_dict() gave, not a {type(state_dict).__qualname__}")
        if assign:
            raise UsageError("assign=True would replace the parameters that other workers have references to")
        metadata = getattr(state_dict, "_metadata", {})
        return IncompatibleKeys(*self._load(dict(state_dict), dict(metadata), strict))

    def _load(self, state: dict[str, Any], metadata: Any, strict: bool) -> tuple[list[str], list[str]]:
        plain = {name: remote_side.sendable(value) for name, value in state.items()}
        outcome: tuple[list[str], list[str]] = self._ask(remote_side.set_state, plain, metadata, strict)
        return outcome

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """What ``load_state_dict`` of a parent calls; it decides what to make of names that do not fit."""
        if prefix + REMOTE in state_dict:  # from an OwnState
            return
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        try:
            missing, unexpected = self._load(own, None, strict=False)
        except UsageError as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
        else:
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]

    # --- as a part of another module ----------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """For parents, which give a memo: this module is itself, and has no parts here."""
        if memo is None:
            refuse(self, "named_modules")
        found: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
        return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """With ``recurse=False`` none: so ask those, DDP for one, who go through the modules of a parent."""
        if recurse:
            refuse(self, "named_parameters")
        return iter(())

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What ``to()`` and its like of a parent call: there is nothing here to change."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a RemoteModule has no {name!r}: the {self.__dict__.get('_module_name', 'module')} itself is on worker "
            f"{self.__dict__.get('on')!r}. Call its methods with get_module_rref().rpc_sync().method(...), and take "
            "its parameters from remote_parameters(), or copies of its values from state_dict()"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            refuse(self, "add_module")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module_name} on '{self.on}/{self.device}')"

    # --- on its way ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return _handle, (type(self), Passenger(self.module_rref), self.device, self._module_name, self.training)


class Passenger:
    """The reference of a module inside a call; in any other pickle it says what it belongs to."""

    def __init__(self, rref: RRef[nn.Module]) -> None:
        self._rref = rref

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork:
        return self._rref.__telegrad_share__(to, answered)

    def __telegrad_unshare__(self, fork: RRefFork) -> None:
        self._rref.__telegrad_unshare__(fork)

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a RemoteModule is sent inside a call, where both sides count its reference; it cannot be pickled. "
            "To save it, save its state_dict()"
        )


def _handle(
    cls: type[RemoteModule], module_rref: RRef[nn.Module], device: str, name: str, training: bool
) -> RemoteModule:
    remote = cls.__new__(cls)
    nn.Module.__init__(remote)
    remote._settle(module_rref, device, name, training)
    return remote


def _check_class(module_cls: object, interface: object) -> None:
    _check_interface(interface)
    if isinstance(module_cls, type):
        if issubclass(module_cls, nn.Module):
            return
        what = f"the class {module_cls.__qualname__}"
    elif hasattr(module_cls, "__qualname__"):
        what = f"the function {module_cls.__qualname__}"
    else:
        what = f"a {type(module_cls).__qualname__}"
    raise UsageError(
        f"module_cls must be a class derived from torch.nn.Module, not {what}; its arguments go into args and kwargs"
    )


def _check_interface(interface: object) -> None:
    if interface is not None:
        raise UsageError("a RemoteModule cannot be scripted: leave _module_interface_cls out")


def _join(prefix: str, name: str) -> str:
    """The name of a module in torch's table of versions."""
    return prefix + name if name else prefix.removesuffix(".")
