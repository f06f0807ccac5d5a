"""``init_rpc``: how a process becomes a worker."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

from telegrad._current import current_worker, is_initialized
from telegrad.compat import autograd
from telegrad.compat.error_texts import speaks_as_torch
from telegrad.compat.rpc import api, backend_registry
from telegrad.compat.rpc.debugging import _rref_context_get_debug_info, autograd_get_debug_info
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions, check_devices
from telegrad.errors import UsageError
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.stores import identity_in

logger = logging.getLogger(__name__)


@speaks_as_torch
def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    options = rpc_backend_options
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r}")
    if backend is None:
        backend = _backend_of(options)
    if options is None:
        options = backend_registry.construct_rpc_backend_options(backend)
    if isinstance(options, RpcBackendOptions):
        rank, world_size = _identity(options.init_method, rank, world_size)
        check_devices(name, options)
    autograd._init(rank)
    _init_rpc_backend(backend, None, name, rank, world_size, options)


def _backend_of(options: Any) -> Any:
    """The backend whose options these are."""
    default = backend_registry.BackendType["TENSORPIPE"]
    if options is None or type(options) is RpcBackendOptions:
        return default
    for candidate in backend_registry.BackendType:
        if type(options) is type(backend_registry.construct_rpc_backend_options(candidate)):
            if candidate is not default:
                logger.warning("these options are of the backend %s, which is used; pass backend= to say so", candidate)
            return candidate
    if isinstance(options, TensorPipeRpcBackendOptions):
        return default
    raise TypeError(f"Could not infer backend for options {options}")


def _identity(init_method: str, rank: int, world_size: int | None) -> tuple[int, int | None]:
    rank, world_size = identity_in(init_method, rank, world_size)
    if rank < 0:
        is_env = urlsplit(init_method).scheme == "env"
        words = "environment variable RANK expected, but not set" if is_env else "rank parameter missing"
        raise UsageError(f"Error initializing torch.distributed.rpc using {init_method}: {words}: give init_rpc a rank")
    return rank, world_size


@speaks_as_torch
def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if is_initialized():
        raise UsageError(f"RPC is already initialized in this process, as worker {current_worker().name!r}")
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    agent = api._get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **autograd_get_debug_info()}
