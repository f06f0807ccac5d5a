"""``telegrad.rpc``: the names, signatures and behaviour of ``torch.distributed.rpc``."""

from __future__ import annotations

import ctypes
import enum
import gc
import os
import secrets
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import torch

from telegrad._agent.agent import AgentOptions
from telegrad._agent.peers import WorkerRecord
from telegrad._current import clear_process_worker, current_worker, forget_all, is_initialized, set_process_worker
from telegrad._ids import MAX_WORKERS
from telegrad._torch import Store
from telegrad._transport.handshake import JOIN_NONCE, Identity
from telegrad._transport.shared_memory import Proof
from telegrad._wire.tensors import no_device_map
from telegrad._wire.values import Route
from telegrad._worker import Worker, WorkerInfo
from telegrad.errors import RendezvousError, UsageError
from telegrad.rpc.foreign_rpc import Strangers, knock_at
from telegrad.rpc.network import Network, host_id
from telegrad.rpc.options import RpcBackendOptions, check_name, warn_of_short_secret, warn_of_unknown_variables
from telegrad.rpc.records import link_key
from telegrad.rpc.rendezvous import Meeting, NewRoundError
from telegrad.rpc.stores import StoreGoneError, identity_in, open_store

DEFAULT_SHUTDOWN_TIMEOUT = 0.0

# The names under which this process has joined jobs.  The n-th joins of all workers meet, in their corner of the store.
_joined: list[str] = []


class BackendType(enum.Enum):
    """The values that ``backend`` of :func:`init_rpc` may have.

    There is one, ``TENSORPIPE``, so that programs for ``torch.distributed.rpc`` which name it run. It means telegrad's
    own implementation.
    """

    TENSORPIPE = "TENSORPIPE"


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of a job, and returns when all workers of the job are there.

    Every process of a job calls it once, with a name and a rank of its own. After that, any thread of the process can
    call the other workers, and they can call this one. A process has one worker at a time; a forked child starts
    without one. After :func:`shutdown` a process may join again, if all do.

    On one host nothing has to be configured. On several hosts, all workers need the same secret, in the environment
    variable ``TELEGRAD_SECRET`` or in the options; without a secret, a job is confined to one host and one user.

    Args:
        name (str): The name of this worker. It has letters, digits, ``_``, ``:`` and ``-`` only, and at most 127 of
            them. No other worker of the job may have it.
        backend (BackendType, optional): Accepted for programs that were written for torch. There is one.
        rank (int, optional): The number of this worker, from 0 on. By default it is taken from the environment variable
            ``RANK``, which ``telegrad run`` and ``torchrun`` set.
        world_size (int, optional): The number of workers. By default it is taken from ``WORLD_SIZE``. If it is given
            nowhere, workers may join at any time: a worker learns of another when it first names it or is called by it.
        rpc_backend_options (RpcBackendOptions, optional): Timeouts, threads, security and the place where the workers
            meet. By default that is ``env://``: ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        RendezvousError: The workers did not find each other within ``init_timeout`` seconds (the text names the missing
            ranks), two of them have the same name or rank, or they differ in the world size.
        AuthenticationError: The workers have different secrets, or only some have one.
        UsageError: The name, the rank, the world size or an option cannot be used, or this process has a worker
            already.
        TypeError: An argument has the wrong type.

    Example::

        # $ telegrad run --workers 2 program.py
        import os

        from telegrad import rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        if rank == 0:
            print(rpc.rpc_sync("worker1", pow, args=(2, 10)))
            # prints worker0 | 1024
        rpc.shutdown()
    """
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
    """Leaves the job; afterwards this process can neither call other workers nor be called.

    A graceful shutdown waits until every worker that is alive has called ``shutdown`` and no call is under way
    anywhere. Until then this worker serves calls: that is how a process that only serves, a parameter server for
    example, spends its life. It does not wait for workers that have died. Every 10 seconds it logs for which workers or
    calls it waits, unless it is serving.

    The worker's threads and sockets are gone when this returns, and also after a timeout. Futures that are not done
    fail with ``WorkerLostError``, and references (:class:`RRef`) to values of other workers can no longer be used.

    Args:
        graceful (bool, optional): If False, leave at once, and do not wait for functions that run here for others.
            Calls of other workers to this one then fail with ``WorkerLostError`` (default: True).
        timeout (float, optional): Seconds that a graceful shutdown may wait; 0, the default, means no limit.

    Raises:
        RpcTimeoutError: The graceful shutdown took longer than ``timeout``; the text names the workers or calls that it
            waited for. This worker has left all the same.
        UsageError: A function that runs for another worker called it with ``graceful=True``: it would wait for itself.
        NotInitializedError: This process has no worker.

    Example::

        # $ telegrad run --workers 2 program.py
        import os

        from telegrad import rpc

        total = 0


        def add(number):
            global total
            total += number


        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        rpc.rpc_sync("worker0", add, args=(rank + 1,))
        rpc.shutdown(timeout=60)  # worker0 serves worker1 until it is here too
        if rank == 0:
            print(total)
            # prints worker0 | 3
    """
    worker = current_worker()
    try:
        worker.shutdown(graceful, timeout)
    finally:
        if worker.closed:  # it is not, where shutdown was refused
            clear_process_worker(worker)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Returns the name and the id of a worker.

    Args:
        worker_name (str, optional): The name of the worker; by default this one. Inside a function that runs for
            another worker, "this one" is the worker that runs the function.

    Returns:
        A :class:`WorkerInfo`, which can be passed as ``to`` to calls.

    Raises:
        UnknownWorkerError: The job has no worker of that name.
        NotInitializedError: This process has no worker.

    Example::

        >>> # on worker0, in a job with worker1
        >>> rpc.get_worker_info()
        WorkerInfo(name='worker0', id=0)
        >>> rpc.get_worker_info("worker1").id
        1
    """
    return current_worker().info(worker_name)


def is_available() -> bool:
    """Tells whether RPC can be used, for programs that ask torch the same.

    Returns:
        True.
    """
    return True


def get_rpc_timeout() -> float:
    """Returns the timeout of calls that have none of their own.

    Returns:
        Seconds: ``rpc_timeout`` of the options, 60 by default; 0 means no limit.

    Raises:
        NotInitializedError: This process has no worker.

    Example::

        >>> rpc.get_rpc_timeout()
        60.0
    """
    return current_worker().default_timeout


def debug_info() -> dict[str, Any]:
    """Describes what this worker is doing at the moment, for people to read.

    The keys and texts may change between versions.

    Returns:
        A dict with the worker, its calls that wait for an answer, its threads, its peers and their states, the numbers
        of references that it holds and owns, and the memory that it receives into.

    Raises:
        NotInitializedError: This process has no worker.

    Example::

        >>> # on worker0, in a job with worker1
        >>> rpc.debug_info()["worker"]
        "<Worker 'worker0' (0) of 2>"
    """
    worker = current_worker()
    return {
        "worker": repr(worker),
        "calls": repr(worker.agent.calls),
        "pool": repr(worker.agent.plane),
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
