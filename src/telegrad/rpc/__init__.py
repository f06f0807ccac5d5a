"""Call functions on other workers.

The names, signatures and behaviour are those of ``torch.distributed.rpc``; a program moves over by changing its
imports.

* :func:`init_rpc`, :func:`shutdown`: join a job and leave it (``joining``, and below it
  ``options``, ``stores``, ``rendezvous``, ``network``)
* :func:`rpc_sync`, :func:`rpc_async`, :func:`remote`: run a callable on a worker (``calls``)
* :class:`RRef`: a counted reference to a value that lives on its owner
* :func:`get_worker_info`, :class:`WorkerInfo`: the names and ids of workers
* :mod:`functions`: ``async_execution``, for functions that answer when the future that they return is done
* :func:`export`: functions that may be called where pickle is switched off
"""

from telegrad._rref.rref import RRef
from telegrad._wire.callables import export
from telegrad._worker import WorkerInfo
from telegrad.rpc import functions
from telegrad.rpc.api import (
    BackendType,
    debug_info,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    shutdown,
)
from telegrad.rpc.calls import remote, rpc_async, rpc_sync
from telegrad.rpc.options import RpcBackendOptions

#: The name of the options in ``torch.distributed.rpc``.
TensorPipeRpcBackendOptions = RpcBackendOptions

__all__ = [
    "BackendType",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "debug_info",
    "export",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
