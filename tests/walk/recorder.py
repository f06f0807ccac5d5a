"""Records which functions of telegrad a process enters, on all of its threads.

``Recorder.install`` must be called before the worker starts its threads: Python lets a thread's profile function be set
by that thread only, so each new thread sets it when it begins.  ``missed`` tells whether a thread was left out.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import telegrad

ENTER, RESUME, LEAVE = "enter", "resume", "leave"

_PACKAGE = str(Path(telegrad.__file__).parent) + "/"
_PART_OF_FUNCTION = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Event(NamedTuple):
    """One step of a thread into a function, or out of it."""

    kind: str
    time: int  # of CLOCK_MONOTONIC, which all processes of a host share, in nanoseconds
    frame: int  # the same from ``enter`` to ``leave``
    file: str  # within the package; "" for the program that uses it
    function: str
    site: str  # the place that it was called from: the next function of telegrad on the stack, and the offset in it


class ThreadLog(NamedTuple):
    """What one thread did while the recorder was on."""

    name: str
    events: list[Event]
    others: int  # how many Python functions of other packages and of the standard library it entered


class Round(NamedTuple):
    """What the threads of both workers did for one step."""

    caller: list[ThreadLog]
    callee: list[ThreadLog]


class _Place(NamedTuple):
    """Where a code object stands.  ``first_yield``: a generator that has come so far is resumed, not entered."""

    code: CodeType  # kept alive, for its id is the key
    file: str
    function: str
    first_yield: int | None


class _Log:
    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.name = threading.current_thread().name
        self.events: list[Event] = []
        self.others = 0


class Recorder:
    """``program``: the file whose functions are shown as the program's own, in whose order telegrad is called."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._on = False
        self._here = threading.local()
        self._logs: list[_Log] = []
        self._places: dict[int, _Place | None] = {}

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def uninstall(self) -> None:
        """For the calling thread, and for threads that begin from now on."""
        threading.setprofile(None)
        sys.setprofile(None)

    def start(self) -> None:
        self._collect()
        self._on = True

    def stop(self) -> list[ThreadLog]:
        """What was recorded, of each thread that did something."""
        self._on = False
        return self._collect()

    def missed(self, patience: float = 5.0) -> list[str]:
        """The threads that run Python code and that the recorder does not see.

        A thread that is just beginning is seen a little later than it is there, and gets ``patience`` seconds for it.
        """
        deadline = time.monotonic() + patience
        while (missed := self._missed()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return missed

    def _missed(self) -> list[str]:
        seen = {log.ident for log in self._logs}
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return [names.get(ident, str(ident)) for ident in sys._current_frames() if ident not in seen]

    def _collect(self) -> list[ThreadLog]:
        logs = []
        for log in self._logs:
            events, log.events = log.events, []
            others, log.others = log.others, 0
            if events:
                logs.append(ThreadLog(log.name, events, others))
        return logs

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        try:
            log: _Log = self._here.log
        except AttributeError:
            log = self._here.log = _Log()
            self._logs.append(log)
        if not self._on or (event != "call" and event != "return"):
            return
        place = self._place(frame.f_code)
        if place is None:
            log.others += event == "call"
            return
        kind, site = LEAVE, ""
        if event == "call":
            resumed = place.first_yield is not None and frame.f_lasti >= place.first_yield
            kind, site = RESUME if resumed else ENTER, self._site(frame)
        log.events.append(Event(kind, time.monotonic_ns(), id(frame), place.file, place.function, site))

    def _site(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None:
            place = self._place(back.f_code)
            if place is not None:
                return f"{place.file}:{place.function}:{back.f_lasti}"
            back = back.f_back
        return ""

    def _place(self, code: CodeType) -> _Place | None:
        """None for what is not counted."""
        try:
            return self._places[id(code)]
        except KeyError:
            place = self._places[id(code)] = self._find_place(code)
            return place

    def _find_place(self, code: CodeType) -> _Place | None:
        name = code.co_filename
        if code.co_name in _PART_OF_FUNCTION or not (name.startswith(_PACKAGE) or name == self._program):
            return None
        file = "" if name == self._program else name.removeprefix(_PACKAGE)
        first_yield = None
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            steps = (step.offset for step in dis.get_instructions(code) if step.opname == "YIELD_VALUE")
            first_yield = next(steps, None)
        return _Place(code, file, code.co_qualname.replace(".<locals>", ""), first_yield)
