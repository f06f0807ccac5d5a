"""What stands in for ``torch.distributed.rpc.api``.

The functions do as torch's do, and call telegrad's.  Programs, and PyTorch's tests above all, replace some of the names
in here while they run (``_wait_all_workers``, ``_ignore_rref_leak``, …), so these are looked up when they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from telegrad._agent.barrier import repeated_notice
from telegrad._agent.peers import PeerState
from telegrad._current import clear_process_worker, current_worker, is_initialized
from telegrad._rref.rref import RRef as TelegradRRef
from telegrad._worker import To, Worker
from telegrad.compat import futures
from telegrad.compat.error_texts import speaks_as_torch
from telegrad.compat.profiling import profiled
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.compat.rpc.gather import AllGatherStates as AllGatherStates
from telegrad.compat.rpc.gather import Gatherings
from telegrad.compat.rpc.internal import _internal_rpc_pickler
from telegrad.compat.rref import RRef as RRef
from telegrad.compat.rref import _rref_typeof_on_owner as _rref_typeof_on_owner
from telegrad.compat.worker import CompatWorker
from telegrad.compat.worker import WorkerInfo as WorkerInfo
from telegrad.errors import NotInitializedError, RpcTimeoutError, TelegradError, UsageError, WorkerLostError

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

#: Whether a graceful shutdown ignores references that other workers still hold.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()

_LOOK_SECONDS = 0.5  # seconds between two checks whether an awaited worker is lost
_gatherings = Gatherings()
_agents: list[TensorPipeAgent] = []  # none, or that of this process


def _require_initialized(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_initialized():
            raise NotInitializedError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first (and not after shutdown)"
            )
        return function(*args, **kwargs)

    return wrapper


# --- the agent ------------------------------------------------------------------------------------------------------


def _is_current_rpc_agent_set() -> bool:
    return is_initialized()


@_require_initialized
def _get_current_rpc_agent() -> TensorPipeAgent:
    if not _agents:  # the worker was made by telegrad's own init_rpc
        raise UsageError("this worker was not started by torch.distributed.rpc.init_rpc, so it has no torch agent")
    return _agents[0]


def _set_and_start_rpc_agent(agent: Any) -> None:
    if not isinstance(agent, TensorPipeAgent):
        raise UsageError(
            f"a {type(agent).__qualname__} cannot carry telegrad's calls: under telegrad.compat there is one backend, "
            "BackendType.TENSORPIPE, and telegrad.rpc.RpcBackendOptions(transports=...) chooses its transports"
        )
    _agents[:] = [agent]


def _reset_current_rpc_agent() -> None:
    _agents.clear()


def _init_rpc_states(agent: Any) -> None:
    _set_and_start_rpc_agent(agent)


# --- calls ----------------------------------------------------------------------------------------------------------


@_require_initialized
def rpc_sync(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    worker = current_worker()
    with profiled(worker, "sync", to, func):
        return worker.rpc_sync(to, _callable(func), args, kwargs, timeout)


@_require_initialized
def rpc_async(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    worker = current_worker()
    with profiled(worker, "async", to, func):
        future = worker.rpc_async(to, _callable(func), args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@_require_initialized
def remote(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    worker = current_worker()
    with profiled(worker, "remote", to, func):
        return worker.remote(to, _callable(func), args, kwargs, timeout)


def _callable(func: Any) -> Any:
    if isinstance(func, (torch._C.ScriptFunction, torch._C.ScriptMethod)):
        raise UsageError(
            f"{func.name!r} is a TorchScript function, and telegrad calls Python functions only (TorchScript is "
            "deprecated): take @torch.jit.script off it, or call it from a Python function and send that one"
        )
    return func


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for all calls that ``rpc_async`` began inside, on this thread."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        begun = _thread_local_var.future_list
        del _thread_local_var.future_list
        futures.wait_all(begun)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Accepted, and of no effect: values that a class pickles in its own way say so in ``__reduce__``."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@speaks_as_torch
@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> Any:
    return current_worker().info(worker_name)


def _to_worker_info(to: To) -> Any:
    return to if isinstance(to, WorkerInfo) else get_worker_info(to)  # type: ignore[arg-type]


@_require_initialized
def get_rpc_timeout() -> float:
    return current_worker().default_timeout


@_require_initialized
def _set_rpc_timeout(seconds: float) -> None:
    current_worker().default_timeout = float(seconds)


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    return rref._get_type(timeout, blocking)


# --- names that torch leaves behind ---------------------------------------------------------------------------------
#
# torch makes the methods of RRef in a loop of its module, and the loop's variables stay there as names of the module.
# Editors offer them, so programs import them (``from torch.distributed.rpc.api import method_name``), mostly unused.


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(super(RRef, self), method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


method_name = "to_here"  # the last one in the loop
method = TelegradRRef.to_here
docstring = method.__doc__
new_method = method_factory(method_name, docstring)


# --- gatherings -----------------------------------------------------------------------------------------------------


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Collection[str]) -> None:
    """Runs on the leader."""
    _gatherings.add(sequence_id, worker_name, obj, set(worker_names))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Runs on each of the others."""
    _gatherings.complete(sequence_id, objects_map)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """An object of each worker, by its name, on all of them."""
    worker = current_worker()
    names = set(worker_names or (peer.name for peer in worker.agent.peers))
    leader = min(names)
    for_calls = worker.default_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    for_all = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    key, state = _gatherings.begin(names)
    try:
        if leader == worker.name:
            _gather_to_leader(key, worker.name, obj, names)
        else:
            rpc_sync(leader, _gather_to_leader, (key, worker.name, obj, names), timeout=for_calls)
        begun = time.monotonic()
        with repeated_notice(lambda: _say_missing(worker, leader, key, names, time.monotonic() - begun)):
            worker.wait_locally(lambda: _wait_for(state, names, for_all))
        if leader == worker.name:
            _tell_followers(key, state, names - {leader}, for_calls)
        return state.gathered_objects
    finally:
        _gatherings.end(key)


def _say_missing(worker: Worker, leader: str, key: str, names: set[str], seconds: float) -> None:
    """Logs what a long gathering waits for.  It runs on a thread without a worker, so the worker is passed."""
    missing: list[str] = []
    with contextlib.suppress(TelegradError):
        missing = worker.rpc_sync(leader, _missing_at_leader, (key, names), timeout=1.0)
    logger.warning(
        "worker %r: shutdown or _all_gather has waited %.0f s for %s to call it too",
        worker.name,
        seconds,
        ", ".join(missing) or "the others",
    )


def _missing_at_leader(sequence_id: str, worker_names: Collection[str]) -> list[str]:
    """Runs on the leader."""
    return _gatherings.missing(sequence_id, set(worker_names))


def _wait_for(state: AllGatherStates, names: set[str], timeout: float | None) -> bool:
    """Waits for all of them, and not for one that is lost."""
    peers = [peer for peer in current_worker().agent.peers if peer.name in names]
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    while not state.proceed_signal.wait(min(max(deadline - time.monotonic(), 0.0), _LOOK_SECONDS)):
        for peer in peers:
            if peer.link is None and peer.state is PeerState.KNOWN:
                with contextlib.suppress(TelegradError):
                    current_worker().agent.link_to(peer)  # or its death would go unnoticed
        lost = [peer.name for peer in peers if peer.state is PeerState.LOST]
        if lost:
            raise WorkerLostError(f"_all_gather of {sorted(names)} cannot end: {', '.join(lost)} is lost")
        if time.monotonic() >= deadline:
            raise RpcTimeoutError(f"_all_gather waited {timeout:g} s for {sorted(names)}")
    return True


def _tell_followers(key: str, state: AllGatherStates, followers: set[str], timeout: float) -> None:
    told = {
        name: rpc_async(name, _broadcast_to_followers, (key, state.gathered_objects), timeout=timeout)
        for name in followers
    }
    errors: dict[str, Exception] = {}
    for name, future in told.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        if all(isinstance(error, WorkerLostError) for error in errors.values()):
            raise first
        raise RuntimeError(
            f"Followers {sorted(errors)} timed out in _all_gather after {timeout:.2f} seconds, or failed. "
            f"The first exception is {first}"
        )


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Returns when all of these workers have called it."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("a barrier of %s failed", sorted(worker_names))


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when all workers have called it."""
    _all_gather(None, timeout=timeout)


# --- the end --------------------------------------------------------------------------------------------------------


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Deletes all references to values of other workers, and waits until their owners have processed that."""
    worker = current_worker()
    if isinstance(worker, CompatWorker):
        worker.drop_all_handles(timeout)


@speaks_as_torch
@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the job; if graceful, when all workers have called this and no call is under way."""
    worker = current_worker()
    if isinstance(worker, CompatWorker):
        worker.leaks_are_errors = not _ignore_rref_leak
    is_static = not _agents or _agents[0].is_static_group
    try:
        if graceful and is_static:
            try:
                _wait_all_workers(timeout)
            except WorkerLostError as error:
                if timeout != DEFAULT_SHUTDOWN_TIMEOUT:
                    raise  # it may have left because the time was over, as here
                logger.warning("shutdown goes on without it: %s", error)
            _delete_all_user_and_unforked_owner_rrefs()
        worker.shutdown(graceful, timeout)
    finally:
        worker.shutdown(graceful=False)
        clear_process_worker(worker)
        _reset_current_rpc_agent()
        _gatherings.forget()
