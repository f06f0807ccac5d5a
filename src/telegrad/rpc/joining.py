"""Joining a job: meets the other workers in the store, and makes the worker of this process."""

from __future__ import annotations

import os
import secrets
import sys
import time
from urllib.parse import urlsplit

import torch

from telegrad._agent.agent import AgentOptions
from telegrad._agent.peers import WorkerRecord
from telegrad._current import current_worker, is_initialized, set_process_worker
from telegrad._ids import MAX_WORKERS
from telegrad._torch import Store
from telegrad._transport.handshake import JOIN_NONCE, Identity
from telegrad._transport.shared_memory import Proof
from telegrad._wire.tensors import no_device_map
from telegrad._wire.values import Route
from telegrad._worker import Worker
from telegrad.errors import RendezvousError, UsageError
from telegrad.rpc.foreign_rpc import TorchWorkers, count_at_store
from telegrad.rpc.network import Network, host_id
from telegrad.rpc.options import RpcBackendOptions, check_name, warn_of_short_secret, warn_of_unknown_variables
from telegrad.rpc.records import link_key
from telegrad.rpc.rendezvous import Meeting, NewRoundError
from telegrad.rpc.stores import StoreGoneError, identity_in, open_store

# The names under which this process has joined jobs.  Their number is part of the prefix in the store: the n-th join of
# this process meets the n-th joins of the other workers.
_joined: list[str] = []


def join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    """As ``init_rpc``, without the garbage collection, which would copy all of a forked child's memory."""
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
    warn_of_unknown_variables()
    _join(name, rank, world_size, options)


def _check_numbers(rank: int, world_size: int | None) -> None:
    if not isinstance(rank, int) or rank < 0:
        raise UsageError(
            f"rank must be a number from 0 on, in the argument or the environment variable RANK, not {rank}"
        )
    if world_size is not None and not rank < world_size <= MAX_WORKERS:
        raise UsageError(f"rank {rank} does not fit a world of {world_size} (and {MAX_WORKERS} is the most)")


def _join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    """Tries to meet the other workers until the init timeout.

    It tries again when the store goes away, because that may have been the store of the previous job, which rank 0 was
    leaving, and when rank 0 opens a new round, because torchrun has restarted it.
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
            if missing and left < options.init_timeout:  # this worker had joined, and the store is gone now
                raise _rendezvous_gone(options, missing, error) from error
            raise
        else:
            _joined.append(name)
            return
        time.sleep(0.02)


def _rendezvous_gone(options: RpcBackendOptions, missing: list[int], error: Exception) -> RendezvousError:
    ranks = f"; ranks {', '.join(map(str, missing))} had not joined" if missing else ""
    return RendezvousError(
        f"the rendezvous at {options.init_method} was closed while this worker waited there, because rank 0 gave up or "
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
    torch_workers = TorchWorkers(store, lambda: count_at_store(store, world_size))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    part = store.under(f"telegrad/{attempt}/{len(_joined)}")
    meeting = Meeting(part, rank, name, world_size, timeout, mark, torch_workers, missing)
    meeting.host = None if has_secret else host_id()
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size is not None:
            meeting.enter_round(store.under("telegrad"))
        meeting.claim()
        _set_up(meeting, name, rank, options, store.raw)
        if world_size is not None:
            store.close()  # all records have been read
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
            worker.abandon()  # ends its threads
        raise
    worker.start()
    set_process_worker(worker)  # before the first call arrives: its function may start a thread that uses the worker
    network.open(worker.agent, key_of_links)


def _introduce(worker: Worker, meeting: Meeting, key: bytes, network: Network) -> bytes:
    """Adds the peers to the worker: all of them, or, in a job of open size, each one when it is first named.

    Returns:
        The key that authenticates the links between them.
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
    """Identifies the program that runs as ``__main__``.  Workers of the same program can send its functions by name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path else ""
