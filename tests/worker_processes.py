"""Worker processes that tests lead by the hand: real processes, real sockets, and torch imported once for all of them.

::

    with running_workers(3) as (a, b, c):                       # three processes, each of which has called init_rpc
        a.run(rpc.rpc_sync, "worker1", torch.add, args=(1, 2))
        pending = b.start(remote_functions.call_many, 100)        # returns at once
        c.kill()
        pending.result(5)

What runs in them is named, not sent: functions of ``programs/remote_functions.py`` or of telegrad itself.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from programs import remote_functions
from telegrad import rpc
from telegrad.launch import free_port
from telegrad.launch.process import end_with

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "programs"
SOURCE = TESTS.parent / "src"
PATIENCE = 30.0  # no test waits longer for one thing, unless it says so

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment, without what would make a worker join some other job."""
    env = {key: value for key, value in os.environ.items() if key not in _VARIABLES and "ELASTIC" not in key}
    env = {key: value for key, value in env.items() if not key.startswith("TELEGRAD_")}
    return {**env, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1", **more}


def run_python(*command: object, timeout: float = 110, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python command`` to its end; ``more`` goes into its environment."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=clean_environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def telegrad_run(workers: int, *command: object, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Runs ``telegrad run --workers N command`` to its end."""
    return run_python("-m", "telegrad", "run", "--workers", workers, *command, timeout=timeout)


class Pending:
    """An order under way."""

    def __init__(self, process: WorkerProcess, what: str) -> None:
        self._process, self._what = process, what

    def result(self, timeout: float = PATIENCE) -> Any:
        """What it returned or raised."""
        process = self._process
        if not process.conn.poll(timeout):
            process.show_stacks()
            raise AssertionError(f"{process} is not done with {self._what} after {timeout:g} s:\n{process.log()}")
        try:
            succeeded, value = pickle.loads(process.conn.recv_bytes())
        except (EOFError, ConnectionError):
            raise AssertionError(f"{process} died in {self._what}:\n{process.log()}") from None
        if succeeded:
            return value
        raise value


class WorkerProcess:
    """One process that runs what it is told, one order at a time."""

    def __init__(self, pid: int, conn: Connection, log_file: Path) -> None:
        self.pid = pid
        self.conn = conn
        self.process = psutil.Process(pid)
        self.name = f"process {pid}"
        self._pidfd = os.pidfd_open(pid)
        self._log_file = log_file

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        self.conn.send_bytes(pickle.dumps((function, args, kwargs)))
        return Pending(self, getattr(function, "__qualname__", repr(function)))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.start(function, *args, **kwargs).result()

    def log(self) -> str:
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def wait_for_log(self, text: str, timeout: float = PATIENCE) -> str:
        """All that it logged, once that text is in it."""
        deadline = time.monotonic() + timeout
        while text not in (log := self.log()):
            assert time.monotonic() < deadline, f"{self} did not log {text!r} within {timeout:g} s:\n{log}"
            time.sleep(0.01)
        return log

    def show_stacks(self) -> None:
        """Lets it write every thread's stack to its log."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.3)

    def signal(self, signum: int) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def wait_dead(self) -> None:
        """A process that was killed closes its sockets first, so its peers may know before it is gone."""
        assert select.select([self._pidfd], [], [], PATIENCE)[0], f"{self} does not die"

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.kill()
        self.wait_dead()
        os.close(self._pidfd)
        self.conn.close()

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name}>"


class Nursery:
    """The process that forks worker_processes; see ``programs/worker_process.py``."""

    def __init__(self) -> None:
        self._control, there = socket.socketpair()
        self._logs = tempfile.TemporaryDirectory(prefix="telegrad-worker_processes-")
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "worker_process.py")],
            stdin=there,
            env=clean_environment(),
            preexec_fn=end_with(os.getpid()),
        )
        there.close()
        self._control.settimeout(60)
        assert self._control.recv(100) == b"ready"

    def process(self, env: Mapping[str, str] | None = None, netns: str = "") -> WorkerProcess:
        log = Path(self._logs.name) / f"{next(self._numbers)}.log"
        setting = {"env": dict(env or {}), "netns": netns, "log": str(log)}
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self._control, [pickle.dumps(setting)], [there.fileno()])
            pid = int(self._control.recv(100))
        return WorkerProcess(pid, Connection(here.detach()), log)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait(PATIENCE)
        self._logs.cleanup()


_nursery: list[Nursery] = []  # the one of this test run, when a test has asked for it


def nursery() -> Nursery:
    if not _nursery:
        _nursery.append(Nursery())
    return _nursery[0]


def close_nursery() -> None:
    while _nursery:
        _nursery.pop().close()


@contextmanager
def worker_processes(
    count: int, env: Mapping[str, str] | None = None, netns: Sequence[str] = ()
) -> Iterator[list[WorkerProcess]]:
    """Processes that have not called ``init_rpc`` yet; killed at the end in any case."""
    cast: list[WorkerProcess] = []
    try:
        for number in range(count):
            cast.append(nursery().process(env, netns[number] if netns else ""))
        yield cast
    finally:
        for process in cast:
            process.close()


def join(
    cast: Sequence[WorkerProcess],
    init_method: str = "",
    timeout: float = PATIENCE,
    options_of: Callable[[str], dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Makes them the workers "worker0", "worker1" and so on of one job; ``options_of``: what only one of them gets."""
    init_method = init_method or f"tcp://127.0.0.1:{free_port()}"
    options = {"init_timeout": timeout, "init_method": init_method, **options}
    pending = []
    for rank, process in enumerate(cast):
        process.name = f"worker{rank} (process {process.pid})"
        more = options_of(f"worker{rank}") if options_of is not None else {}
        pending.append(
            process.start(remote_functions.start_worker, f"worker{rank}", rank, len(cast), {**options, **more})
        )
    for one in pending:
        one.result(timeout + 5)


def leave(cast: Sequence[WorkerProcess], timeout: float = PATIENCE) -> None:
    """All of them call ``shutdown``."""
    for one in [process.start(rpc.shutdown) for process in cast]:
        one.result(timeout)


@contextmanager
def running_workers(count: int, env: Mapping[str, str] | None = None, **options: Any) -> Iterator[list[WorkerProcess]]:
    """The workers of one job, which shut down gracefully at the end unless the test fails."""
    with worker_processes(count, env) as cast:
        join(cast, **options)
        yield cast
        leave([process for process in cast if process.alive])
