"""Backends by name, as ``torch.distributed.rpc.backend_registry`` keeps them; telegrad is the one called TENSORPIPE."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from telegrad._current import current_worker
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.constants import DEFAULT_INIT_METHOD
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.compat.worker import CompatWorker
from telegrad.rpc.joining import join
from telegrad.rpc.options import UNSET, RpcBackendOptions

__all__ = ["backend_registered", "construct_rpc_backend_options", "init_backend", "register_backend"]


class BackendValue(NamedTuple):
    """What makes the options of a backend, and what starts it."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class BackendType(enum.Enum):
    """The backends that there are; a new class with one more member whenever one is registered."""


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = enum.Enum("BackendType", members)  # type: ignore[misc]
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = UNSET,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    if rpc_timeout is UNSET:
        rpc_timeout = RpcBackendOptions().rpc_timeout  # from the environment, or the default
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)


def _telegrad_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_telegrad(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    """Joins the job.  The store is not used: the options say where the workers meet, and telegrad opens its own."""
    options = rpc_backend_options
    if type(options) is RpcBackendOptions:  # telegrad's own, for what TensorPipe has no option for
        options.worker_type = CompatWorker
    elif not isinstance(options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {options}")
    join(name, rank, world_size, options)
    return TensorPipeAgent(cast(CompatWorker, current_worker()), options, world_size)


register_backend("TENSORPIPE", _telegrad_options, init_telegrad)
