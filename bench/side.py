"""The parent's end of one side: a caller and its callees, processes that live through the whole run.

Every wait has a timeout.  A side that misses one is asked for its stacks (``SIGUSR1``, see ``worker``), killed, and
reported as ``SideFailedError``; the next order starts fresh ones.

A library that polls for messages uses the processor even when nothing is asked of it.  So its processes are stopped
(``SIGSTOP``) while another side is measured; all others wait in the kernel.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from bench.library import LIBRARIES
from bench.protocol import Done, Failed, Measure, Ready, Stop
from bench.results import RAW
from bench.row import CALLEES, CALLER, Plan

__all__ = ["Side", "SideFailedError"]

_ROOT = Path(__file__).resolve().parent.parent
_STOP_TIMEOUT = 15.0
_STACKS_PAUSE = 0.5
_LOG_TAIL = 12_000
_POLLING = frozenset({"torch"})
"""The sides that use the processor while idle: see ``Side.idle_cores``."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class SideFailedError(Exception):
    """A side hung, died, or answered wrongly.  The text has what was asked, the error, and all workers' stacks."""


@dataclass
class _Worker:
    role: str
    process: subprocess.Popen[bytes]
    orders: Connection
    log: IO[bytes]

    def tail(self) -> str:
        """The end of what the worker wrote, stacks included."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - _LOG_TAIL))
        return self.log.read().decode(errors="replace").strip()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.orders.close()
        self.log.close()


class Side:
    """``name`` is a library's, or ``"raw"``, or any name for a version of telegrad: that of another checkout, or
    ``without`` one of the parts in ``ablations``.  ``timeout`` is for the start, and for each order."""

    def __init__(
        self, name: str, timeout: float, workers: int = 2, checkout: Path = _ROOT, without: str | None = None
    ) -> None:
        self.name = name
        self._checkout = checkout
        self._without = without
        self.timeout = timeout
        self.roles = (CALLER, *CALLEES)[:workers]
        self._workers: list[_Worker] = []
        self._ready = False

    def __repr__(self) -> str:
        states = ", ".join(f"{worker.role} pid {worker.process.pid}" for worker in self._workers)
        return f"<Side {self.name}: {states or 'not running'}>"

    @property
    def is_running(self) -> bool:
        """Whether all its processes are up; they are not after a failure."""
        return self._ready and all(worker.process.poll() is None for worker in self._workers)

    def spawn(self) -> None:
        """Start the processes and return at once, so that all sides can come up at the same time."""
        self._ready = False
        port = str(_free_port())
        ends = socket.socketpair() if self.name == RAW else (None,) * len(self.roles)
        for role, end in zip(self.roles, ends, strict=True):
            self._workers.append(self._start(role, end, port))
            if end is not None:
                end.close()

    def wait_ready(self) -> None:
        """Wait until the processes have found each other."""
        for worker in self._workers:
            self._expect(worker, Ready, "starting")
        self._ready = True
        self._rest()

    def measure(self, name: str, plan: Plan, fast: bool = False) -> list[float]:
        """Run one row or raw limit; the seconds of each timed call."""
        if not self._workers:
            self.spawn()
        if not self._ready:
            self.wait_ready()
        self._wake()
        caller = self._workers[0]
        self._send(caller, Measure(name, plan, self.timeout, fast), name)
        reply = self._expect(caller, Done, name)
        assert isinstance(reply, Done)
        self._rest()
        return reply.samples

    def idle_cores(self, seconds: float) -> float:
        """How many processor cores its processes use while nothing is asked of them."""
        self._wake()
        started, before = time.monotonic(), self._processor_time()
        time.sleep(seconds)
        used, passed = self._processor_time() - before, time.monotonic() - started
        self._rest()
        return used / passed

    def stop(self) -> str | None:
        """Let the workers leave their job gracefully, or kill them; returns what failed, if anything did."""
        self._wake()
        deadline = time.monotonic() + _STOP_TIMEOUT
        problem = None
        try:
            for worker in self._workers:
                with suppress(OSError):  # a raw callee leaves as soon as its caller does
                    worker.orders.send(Stop(_STOP_TIMEOUT))
            for worker in self._workers:
                try:
                    code = worker.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise self._fail(
                        "stopping", f"the {worker.role} did not leave within {_STOP_TIMEOUT:g} s"
                    ) from None
                if code != 0:
                    raise self._fail("stopping", f"the {worker.role} exited with code {code}")
        except SideFailedError as error:
            problem = str(error)
        self.kill()
        return problem

    def kill(self) -> None:
        """End the processes now."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._ready = False

    def _rest(self) -> None:
        if self.name in _POLLING:
            self._signal(signal.SIGSTOP)

    def _wake(self) -> None:
        if self.name in _POLLING:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.process.send_signal(number)

    def _processor_time(self) -> float:
        """The seconds that its processes have used so far, as the kernel counts them, in ticks of 10 ms."""
        ticks = 0
        for worker in self._workers:
            fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
        return ticks * _TICK

    def _start(self, role: str, peer: socket.socket | None, port: str) -> _Worker:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        side = self.name if self.name in (*LIBRARIES, RAW) else "telegrad"
        command = [sys.executable, "-m", "bench.worker", "--side", side, "--role", role]
        command += ["--workers", str(len(self.roles)), "--orders", str(theirs.fileno()), "--timeout", str(self.timeout)]
        handed_on = [theirs.fileno()]
        if peer is not None:
            command += ["--peer", str(peer.fileno())]
            handed_on.append(peer.fileno())
        if self._without is not None:
            command += ["--without", self._without]
        paths = [str(_ROOT), str(self._checkout / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=handed_on,
        )
        theirs.close()
        return _Worker(role, process, Connection(ours.detach()), log)

    def _send(self, worker: _Worker, order: Measure, asked: str) -> None:
        try:
            worker.orders.send(order)
        except OSError as error:
            raise self._fail(asked, f"the {worker.role} is gone ({error})") from None

    def _expect(self, worker: _Worker, kind: type[Done | Ready], asked: str) -> Done | Ready:
        try:
            if not worker.orders.poll(self.timeout):
                raise self._fail(asked, f"no answer from the {worker.role} within {self.timeout:g} s")
            reply = worker.orders.recv()
        except (EOFError, OSError):
            raise self._fail(asked, f"the {worker.role} died") from None
        if isinstance(reply, Failed):
            raise self._fail(asked, f"the {worker.role} failed\n{reply.traceback}")
        assert isinstance(reply, kind), reply
        return reply

    def _fail(self, asked: str, problem: str) -> SideFailedError:
        """Collect the stacks of all workers, kill them, and put it all into one error."""
        running = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in running:
            worker.process.send_signal(signal.SIGUSR1)
        if running:
            time.sleep(_STACKS_PAUSE)
        parts = [f"{self.name}: {asked}: {problem}"]
        for worker in self._workers:
            state = "running" if worker in running else f"exit code {worker.process.poll()}"
            parts.append(f"--- {self.name} {worker.role} ({state}) ---\n{worker.tail()}")
        self.kill()
        return SideFailedError("\n".join(parts))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
