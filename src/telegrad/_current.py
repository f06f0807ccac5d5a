"""Which worker the running code belongs to.

A process has one worker, made by ``init_rpc``, and any of its threads may use it.  Tests run many workers in one
process; there, each thread is assigned to one worker (``adopt``, ``acting_as``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from telegrad.errors import NotInitializedError, UsageError

if TYPE_CHECKING:
    from telegrad._worker import Worker

_here: ContextVar[Worker | None] = ContextVar("telegrad_worker", default=None)
_lock = threading.Lock()
_of_process: list[Worker] = []  # none, or the one that init_rpc made


def current_worker() -> Worker:
    worker = _here.get()
    if worker is not None:
        return worker
    try:
        return _of_process[0]
    except IndexError:
        raise NotInitializedError(
            "RPC is not running in this process: call init_rpc first (and not after shutdown)"
        ) from None


def is_initialized() -> bool:
    return _here.get() is not None or bool(_of_process)


def set_process_worker(worker: Worker) -> None:
    with _lock:
        if _of_process:
            raise UsageError(f"RPC is already running in this process, as worker {_of_process[0].name!r}")
        _of_process.append(worker)


def clear_process_worker(worker: Worker) -> None:
    with _lock:
        if worker in _of_process:
            _of_process.remove(worker)


def forget_all() -> list[Worker]:
    """In a forked child: removes the workers, and replaces the lock, which another thread of the parent may hold."""
    global _lock
    _lock = threading.Lock()
    here = _here.get()
    forgotten = [*_of_process, *([here] if here is not None and here not in _of_process else [])]
    _of_process.clear()
    _here.set(None)
    return forgotten


def adopt(worker: Worker) -> None:
    """Assigns the calling thread to a worker."""
    _here.set(worker)


@contextmanager
def acting_as(worker: Worker) -> Iterator[Worker]:
    """Inside, the calling thread acts for that worker."""
    token = _here.set(worker)
    try:
        yield worker
    finally:
        _here.reset(token)
