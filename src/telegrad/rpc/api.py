"""``telegrad.rpc``: the names, signatures and behaviour of ``torch.distributed.rpc``."""

from __future__ import annotations

import ctypes
import enum
import gc
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from telegrad._agent.agent import AgentOptions
from telegrad._agent.futures import Future
from telegrad._agent.peers import WorkerRecord
from telegrad._current import clear_process_worker, current_worker, forget_all, is_initialized, set_process_worker
from telegrad._ids import MAX_WORKERS
from telegrad._rref.rref import UNSET_TIMEOUT, RRef
from telegrad._torch import Store
from telegrad._transport.handshake import JOIN_NONCE, Identity
from telegrad._transport.shared_memory import Proof
from telegrad._wire.tensors import no_device_map
from telegrad._wire.values import Route
from telegrad._worker import To, Worker, WorkerInfo
from telegrad.errors import RendezvousError, UsageError
from telegrad.rpc.foreign_rpc import Strangers, knock_at
from telegrad.rpc.network import Network, host_id
from telegrad.rpc.options import RpcBackendOptions, check_name, warn_of_short_secret
from telegrad.rpc.records import link_key
from telegrad.rpc.rendezvous import Meeting, NewRoundError
from telegrad.rpc.stores import StoreGoneError, identity_in, open_store

DEFAULT_SHUTDOWN_TIMEOUT = 0.0

# The names under which this process has joined jobs.  The n-th joins of all workers meet, in their corner of the store.
_joined: list[str] = []


class BackendType(enum.Enum):
    """What ``backend`` of ``init_rpc`` may be: there is one, telegrad's own, under the name that programs use."""

    TENSORPIPE = "TENSORPIPE"


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker; returns when all workers of the job are there."""
    options = rpc_backend_options if rpc_backend_options is not None else RpcBackendOptions()
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(f"backend must be a BackendType, not {backend!r}")
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(f"rpc_backend_options must be telegrad.rpc.RpcBackendOptions, not {type(options)}")
    # The first full collection walks all of torch (100 ms); here it does not fall into the first burst of calls, and
    # Python waits with the next one until a quarter more objects live.
    gc.collect()
    join(name, rank, world_size, options)


def join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    """As ``init_rpc``, without the collection, which is dear in a forked child: it makes all memory the child's own."""
    check_name(name)
    numbers: tuple[tuple[str, object], ...] = (("rank", rank), ("world_size", world_size))
    for argument, number in numbers:
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{argument} must be a number, not {number!r}")
    if is_initialized():
        raise UsageError(f"RPC is already running in this process, as worker {current_worker().name!r}")
    rank, world_size = identity_in(options.init_method, rank, world_size)
    _check_numbers(rank, world_size)
    warn_of_short_secret(options.secret_bytes())
    _join(name, rank, world_size, options)


def _check_numbers(rank: int, world_size: int | None) -> None:
    if not isinstance(rank, int) or rank < 0:
        raise UsageError(
            f"rank must be a number from 0 on, in the argument or the environment variable RANK, not {rank}"
        )
    if world_size is not None and not rank < world_size <= MAX_WORKERS:
        raise UsageError(f"rank {rank} does not fit a world of {world_size} (and {MAX_WORKERS} is the most)")


def _join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    """Meets the others, and puts this process's worker together.

    Starts again when the store goes away: it may have been that of the job before, which rank 0 was about to leave.
    The same under torchrun, when rank 0 was restarted.
    """
    mark = secrets.token_hex(8)
    missing: list[int] = []
    left = options.init_timeout
    deadline = time.monotonic() + left
    while True:
        try:
            _meet(mark, missing, name, rank, world_size, options, left)
        except (StoreGoneError, NewRoundError) as error:
            left = round(deadline - time.monotonic(), 1)
            if left <= 0:
                raise _rendezvous_gone(options, missing, error) from error
        except RendezvousError as error:
            if missing and left < options.init_timeout:  # we were there, and cannot come back
                raise _rendezvous_gone(options, missing, error) from error
            raise
        else:
            _joined.append(name)
            return
        time.sleep(0.02)


def _rendezvous_gone(options: RpcBackendOptions, missing: list[int], error: Exception) -> RendezvousError:
    ranks = f"; ranks {', '.join(map(str, missing))} had not come" if missing else ""
    return RendezvousError(
        f"the rendezvous at {options.init_method} went away while this worker waited there, since rank 0 gave up or "
        f"died{ranks} ({str(error).splitlines()[0]})"
    )


def _meet(
    mark: str,
    missing: list[int],
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    timeout: float,
) -> None:
    has_secret = options.secret_bytes() is not None
    store = open_store(options.init_method, rank, world_size, timeout, local=not has_secret)
    strangers = Strangers(store, lambda: knock_at(store, world_size))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    corner = store.under(f"telegrad/{attempt}/{len(_joined)}")
    meeting = Meeting(corner, rank, name, world_size, timeout, mark, strangers, missing)
    meeting.host = None if has_secret else host_id()
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size is not None:
            meeting.enter_round(store.under("telegrad"))
        meeting.claim()
        _set_up(meeting, name, rank, options, store.raw)
        if world_size is not None:
            store.close()  # all are known
    except (StoreGoneError, NewRoundError):
        store.close()
        raise
    except BaseException as error:
        meeting.give_up(str(error) or type(error).__name__)
        raise


def _set_up(meeting: Meeting, name: str, rank: int, options: RpcBackendOptions, store: Store) -> None:
    key = meeting.key(options.secret_bytes())
    near = urlsplit(options.init_method).hostname or os.environ.get("MASTER_ADDR", "")
    nonce = secrets.token_bytes(JOIN_NONCE)
    network = Network(Identity(rank, name, nonce), key, options, near)
    worker: Worker | None = None
    try:
        proof = Proof()
        me = WorkerRecord(
            worker_id=rank,
            name=name,
            pid=proof.pid,
            host=host_id(),
            addresses=tuple(network.addresses),
            shared_memory_fd=proof.fd,
            shared_memory_token=proof.token,
            main=_main_program(),
            allow_pickle=options.allow_pickle,
            world_size=meeting.world_size or 0,
            nonce=nonce,
        )
        worker = options.worker_type(
            me,
            AgentOptions(options.num_worker_threads, options.rpc_timeout, options.heartbeat, options.allow_pickle),
            network.dial,
            lambda record: _route(me, record, options),
        )
        worker.on_close(network.close)
        worker.on_fork.append(network.disown)
        worker.keep = (proof, store)
        meeting.publish(me, key)
        key_of_links = _introduce(worker, meeting, key, network)
    except BaseException:
        network.close()
        if worker is not None:
            worker.abandon()  # its threads
        raise
    worker.start()
    set_process_worker(worker)  # before the first call comes: what it runs may start a thread that asks for the worker
    network.open(worker.agent, key_of_links)


def _introduce(worker: Worker, meeting: Meeting, key: bytes, network: Network) -> bytes:
    """Tells the worker of the others: of all at once, or, in a job of open size, of each when it is first named.

    Returns the key of the links between them.
    """
    me = worker.agent.me

    def add(record: WorkerRecord | None) -> WorkerRecord | None:
        if record is not None:
            network.check(me, record)
            worker.add_peer(record)
        return record

    if meeting.world_size is not None:
        records = meeting.wait_for_all(key)
        for record in records:
            add(record)
        return link_key(key, records)
    worker.agent.find_record = lambda to: add(meeting.find(to, key))
    worker.on_close(meeting.leave)
    return link_key(key, None)


def _route(me: WorkerRecord, to: WorkerRecord, options: RpcBackendOptions) -> Route:
    device_map = options.device_maps.get(to.name)

    def device_for(device: torch.device) -> str | None:
        target = device_map.get(device) if device_map else None
        return str(target) if target is not None else no_device_map(device)

    return Route(
        to.worker_id,
        allow_pickle=me.allow_pickle and to.allow_pickle,
        allow_cloudpickle=options.allow_cloudpickle,
        same_main=bool(me.main) and me.main == to.main,
        device_for=device_for,
    )


def _main_program() -> str:
    """What runs as ``__main__``: names in it mean the same to workers that run the same."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path else ""


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the job.  Gracefully: waits until every worker that is alive calls this and nothing is under way."""
    worker = current_worker()
    try:
        worker.shutdown(graceful, timeout)
    finally:
        clear_process_worker(worker)


def rpc_sync(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Runs ``func(*args, **kwargs)`` on worker ``to`` and returns its result.

    An ``async def`` function is awaited there, on an event loop that all such functions share: it should await
    ``rpc_async`` and not block in ``rpc_sync``.
    """
    return current_worker().rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future:
    """As ``rpc_sync``, but returns a future, without waiting for the function.  The first call to a worker connects."""
    return current_worker().rpc_async(to, func, args, kwargs, timeout)


def remote(
    to: To,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """As ``rpc_sync``, but leaves the result on worker ``to`` and returns a reference to it at once."""
    return current_worker().remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The name and id of a worker, by default of this one."""
    return current_worker().info(worker_name)


def is_available() -> bool:
    """As in torch, whether RPC can be used: it can."""
    return True


def get_rpc_timeout() -> float:
    """The seconds that a call may take unless it says otherwise."""
    return current_worker().default_timeout


def debug_info() -> dict[str, Any]:
    """What this worker is doing just now."""
    worker = current_worker()
    return {
        "worker": repr(worker),
        "calls": repr(worker.agent.calls),
        "pool": repr(worker.agent.pool),
        "peers": [repr(peer) for peer in worker.agent.peers],
        "references": worker.references.counts(),
        "buffers": repr(worker.agent.marshal.buffers),
    }


def forget_after_fork() -> None:
    """A forked child has the parent's memory but none of its threads: it starts without a worker.

    The worker that it inherits is never freed, not even at exit: the store's destructor would wait for a thread that
    the child does not have, and stop the parent's server.
    """
    for worker in forget_all():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
        worker.disown()


os.register_at_fork(after_in_child=forget_after_fork)
