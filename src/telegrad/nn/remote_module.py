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
    """A module on another worker that is used like one here.

    The worker makes it, as ``module_cls(*args, **kwargs)``, and keeps it. Calling it runs the module there, in one
    call, with the timeout of any call. Inside :func:`telegrad.autograd.context` gradients flow through it. Its
    parameters stay there: ``remote_parameters()`` gives references to them, for a ``DistributedOptimizer``.

    It can be a part of a local module. The parent's ``parameters()`` are those that are here, and ``to()`` and the like
    change only them: the optimizer gets ``remote_parameters()`` as well. ``train()`` and ``eval()`` change both.
    The parent's ``state_dict()`` has copies of the remote values, under the names that a local module would give them,
    so that a checkpoint fits the same model on any placement; its ``load_state_dict()`` sends each remote part its
    share, which is loaded as a whole or not at all.

    It can be sent to other workers in calls: they get another handle on the same module. The module lives until the
    last handle is gone. If its worker is lost, calls raise ``WorkerLostError``. Methods of ``nn.Module`` that have no
    meaning for a module elsewhere, such as ``parameters()``, raise a ``UsageError`` that says what to do instead.

    Args:
        remote_device (str or torch.device): Where the module is to be: ``"ps0/cuda:1"``, ``"ps0"`` (on its CPU),
            ``"rank:3/cpu"``, or ``"cpu"`` (of this worker).
        module_cls (type): A class derived from ``torch.nn.Module``.
        args (tuple, optional): Positional arguments for the class.
        kwargs (dict, optional): Keyword arguments for the class.

    Attributes of the object: ``on``, the name of the worker; ``device``; ``module_rref``, a reference to the module.

    Raises:
        UsageError: The class is no module class, the place is not written as above, or the worker has no such device.
        UnknownWorkerError: The job has no such worker.
        Exception: What the class raised when the module was made, or what a call raises.

    Example::

        >>> # on worker0, in a job with worker1
        >>> from telegrad.nn import RemoteModule
        >>> layer = RemoteModule("worker1/cpu", torch.nn.Linear, args=(4, 2))
        >>> layer(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
        >>> layer
        RemoteModule(Linear on 'worker1/cpu')
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), layer)
        >>> sorted(model.state_dict())
        ['0.bias', '0.weight', '1.bias', '1.weight']
        >>> len(list(model.parameters())), len(layer.remote_parameters())
        (2, 2)
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
        """Makes another handle on a module that is on some worker already.

        Args:
            remote_device (str or torch.device): As for the constructor; its device is the one to which tensors go.
                Which worker has the module, the reference says: ``on`` is its owner, even if another one is named here.
            module_rref (RRef): A reference to a module.

        Returns:
            A RemoteModule.

        Raises:
            UsageError: ``module_rref`` is no RRef, or refers to something other than a module.
            UnknownWorkerError: ``remote_device`` names a worker that the job does not have.
            Exception: What a call raises.

        Example::

            >>> # on worker0, in a job with worker1
            >>> from telegrad.nn import RemoteModule
            >>> rref = rpc.remote("worker1", torch.nn.ReLU)
            >>> RemoteModule.init_from_module_rref("worker1/cpu", rref)(torch.tensor([-1.0, 1.0]))
            tensor([0., 1.])
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
        """Runs the module on its worker and returns the result; ``module(...)`` does the same.

        If the module is not on the CPU, tensors among the arguments go to its device first. Tensors of the result come
        back to the CPU, unless a device map says where they go.

        Args:
            *args (Any): Arguments for the module.
            **kwargs (Any): Keyword arguments for the module.

        Returns:
            A copy of the result.

        Raises:
            Exception: What the module raised, or what :func:`telegrad.rpc.rpc_sync` raises.
        """
        self.module_rref._check_job()  # the call only names the module, so a lost reference is noticed only here
        return rpc_sync(self.on, self._function, (*self._first, *args), kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """As :meth:`forward`, but returns a future and does not wait.

        Args:
            *args (Any): Arguments for the module.
            **kwargs (Any): Keyword arguments for the module.

        Returns:
            A future of the result, as :func:`telegrad.rpc.rpc_async` gives it.

        Example::

            >>> # on worker0, in a job with worker1
            >>> from telegrad.nn import RemoteModule
            >>> layers = [RemoteModule(worker, torch.nn.Flatten) for worker in ("worker0", "worker1")]
            >>> futures = [layer.forward_async(torch.zeros(2, 3, 4)) for layer in layers]
            >>> [tuple(future.wait().shape) for future in futures]
            [(2, 12), (2, 12)]
        """
        self.module_rref._check_job()
        future = rpc_async(self.on, self._function, (*self._first, *args), kwargs)
        future.keeps = self.module_rref  # type: ignore[attr-defined]  # the call only names the module
        return future

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Tensor]]:
        """Returns references to the parameters of the module, for a ``DistributedOptimizer``.

        Args:
            recurse (bool, optional): If False, only parameters of the module itself, not of its parts (default: True).

        Returns:
            A list of RRefs, in the order of the module's own ``parameters()``.

        Raises:
            Exception: What a call raises.
        """
        references: list[RRef[Tensor]] = self._ask(remote_side.parameters, recurse)
        return references

    def get_module_rref(self) -> RRef[nn.Module]:
        """Returns the reference to the module itself, which functions that run on its worker can use.

        Returns:
            An RRef.

        Example::

            >>> # on worker0, in a job with worker1
            >>> from telegrad.nn import RemoteModule
            >>> layer = RemoteModule("worker1", torch.nn.Linear, args=(4, 2))
            >>> def freeze(rref):
            ...     rref.local_value().requires_grad_(False)
            >>> rpc.rpc_sync(layer.on, freeze, args=(layer.get_module_rref(),))
        """
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the module on its worker; ``eval()`` does so too.

        ``training`` of a handle is what this handle has set last: it does not see what others set.

        Args:
            mode (bool, optional): True for training, False for evaluation (default: True).

        Returns:
            This module.

        Raises:
            UsageError: ``mode`` is no bool.
            Exception: What a call raises.
        """
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
        """Returns copies of the module's values, on the CPU, under the names that a local module would give them.

        No step of a ``DistributedOptimizer`` runs on that worker at the same time.

        Args:
            destination (dict, optional): A dict to add them to, as in torch.
            prefix (str, optional): What the names begin with (default: nothing).
            keep_vars (bool, optional): Accepted as in torch; copies have no history to keep.

        Returns:
            The dict.

        Raises:
            Exception: What a call raises.
        """
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
        """Sets the module's values on its worker: all of them, or none if they do not fit.

        Args:
            state_dict (dict): What ``state_dict()`` gave, of this module or of a local one.
            strict (bool, optional): If True, the names must be the same (default: True).
            assign (bool, optional): Must be False: other workers have references to the parameters.

        Returns:
            The missing and the unexpected names, as ``missing_keys`` and ``unexpected_keys``.

        Raises:
            UsageError: The state does not fit; the text has torch's list of the names or shapes. Nothing was changed.
            TypeError: ``state_dict`` is no dict.
            Exception: What a call raises.
        """
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
        """Called by ``load_state_dict`` of a parent, which handles names that do not fit."""
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
        """For parents of this module, which pass a ``memo``: yields this module alone, which has no parts here.

        Args:
            memo (set): The modules that the parent has seen.
            prefix (str, optional): The name of this module in its parent.
            remove_duplicate (bool, optional): As in torch.

        Returns:
            An iterator over this module alone.

        Raises:
            UsageError: It was called directly: the parts are on another worker.
        """
        if memo is None:
            refuse(self, "named_modules")
        found: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
        return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """For code that visits the modules of a parent, as DDP does: this module has no parameters here.

        Args:
            prefix (str, optional): As in torch.
            recurse (bool): False.
            remove_duplicate (bool, optional): As in torch.

        Returns:
            An empty iterator.

        Raises:
            UsageError: It was called with ``recurse=True``: use ``remote_parameters()``.
        """
        if recurse:
            refuse(self, "named_parameters")
        return iter(())

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Called by ``to()`` and similar methods of a parent.  Changes nothing: there are no tensors here."""
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

    # --- sending it ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return _handle, (type(self), Passenger(self.module_rref), self.device, self._module_name, self.training)


class Passenger:
    """The reference of a module inside a call; in any other pickle it raises an error that names the RemoteModule."""

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
