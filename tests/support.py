"""What the tests of workers share: waiting with a limit, gates that cross between workers, and checks for leaks."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from telegrad import autograd
from telegrad._worker import Worker
from telegrad.testing import Cluster, cluster

PATIENCE = 30.0  # no test waits longer for one thing
AT_ONCE = 5.0  # seconds: on a busy machine too, what waits for no heartbeat and no timeout is done within them
NOTHING = {"contexts": [], "passes": [], "sends": 0, "recvs": 0}  # what autograd knows when no context is left

both_modes = pytest.mark.parametrize("mode", ["smart", "fast"])


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


# --- leaks ------------------------------------------------------------------------------------------------------------


def known_on(workers: Cluster, name: str) -> dict[str, Any]:
    """What autograd of one worker knows."""
    with workers.on(name):
        return autograd.debug_info()


def assert_no_contexts(workers: Cluster) -> None:
    """No worker keeps any part of a context."""
    for name in [worker.name for worker in workers if not worker.closed]:
        assert eventually(lambda name=name: known_on(workers, name) == NOTHING), (name, known_on(workers, name))


def assert_nothing_left(workers: Cluster) -> None:
    """No worker keeps any part of a context, and none is busy with a call or waits for one."""
    assert_no_contexts(workers)
    for agent in [worker.agent for worker in workers if not worker.closed]:
        assert eventually(lambda plane=agent.plane: not plane.unfinished), f"busy: {agent!r}, {agent.plane!r}"
        assert eventually(lambda calls=agent.calls: not len(calls)), f"waits: {agent.calls!r}"


def _empty(worker: Worker) -> bool:
    """A handle may be in a cycle, for example of an exception and its traceback."""
    if worker.references.wait_empty(0.01):
        return True
    gc.collect()
    return worker.references.wait_empty(0.1)


def assert_no_references(workers: Iterable[Worker]) -> None:
    """No worker holds, owns, expects or remembers any reference."""
    for worker in workers:
        if worker.closed:
            continue
        assert eventually(lambda worker=worker: _empty(worker)), f"leaked: {worker.references!r}"
        assert eventually(lambda worker=worker: not worker.references.broken), worker.references.broken
        worker.references.ledger.validate()


@contextmanager
def tidy_cluster(*names: str, **options: Any) -> Iterator[Cluster]:
    """A cluster that must leave no context, call, reference or thread behind; the calling thread acts for the first."""
    with no_new_threads(), cluster(*names, **{"timeout": PATIENCE, **options}) as workers, workers.on(names[0]):
        yield workers
        workers.faults.clear()
        assert_nothing_left(workers)
        assert_no_references(workers)


# --- threads ----------------------------------------------------------------------------------------------------------


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
