"""``telegrad.rpc``: the names, signatures and behaviour of ``torch.distributed.rpc``."""

from __future__ import annotations

import ctypes
import enum
import gc
import os
from typing import Any

from telegrad._current import clear_process_worker, current_worker, forget_all
from telegrad._worker import WorkerInfo
from telegrad.rpc.joining import join
from telegrad.rpc.options import RpcBackendOptions

DEFAULT_SHUTDOWN_TIMEOUT = 0.0


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
    """Makes this process a worker of a job, and returns when all workers of the job have joined.

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
    # The first full collection visits all of torch's objects (100 ms), so it is done here and not during the first
    # calls.  Python starts the next one when there are a quarter more objects.
    gc.collect()
    join(name, rank, world_size, options)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the job; afterwards this process can neither call other workers nor be called.

    A graceful shutdown waits until every worker that is alive has called ``shutdown`` and no call is under way
    anywhere. Until then this worker serves calls, so a process that only serves, such as a parameter server, calls
    ``shutdown`` right after :func:`init_rpc`. It does not wait for workers that have died. Every 10 seconds it logs for
    which workers or calls it waits, unless it is serving.

    The worker's threads and sockets are gone when this returns, and also after a timeout. Futures that are not done
    fail with ``WorkerLostError``, and references (:class:`RRef`) to values of other workers can no longer be used.

    Args:
        graceful (bool, optional): If False, leave immediately, and do not wait for functions that run here for other
            workers. Calls of other workers to this one then fail with ``WorkerLostError`` (default: True).
        timeout (float, optional): Seconds that a graceful shutdown may wait; 0, the default, means no limit.

    Raises:
        RpcTimeoutError: The graceful shutdown took longer than ``timeout``; the text names the workers or calls that it
            waited for. This worker has left the job nevertheless.
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
        rpc.shutdown(timeout=60)  # worker0 serves worker1 until worker1 calls shutdown too
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
    """Returns whether RPC can be used, as ``torch.distributed.rpc.is_available`` does.

    Returns:
        True.
    """
    return True


def get_rpc_timeout() -> float:
    """Returns the timeout of calls that are made without one.

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
    """Describes what this worker is doing at the moment, as text for people.

    The keys and texts may change between versions.

    Returns:
        A dict with the worker, its calls that wait for an answer, its threads, its peers and their states, the numbers
        of references that it holds and owns, and its receive memory.

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
    """Runs in a forked child, which has the parent's memory but none of its threads: the child starts without a worker.

    The inherited worker is never freed, not even at exit: the store's destructor would wait for a thread that the child
    does not have, and stop the parent's server.
    """
    for worker in forget_all():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
        worker.disown()


os.register_at_fork(after_in_child=forget_after_fork)
