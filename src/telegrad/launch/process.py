"""One worker process: it leads a process group, and the kernel kills it when its launcher dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from telegrad.errors import UsageError

__all__ = ["WorkerProcess", "end_with", "refuse_breakpoint"]

COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")  # no red: that reads as an error
PR_SET_PDEATHSIG = 1


class WorkerProcess:
    """One worker process and its state."""

    def __init__(self, rank: int, label: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.rank = rank
        self.label = label
        self.name = label.rstrip()
        self.colour = COLOURS[rank % len(COLOURS)]
        self.exit_code: int | None = None
        self.killed_by = 0  # a signal, or 0
        self.signals_seen = 0
        try:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=end_with(os.getpid()),
            )
        except OSError as error:
            raise UsageError(f"cannot start {self.name}: {command[0]}: {error.strerror}") from error
        self.pidfd = os.pidfd_open(self.process.pid)

    def send(self, signum: int) -> None:
        """Signal the worker and everything it started."""
        if self.process.returncode is not None:  # reaped, which happens only at the end: the id is no longer its own
            return
        try:
            os.killpg(self.process.pid, signum)
        except ProcessLookupError:
            pass

    def note_exit(self) -> None:
        """Reads how it ended and leaves the zombie, so that the process group's id is not given to another process."""
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        if status.si_code == os.CLD_EXITED:
            self.exit_code = status.si_status
        else:
            self.killed_by = status.si_status
            self.exit_code = 128 + status.si_status

    def close(self) -> None:
        """Reap the process; the caller has killed what was left of it."""
        self.process.wait()
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def describe(self) -> str:
        """A clause that says how it failed."""
        who = f"{self.name} (rank {self.rank})"
        if self.killed_by:
            named = self.killed_by in set(signal.Signals)  # real-time signals have numbers only
            by = signal.Signals(self.killed_by).name if named else f"signal {self.killed_by}"
            return f"{who} failed: killed by {by}"
        return f"{who} failed: exit code {self.exit_code}"

    def hint(self) -> str:
        """A clause with a hint how to find the cause."""
        if self.killed_by == signal.SIGKILL:
            return "; if that signal was not sent by a user, memory ran out: see the kernel's log (dmesg)"
        if self.killed_by:
            return "; run again with PYTHONFAULTHANDLER=1 to see the Python stack of a crash"
        return f"; what it printed is in the lines that begin with {self.name}"


def refuse_breakpoint(*args: object, **kwargs: object) -> NoReturn:
    """What ``breakpoint()`` calls in a job of several workers, by way of ``PYTHONBREAKPOINT``."""
    raise UsageError(
        "breakpoint() cannot open a debugger here: the workers of a job share one terminal, so none of them reads from "
        "it. Use `telegrad run --workers 1`; or start this worker by hand in a terminal of its own, with RANK, "
        "WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TELEGRAD_SECRET set; or set PYTHONBREAKPOINT to a debugger that "
        "listens on a port, such as web_pdb.set_trace. PYTHONBREAKPOINT=0 skips breakpoints"
    )


def end_with(parent: int) -> Callable[[], None]:
    """A function for a child process to call, after which the kernel kills it when its parent dies.

    It may run between fork and exec, where a child can wait forever for locks of threads that it does not have.  So
    everything is looked up here, before the fork, and the function only makes two or three system calls.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kill, getppid, leave = int(signal.SIGKILL), os.getppid, os._exit

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if getppid() != parent:  # it died before the line above
            leave(1)

    return in_child
