"""Starts workers, gives them tests, and ends those that hang.

Each of ``jobs`` threads has a worker process, in a session of its own together with all children of its tests, and
hands it one test at a time.  A worker that dies or goes past the deadline takes only the test it was at: its processes
show their stacks and are killed, and a new one goes on with the next test.

The deadline is torch's own first: its test class then collects the stacks of the children and fails the test in order.
Only what does not even end then is killed from here.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

from .library import Library
from .plan import Plan
from .suites import SUITES, Suite
from .table import Case, all_cases

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 180.0  # seconds for a worker to import torch and the suites
GRACE = 15.0  # what torch needs after its own deadline, to collect stacks and end the children
KEPT = 20_000  # characters of output of one test

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Result(NamedTuple):
    case: Case
    status: str
    """passed, failed, skipped, hung (killed here after the deadline) or crashed (the worker itself has died)."""

    seconds: float = 0.0
    text: str = ""
    """Why it did not pass."""

    output: str = ""
    """What the worker and its children have printed meanwhile, unless the test passed."""


class Settings(NamedTuple):
    library: Library = "telegrad"
    jobs: int = 2
    deadline: float = 60.0
    grace: float = GRACE
    start: str = "fork"
    suites: dict[str, Suite] = SUITES


class Run(NamedTuple):
    results: list[Result]
    seconds: float
    surprises: list[str]
    """Tests that the suites have and the table does not, or the other way round."""

    def amended(self, again: Run) -> Run:
        """With the results of tests that ran again in the place of their first ones."""
        newer = {result.case: result for result in again.results}
        return Run([newer.get(each.case, each) for each in self.results], self.seconds + again.seconds, self.surprises)


def run(cases: Sequence[Case], settings: Settings, tell: Callable[[Result], None] = lambda _: None) -> Run:
    """Runs the cases; tells each result when it is there."""
    listed: dict[str, set[str]] = {}
    began = time.monotonic()
    results = spread(in_order(cases, settings), settings.jobs, lambda: Slot(cases, settings, listed), tell)
    return Run(results, time.monotonic() - began, surprises(cases, listed))


class Runner(Protocol[R_co]):
    """Runs one case after the other, and ends what it has started."""

    def run(self, case: Case) -> R_co: ...
    def end(self) -> None: ...


def spread(
    cases: Sequence[Case], jobs: int, make: Callable[[], Runner[R]], tell: Callable[[R], None] = lambda _: None
) -> list[R]:
    """Spreads the cases over so many runners, each in a thread of its own; whoever is free takes the next one."""
    queue, lock = deque(cases), threading.Lock()
    results: list[R] = []
    broken: list[BaseException] = []

    def work() -> None:
        runner = make()
        try:
            while True:
                with lock:
                    if not queue or broken:
                        return
                    case = queue.popleft()
                result = runner.run(case)
                with lock:
                    results.append(result)
                    tell(result)
        except BaseException as error:
            broken.append(error)
        finally:
            runner.end()

    threads = [threading.Thread(target=work, name=f"runner {number}") for number in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # of the user: the runners end after the cases they are at
        broken.append(interrupt)
        raise
    if broken:
        raise broken[0]
    return results


def surprises(cases: Sequence[Case], listed: dict[str, set[str]]) -> list[str]:
    """A new torch may bring tests that have no group yet."""
    known: dict[str, set[str]] = {}
    for case in (*cases, *all_cases()):
        known.setdefault(case.suite, set()).add(case.name)
    return sorted(
        [f"{suite}::{name} is in no group" for suite in listed for name in listed[suite] - known[suite]]
        + [f"{suite}::{name} is no test" for suite in listed for name in known[suite] - listed[suite]]
    )


def in_order(cases: Sequence[Case], settings: Settings) -> list[Case]:
    """A worker serves one fixture only, so those of one come together."""
    return sorted(cases, key=lambda case: settings.suites[case.suite].fixture)


class Slot:
    """One worker at a time, replaced when it has died or the next test needs another fixture."""

    def __init__(self, cases: Sequence[Case], settings: Settings, listed: dict[str, set[str]]) -> None:
        self._settings, self._listed = settings, listed
        self._suites = {case.suite for case in cases}
        self._worker: Worker | None = None
        self._fixture = ""

    def run(self, case: Case) -> Result:
        fixture = self._settings.suites[case.suite].fixture
        if self._worker is None or self._fixture != fixture:
            self.end()
            suites = {name: each for name, each in self._settings.suites.items() if name in self._suites}
            self._worker = Worker(self._settings, {name: s for name, s in suites.items() if s.fixture == fixture})
            self._fixture = fixture
        result = self._worker.run(case)
        self._listed.update(self._worker.tests)
        if result.status in ("hung", "crashed"):
            self.end()
        return result

    def end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class Worker:
    """A process that runs tests, and what it has printed."""

    def __init__(self, settings: Settings, suites: dict[str, Suite]) -> None:
        self._deadline = settings.deadline + settings.grace
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        # We share a position in it with the worker, which must not write where we read.
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
        environment = {
            **os.environ,
            **Plan(settings.library, suites, settings.start).in_environment(),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(settings.deadline)),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONWARNINGS": "ignore",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",  # the command that it advises is not ours
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",  # it forks, so it must have one thread
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._buffer = b""
        self.tests: dict[str, set[str]] = {}
        self._broken: dict[str, str] = {}
        self._started = False

    def run(self, case: Case) -> Result:
        began, mark = time.monotonic(), self._log.seek(0, os.SEEK_END)
        try:
            if not self._started:
                self._start()
                began = time.monotonic()
            if case.suite in self._broken:
                return Result(case, "failed", 0.0, f"the suite could not be imported\n{self._broken[case.suite]}")
            if case.name not in self.tests[case.suite]:
                return Result(case, "failed", 0.0, "there is no such test")
            self._process.stdin.write(f"{case.suite} {case.name}\n".encode())  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            answer = self._answer(self._deadline)
        except TimeoutError as late:
            self._show_stacks()
            return Result(case, "hung", time.monotonic() - began, str(late), self._printed(mark))
        except (EOFError, BrokenPipeError):
            code = self._process.wait(10)
            return Result(case, "crashed", time.monotonic() - began, f"exit code {code}", self._printed(mark))
        printed = "" if answer["status"] == "passed" else self._printed(mark)
        return Result(case, answer["status"], answer["seconds"], answer["text"], printed)

    def kill(self) -> None:
        """With all that belongs to it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            try:
                stream.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass

    def _start(self) -> None:
        try:
            hello = self._answer(START_LIMIT)
        except (EOFError, TimeoutError):
            # No test is at fault, and the next worker would do no better.
            raise RuntimeError(f"the worker did not start:\n{self._printed(0)}") from None
        self.tests = {suite: set(names) for suite, names in hello["tests"].items()}
        self._broken = hello["broken"]
        self._started = True

    def _answer(self, limit: float) -> Any:
        """The next line of JSON."""
        deadline = time.monotonic() + limit
        descriptor = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"not done after {limit:.0f} s, killed")
            if not (more := os.read(descriptor, 65536)):
                raise EOFError
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _show_stacks(self) -> None:
        """All processes of the session print theirs; those that cannot die of the signal, as they would right after."""
        try:
            os.killpg(self._process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return
        time.sleep(1.0)

    def _printed(self, mark: int) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(mark, end - KEPT))
        return self._log.read().decode(errors="replace")
