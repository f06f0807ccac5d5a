"""Which thread of a data plane does what: limits, nesting, blocked threads, and the end of threads."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planes import IMPLEMENTATIONS, Countdown, End, Pair, Worker, close, connected_back, linked, run_together
from support import AT_ONCE, PATIENCE, eventually, our_threads
from telegrad._core.interface import DataPlane
from telegrad._core.python import plane as python_plane
from telegrad._wire.messages import Goodbye, Reply


@pytest.fixture(params=IMPLEMENTATIONS)
def make_plane(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


Linked = Callable[[int], Pair]


@pytest.fixture(params=["loopback", "unix"])
def link_with(request: pytest.FixtureRequest, make_plane: Any) -> Iterator[Linked]:
    """Makes a pair whose planes run at most so many calls at once."""
    with contextlib.ExitStack() as stack:
        yield lambda limit: stack.enter_context(linked(make_plane, request.param, limit))


class Gates:
    """A function that blocks where the data plane does not see it, until the test opens it."""

    def __init__(self, worker: Worker, name: str = "block") -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        worker.functions[name] = self.block

    def block(self, link: Any, frame: Any) -> None:
        self.entered.release()
        assert self.opened.wait(PATIENCE), "the gate was not opened"
        link.send(Reply(frame.message.call_id))

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE), "the call did not come in"

    def __enter__(self) -> Gates:
        return self

    def __exit__(self, *_: Any) -> None:
        self.opened.set()


def nesting(caller: End, callee: End) -> None:
    """``nest`` with the depth as its text: each calls the other worker, until it is 0."""

    def nest(ask: Callable[..., Any]) -> Any:
        def run(link: Any, frame: Any) -> None:
            depth = int(frame.message.body.tree)
            if depth:
                ask("nest", text=str(depth - 1))
            link.send(Reply(frame.message.call_id, frame.message.body))

        return run

    callee.worker.functions["nest"] = nest(callee.ask)
    caller.worker.functions["nest"] = nest(caller.ask)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2])
def test_calls_may_go_in_circles(link_with: Linked, limit: int) -> None:
    pair = link_with(limit)
    with connected_back(pair) as (back, _):
        nesting(pair[0], back)
        assert pair[0].ask("nest", text="64").message.body.tree == "64"


def test_no_more_calls_run_than_the_limit(link_with: Linked) -> None:
    caller, callee = link_with(2)
    lock, running, most = threading.Lock(), 0, 0

    def busy(link: Any, frame: Any) -> None:
        """Uses the processor: a process that uses none is taken for one that waits for another worker."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        with lock:
            running -= 1
        link.send(Reply(frame.message.call_id))

    callee.worker.functions["busy"] = busy
    for pending in [caller.call("busy") for _ in range(12)]:
        caller.result(pending)
    assert most == 2


def test_a_full_worker_still_handles_messages(link_with: Linked) -> None:
    caller, callee = link_with(2)
    with Gates(callee.worker) as gates:
        calls = [caller.call("block") for _ in range(6)]
        gates.wait_entered()
        gates.wait_entered()
        handled = Countdown(20)
        callee.worker.on_message = handled.step
        for number in range(20):
            caller.message(number)
        handled.wait()
    for pending in calls:
        caller.result(pending)


def test_messages_behind_one_that_blocks_are_handled(link_with: Linked) -> None:
    caller, callee = link_with(2)
    gate, handled = threading.Event(), Countdown(20)

    def handle(link: Any, frame: Any) -> None:
        if frame.message.rref_id[1] == 0:
            assert gate.wait(PATIENCE)
        else:
            handled.step()

    callee.worker.on_message = handle
    try:
        for number in range(21):
            caller.message(number)
        handled.wait()
    finally:
        gate.set()


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "then"])
def test_short_calls_behind_one_that_blocks_are_answered(link_with: Linked, waits: bool) -> None:
    caller, callee = link_with(16)
    for _ in range(20):
        caller.ask()
    with Gates(callee.worker) as gates:
        first = caller.call("block")
        done = Countdown(100)
        started = time.monotonic()
        rest = [caller.call(then=None if waits else done.step) for _ in range(100)]
        for pending in rest if waits else ():
            caller.result(pending)
        if not waits:
            done.wait()
        assert time.monotonic() - started < AT_ONCE
        gates.wait_entered()
    caller.result(first)


def test_callbacks_behind_one_that_blocks_are_called_soon(link_with: Linked) -> None:
    """Also after a while in which nothing happened: the first blocks until the last was called."""
    caller, _ = link_with(4)
    for _ in range(5):
        assert eventually(lambda: idle(caller.plane))
        last = threading.Event()
        done = Countdown(20)

        def block(link: Any, pending: Any, last: threading.Event = last, done: Countdown = done) -> None:
            assert last.wait(PATIENCE)
            done.step()

        caller.call(then=block)
        for _ in range(18):
            caller.call(then=done.step)
        caller.call(then=lambda link, pending, last=last, done=done: (done.step(), last.set()))
        done.wait()


def idle(plane: DataPlane) -> bool:
    return not plane.unfinished and not plane.pending


def test_calls_that_wait_for_each_other_unseen_all_run(link_with: Linked) -> None:
    """More than the limit, on a lock that the data plane knows nothing of."""
    caller, callee = link_with(2)
    together = threading.Barrier(4)

    def meet(link: Any, frame: Any) -> None:
        together.wait(PATIENCE)
        link.send(Reply(frame.message.call_id))

    callee.worker.functions["meet"] = meet
    for pending in [caller.call("meet") for _ in range(4)]:
        caller.result(pending)


def test_what_is_submitted_runs_on_a_thread_that_may_block(link_with: Linked) -> None:
    caller, _ = link_with(2)
    answers: list[Any] = []
    done = Countdown(10)

    def ask(first: Any, second: Any) -> None:
        assert caller.plane.serves_here()
        answers.append((first, second, caller.ask(text="submitted").message.body.tree))
        done.step()

    assert not caller.plane.serves_here()
    for number in range(10):
        caller.plane.submit(ask, "first", number, call=bool(number % 2))
    done.wait()
    assert sorted(answers) == [("first", number, "submitted") for number in range(10)]
    assert eventually(lambda: not caller.plane.unfinished)


def test_what_blocks_in_another_way_may_say_so(link_with: Linked) -> None:
    """All threads that may run calls wait for an event that another call sets."""
    caller, callee = link_with(1)
    event = threading.Event()

    def wait(link: Any, frame: Any) -> None:
        with callee.plane.blocking():
            assert event.wait(PATIENCE)
        link.send(Reply(frame.message.call_id))

    def release(link: Any, frame: Any) -> None:
        event.set()
        link.send(Reply(frame.message.call_id))

    callee.worker.functions.update(wait=wait, release=release)
    waiting = [caller.call("wait") for _ in range(3)]
    caller.ask("release")
    for pending in waiting:
        caller.result(pending)


def test_a_thread_does_something_before_it_waits_for_another_worker(link_with: Linked) -> None:
    caller, _ = link_with(2)
    done: list[str] = []

    def act() -> None:
        done.append("act")

    assert caller.plane.before_waiting(act) is None
    caller.ask()
    assert done == ["act"]
    with caller.plane.blocking():
        assert done == ["act", "act"]
    assert caller.plane.before_waiting(None) is act
    caller.ask()
    assert done == ["act", "act"]


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4, 1])
def test_no_wake_up_is_lost(make_plane: Any, limit: int) -> None:
    """Random calls on several threads.  A lost wake-up shows as a call that takes until the next tick, or for ever."""
    end = time.monotonic() + 3.0
    with linked(make_plane, "unix", limit) as pair, connected_back(pair) as (back, _):
        caller, callee = pair
        nesting(caller, back)

        def nap(link: Any, frame: Any) -> None:
            time.sleep(float(frame.message.body.tree))
            link.send(Reply(frame.message.call_id))

        callee.worker.functions["nap"] = nap

        def one(seed: int) -> int:
            chance, rounds = random.Random(seed), 0
            while time.monotonic() < end:
                kind = chance.randrange(7)
                if kind < 2:
                    for _ in range(chance.randrange(20)):
                        caller.ask()
                elif kind == 2:
                    done = Countdown(30)
                    for _ in range(30):
                        caller.call(then=done.step)
                    done.wait()
                elif kind == 3:
                    for pending in [caller.call() for _ in range(chance.randrange(60))]:
                        caller.result(pending)
                elif kind == 4:
                    caller.ask("nest", text=str(chance.randrange(6)))
                elif kind == 5:
                    caller.ask("nap", text=str(chance.random() * 0.004))
                else:
                    time.sleep(chance.random() * 0.003)
                rounds += 1
            return rounds

        assert all(run_together([lambda seed=seed: one(seed) for seed in range(5)]))
        assert eventually(lambda: idle(caller.plane) and idle(callee.plane))


def test_a_finalizer_may_submit_at_any_moment(link_with: Linked) -> None:
    """The garbage collector runs it on any thread, also inside of the data plane."""
    caller, _ = link_with(4)
    born, ran = [0], [0]

    class Garbage:
        def __init__(self) -> None:
            self.me = self  # a cycle: only the collector frees it
            born[0] += 1

        def __del__(self) -> None:
            caller.plane.submit(lambda *_: ran.__setitem__(0, ran[0] + 1))
            caller.link.send(Goodbye())

    def call() -> None:
        for _ in range(200):
            Garbage()
            caller.ask()

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        run_together([call, call, lambda: [caller.ask(then=None) for _ in range(200)]])
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert eventually(lambda: not caller.plane.unfinished)
    assert born[0] == 400
    assert eventually(lambda: ran[0] == 400), ran


# --- threads ----------------------------------------------------------------------------------------------------------


def test_surplus_threads_end(link_with: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_plane, "_SURPLUS_SECONDS", 0.05)
    others = our_threads()  # of the process: one that copies for shared memory
    caller, callee = link_with(16)
    planes = {caller.plane, callee.plane}
    before = our_threads()
    with Gates(callee.worker) as gates:
        calls = [caller.call("block") for _ in range(10)]
        for _ in calls:
            gates.wait_entered()
        assert len(our_threads() - before) >= 9
    for pending in calls:
        caller.result(pending)
    most = 3 * len(planes)  # two idle ones and the timer
    assert eventually(lambda: len(our_threads() - others) <= most), our_threads()
    caller.ask()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> list[str]:
    """The system gives this worker no thread, so many times."""
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"telegrad-{name}") and len(refused) < count:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def test_a_system_without_threads_is_asked_again(link_with: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, callee = link_with(4)
    refused = refuse_threads(monkeypatch, "call", 3)
    for _ in range(8):
        done = threading.Event()
        callee.plane.submit(lambda *_, done=done: done.set())
        assert done.wait(PATIENCE)
        caller.ask()
    assert eventually(lambda: len(refused) == 3)


def test_a_system_without_threads_is_asked_again_while_all_threads_wait(
    make_plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in circles needs a second thread, and no thread comes back to ask for one."""
    with linked(make_plane, "unix") as pair, connected_back(pair) as (back, _):
        nesting(pair[0], back)
        refused = refuse_threads(monkeypatch, "call", 3)
        assert pair[0].ask("nest", text="4").message.body.tree == "4"
        assert len(refused) == 3


def test_a_close_waits_once_and_not_once_per_thread(make_plane: Any) -> None:
    """And the last thread that was left behind closes the descriptors."""
    descriptors = set(os.listdir("/proc/self/fd"))
    worker, gate, entered = Worker(make_plane, "busy", 8), threading.Event(), Countdown(4)

    def block(*_: Any) -> None:
        entered.step()
        assert gate.wait(PATIENCE)

    for _ in range(4):
        worker.plane.submit(block, call=True)
    entered.wait()
    started = time.monotonic()
    worker.plane.close(0.5)
    assert time.monotonic() - started < 4 * 0.5
    gate.set()
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= descriptors), "a descriptor was left"


def test_a_plane_that_was_closed_writes_into_no_file_of_another(make_plane: Any) -> None:
    """Its descriptors may be other files by now."""
    with linked(make_plane, "unix") as (caller, callee):
        caller.ask()
        close(caller, callee)
        readers, writers = zip(*[os.pipe() for _ in range(20)], strict=True)
        caller.plane.submit(lambda *_: None)
        caller.plane.wake_before(0.0)
        caller.link.close()
        for reader in readers:
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):
                os.read(reader, 100)
        for fd in (*readers, *writers):
            os.close(fd)


def test_a_callback_of_a_call_that_is_settled_after_the_close_is_called(make_plane: Any) -> None:
    with linked(make_plane, "unix") as (caller, callee):
        done: list[Any] = []
        pending = caller.call("nothing", then=lambda link, pending: done.append(pending.take_outcome()))
        caller.plane.close(PATIENCE)
        callee.plane.close(PATIENCE)
        assert caller.plane.settle(pending, ValueError("closed"))
        assert [str(outcome) for outcome in done] == ["closed"]
