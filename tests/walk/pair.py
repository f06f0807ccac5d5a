"""The two worker processes, from the parent's side.  Every wait has a limit, and the processes end with the parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from telegrad.launch import job_environment, worker_environment
from telegrad.launch.process import end_with

from .recorder import Round
from .scenes import CALLEE, CALLER

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 150.0  # seconds for an answer; a worker that starts beside much load imports torch for a minute
_QUIET_BEFORE = 0.12  # seconds before a step in which both workers finish what earlier ones left to timers
_QUIET_AFTER = 0.03  # seconds after a step in which the threads of both workers go back to sleep


class WalkError(Exception):
    """A worker process failed, or does not answer."""


class _Process:
    def __init__(self, name: str, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", name, str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                preexec_fn=end_with(os.getpid()),
            )
        self.name = name
        self._connection = Connection(ours.detach())

    def ask(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def answer(self) -> Any:
        try:
            if not self._connection.poll(_TIMEOUT):
                raise WalkError(f"the {self.name} did not answer within {_TIMEOUT:g} s")
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise WalkError(f"the {self.name} died") from error
        if not succeeded:
            raise WalkError(f"the {self.name} failed:\n{value}")
        return value

    def run(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


class Pair:
    """A caller and a callee that have called ``init_rpc``; see :func:`running_pair`."""

    def __init__(self, caller: _Process, callee: _Process) -> None:
        self._caller, self._callee = caller, callee

    def run(self, scene: str) -> Round:
        """Goes through the scene once, and records its step."""
        self._caller.run("prepare", scene)
        time.sleep(_QUIET_BEFORE)
        self._callee.run("start")
        self._caller.run("step")
        time.sleep(_QUIET_AFTER)
        callee = self._callee.run("stop")
        return Round(self._caller.run("finish"), callee)

    def warm_up(self, scene: str, times: int) -> None:
        """Goes through the scene without recording it: links are dialled, functions looked up, caches filled."""
        self._caller.run("warm_up", scene, times)

    def all_run(self, method: str) -> None:
        for process in (self._caller, self._callee):
            process.ask(method)
        for process in (self._caller, self._callee):
            process.answer()


@contextmanager
def running_pair() -> Iterator[Pair]:
    """Two workers of one job, which shut down at the end."""
    # The root and "tests": so the workers find this package under either name, ``tests.walk`` or ``walk``.
    paths = [str(_ROOT / "src"), str(_ROOT), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = job_environment({**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, 2)
    processes: list[_Process] = []
    try:
        for rank, name in enumerate((CALLER, CALLEE)):
            processes.append(_Process(name, worker_environment(job, rank)))
        pair = Pair(*processes)
        pair.all_run("join")
        yield pair
        pair.all_run("leave")
    finally:
        for process in processes:
            process.end()
