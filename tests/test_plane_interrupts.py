"""A Ctrl-C, or a signal handler that calls, at every moment of a call on a data plane."""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest

import telegrad._core
from planes import IMPLEMENTATIONS, STREAMS, Pair, linked, run_together
from support import AT_ONCE, PATIENCE, eventually, in_thread
from telegrad._wire.messages import Reply
from telegrad.errors import RpcTimeoutError, UsageError, WorkerLostError

CORE = telegrad._core.__path__[0]
# After these the interpreter looks for signals.
CHECKED = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD") if name in dis.opmap}

ENOUGH = 5  # times that a call was over before the moment: how long it is depends on the other threads


@pytest.fixture(params=IMPLEMENTATIONS)
def make_plane(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


@cache
def _may_interrupt(code: CodeType, done: int, following: int) -> bool:
    """Whether the interpreter looks for signals after an instruction.

    A signal's exception is raised by the instruction that was done and a trace function's by the following one, so no
    moment counts at which the two have different handlers: at the beginning and at the end of a ``with``.
    """
    entries = dis.Bytecode(code).exception_entries
    handlers = [[entry.target for entry in entries if entry.start <= at < entry.end] for at in (done, following)]
    return code.co_code[done] in CHECKED and handlers[0] == handlers[1]


class Moments:
    """Does something at one of the moments at which the calling thread, in the code of the data plane, may be
    interrupted by a signal: at the ``number``-th one."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self._before: dict[FrameType, int] = {}
        self.came = False
        self.where = ""

    def __enter__(self) -> Moments:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and frame.f_back is not None:
            self._before.pop(frame.f_back, None)  # a call of a Python function: it looks for signals at its beginning
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, self._before[frame] = self._before.get(frame), frame.f_lasti
            if before is not None and _may_interrupt(frame.f_code, before, frame.f_lasti) and not self.came:
                self._left -= 1
                if self._left < 0:
                    self.came = True
                    self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                    self._act()
        elif event == "return":
            self._before.pop(frame, None)
        return self._trace


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_others_go_on(pair: Pair, other: Callable[[], Any], moments: Moments) -> None:
    """The link serves other threads, or it is broken and they know."""
    caller, callee = pair
    try:
        other()
        run_together([lambda: caller.ask(timeout=AT_ONCE)] * 2)
    except WorkerLostError:
        assert eventually(lambda: caller.broken)
    except RpcTimeoutError:
        raise AssertionError(f"no answer after {moments.where}") from None
    for plane in (caller.plane, callee.plane):
        assert eventually(lambda plane=plane: not plane.unfinished, AT_ONCE), f"after {moments.where}: {plane!r}"


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "another reads"])
def test_a_ctrl_c_at_any_moment_of_a_call(make_plane: Any, reads: bool) -> None:
    """While other answers arrive: of a call with a callback, and of one that another thread waits for."""
    moment, over, broken = 0, 0, 0
    while over < ENOUGH:
        with linked(make_plane, "unix") as pair:
            caller, callee = pair
            done, gate = threading.Event(), threading.Event()

            def late(link: Any, frame: Any, gate: threading.Event = gate) -> None:
                assert gate.wait(PATIENCE)
                link.send(Reply(frame.message.call_id))

            callee.worker.functions["late"] = late
            caller.call("late", then=lambda link, pending, done=done: done.set(), timeout=PATIENCE)
            pending = caller.call("late")
            wait = lambda caller=caller, pending=pending: caller.result(pending)  # noqa: E731
            other = in_thread(wait) if not reads else None
            with contextlib.suppress(KeyboardInterrupt, WorkerLostError), Moments(moment, interrupt) as moments:
                gate.set()
                caller.ask()
            over += not moments.came
            assert done.wait(AT_ONCE), f"no callback after moment {moment}, {moments.where}"
            assert_others_go_on(pair, other or in_thread(wait), moments)
            broken += bool(caller.broken)
        moment += 1
    assert moment > 20
    assert broken < 0.8 * moment


def test_a_signal_handler_may_call_at_any_moment_of_a_call(make_plane: Any) -> None:
    """In the middle of a message it is told that it cannot wait."""
    moment, over, refused = 0, 0, 0
    while over < ENOUGH:
        with linked(make_plane, "unix") as pair:
            caller = pair[0]

            def handler(caller: Any = caller) -> None:
                nonlocal refused
                try:
                    assert caller.ask(text="within", timeout=AT_ONCE).message.body.tree == "within"
                except UsageError:
                    refused += 1

            with Moments(moment, handler) as moments:
                answer = caller.ask(text="outer", timeout=AT_ONCE)
            assert answer.message.body.tree == "outer", moments.where
            over += not moments.came
            assert caller.broken == []
            assert_others_go_on(pair, lambda: None, moments)
        moment += 1
    assert moment > 20
    assert 0 < refused < moment


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "sending"])
def test_a_real_signal_while_a_thread_waits_or_sends(make_plane: Any, transport: str, waits: bool) -> None:
    """The handler calls while its thread is inside of a system call."""
    with linked(make_plane, transport, reading=waits) as (caller, callee):
        me, within, gate = threading.get_ident(), threading.Event(), threading.Event()
        told: list[str] = []

        def handler(*_: Any) -> None:
            try:
                told.append(str(caller.ask(text="within").message.body.tree))
            except UsageError as error:
                told.append(str(error))
            within.set()
            gate.set()

        def late(link: Any, frame: Any) -> None:
            signal.pthread_kill(me, signal.SIGUSR1)
            assert gate.wait(PATIENCE)
            link.send(Reply(frame.message.call_id))

        def disturb() -> None:
            while not within.wait(0.05):
                signal.pthread_kill(me, signal.SIGUSR1)
            callee.start_reading()

        callee.worker.functions["late"] = late
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            if waits:
                caller.ask("late")
                assert told[0] == "within" or "in the middle of a message" in told[0]
            else:
                disturbing = in_thread(disturb)
                caller.note(1, "f", bytes(64 << 20))
                disturbing()
                assert "in the middle of a message" in told[0]
                callee.got(1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert caller.broken == callee.broken == []
