"""What the tests of workers share: waiting with a limit, gates that cross between workers, and looking for leaks."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from telegrad._worker import Worker

PATIENCE = 30.0  # no test waits longer for one thing
AT_ONCE = 5.0  # seconds: on a busy machine too, what waits for no heartbeat and no timeout is done within them


def eventually(condition: Callable[[], object], timeout: float = PATIENCE) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Gate:
    """Two events that a call to another worker of this process takes along: it came in, and it may go on."""

    _all: dict[int, Gate] = {}  # noqa: RUF012
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.entered = threading.Event()
        self.opened = threading.Event()
        self._all[self.number] = self

    def open(self) -> None:
        self.opened.set()

    def wait_entered(self) -> None:
        assert self.entered.wait(PATIENCE), "the call did not come in"

    def pass_through(self) -> None:
        """Called over there."""
        self.entered.set()
        assert self.opened.wait(PATIENCE), "nobody opened the gate"

    def __reduce__(self) -> Any:
        return _gate, (self.number,)


def _gate(number: int) -> Gate:
    return Gate._all[number]


def pass_through(gate: Gate, result: Any = None) -> Any:
    gate.pass_through()
    return result


def _empty(worker: Worker) -> bool:
    """An exception of a test may hold handles in a cycle with its traceback, and come into being only just now."""
    if worker.references.wait_empty(0.1):
        return True
    gc.collect()
    return False


def assert_no_references(workers: Iterable[Worker]) -> None:
    """Nobody holds, owns, expects or remembers any reference."""
    for worker in workers:
        if worker.closed:
            continue
        assert eventually(lambda worker=worker: _empty(worker)), f"leaked: {worker.references!r}"
        assert eventually(lambda worker=worker: not worker.references.broken), worker.references.broken
        worker.references.ledger.validate()


def in_thread(action: Callable[[], Any]) -> Callable[[], Any]:
    """Runs something on a thread; what is returned waits for its result, or raises its exception."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="test", daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the thread hangs"
        value, error = outcome.pop()
        if error is not None:
            raise error
        return value

    return join


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("telegrad", "test"))}


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Inside may start threads, but must end them."""
    before = our_threads()
    yield
    assert eventually(lambda: our_threads() <= before, 5.0), our_threads() - before
