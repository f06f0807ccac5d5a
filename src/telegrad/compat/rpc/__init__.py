"""Stands in for ``torch.distributed.rpc``: its names, public and private, on a worker of telegrad.

* ``api``: calls, gatherings, the end of a job; ``joining``: its beginning
* ``options``, ``backend_registry``, ``constants``: what ``init_rpc`` takes
* ``functions``: ``async_execution``
* ``agent``, ``debugging``: what programs ask torch's agent for
* ``internal``: pickling by hand
* ``_testing``: a worker that loses and delays messages

========================================== ===========================================================================
torch's private name                       what stands in for it
========================================== ===========================================================================
_get_current_rpc_agent, TensorPipeAgent    agent.TensorPipeAgent, which asks the worker
_is_current_rpc_agent_set                  _current.is_initialized
_init_rpc_backend                          joining._init_rpc_backend
_set_rpc_timeout                           Worker.default_timeout
_all_gather, _barrier, _wait_all_workers   gather.Gatherings, over rpc_sync and rpc_async
_wait_all                                  api._wait_all, over futures.wait_all
_delete_all_user_and_unforked_owner_rrefs  CompatWorker.drop_all_handles
_ignore_rref_leak                          CompatWorker.leaks_are_errors
_rref_context_get_debug_info               References.counts
RRef._get_type, _get_future, _serialize    compat.rref.RRef
PyRRef._deserialize                        compat.rref.RRef, which asks the worker that serialized it
TensorPipeAgent.get_metrics                the worker's own counts
PyRRef                                     compat.rref.RRef
_use_rpc_pickler, _internal_rpc_pickler    _wire.pickles, outside of calls
enable_gil_profiling                       a line of the debug info
_server_process_global_profile             nothing: it raises, and says what to use
RemoteProfilerManager                      nothing: it raises, and says what to use
_invoke_rpc_torchscript and the like       nothing: TorchScript is refused by the calls themselves
========================================== ===========================================================================
"""

from telegrad.compat.futures import offer_early_exit
from telegrad.compat.rpc import api as api
from telegrad.compat.rpc import backend_registry as backend_registry
from telegrad.compat.rpc import constants as constants
from telegrad.compat.rpc import functions as functions
from telegrad.compat.rpc import internal as internal
from telegrad.compat.rpc import options as options
from telegrad.compat.rpc import server_process_global_profiler as server_process_global_profiler
from telegrad.compat.rpc.agent import RpcAgent as RpcAgent
from telegrad.compat.rpc.agent import TensorPipeAgent as TensorPipeAgent
from telegrad.compat.rpc.agent import enable_gil_profiling as enable_gil_profiling
from telegrad.compat.rpc.api import RRef as RRef
from telegrad.compat.rpc.api import WorkerInfo as WorkerInfo
from telegrad.compat.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from telegrad.compat.rpc.api import _get_current_rpc_agent as _get_current_rpc_agent
from telegrad.compat.rpc.api import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from telegrad.compat.rpc.api import _reset_current_rpc_agent as _reset_current_rpc_agent
from telegrad.compat.rpc.api import _set_rpc_timeout as _set_rpc_timeout
from telegrad.compat.rpc.api import _wait_all as _wait_all
from telegrad.compat.rpc.api import get_rpc_timeout as get_rpc_timeout
from telegrad.compat.rpc.api import get_worker_info as get_worker_info
from telegrad.compat.rpc.api import method_factory as method_factory
from telegrad.compat.rpc.api import new_method as new_method
from telegrad.compat.rpc.api import remote as remote
from telegrad.compat.rpc.api import rpc_async as rpc_async
from telegrad.compat.rpc.api import rpc_sync as rpc_sync
from telegrad.compat.rpc.api import shutdown as shutdown
from telegrad.compat.rpc.debugging import _rref_context_get_debug_info as _rref_context_get_debug_info
from telegrad.compat.rpc.joining import _get_debug_info as _get_debug_info
from telegrad.compat.rpc.joining import _init_rpc_backend as _init_rpc_backend
from telegrad.compat.rpc.joining import init_rpc as init_rpc
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions
from telegrad.compat.rpc.server_process_global_profiler import (
    _server_process_global_profile as _server_process_global_profile,
)
from telegrad.rpc.api import is_available as is_available
from telegrad.rpc.options import RpcBackendOptions as RpcBackendOptions

PyRRef = RRef
BackendType: object


def __getattr__(name: str) -> object:
    if name == "BackendType":  # another one after each register_backend
        return backend_registry.BackendType
    raise AttributeError(f"telegrad.compat.rpc, which stands in for torch.distributed.rpc, has no {name!r}")


offer_early_exit()

__all__ = [
    "BackendType",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registry",
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
