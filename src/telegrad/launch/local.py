"""Start the workers of a job on this host, show what they print, and end them together.

One thread waits with one selector for file descriptors only:

    worker's stdout ──┐
    worker's stderr ──┤
    worker's pidfd  ──┼──▶ selector ──▶ prefix lines, note an exit, end the rest
    wake-up eventfd ──┘        ▲
                               └── a signal came: the handler passed it on and woke the loop

One thread writes all lines, so they stay whole.  Every worker leads its own process group: a Ctrl-C in the terminal
reaches only the launcher, which passes it on once, and the processes that a worker started end with it.  A second
Ctrl-C kills the workers.  After the first, the tracebacks of the workers' KeyboardInterrupts are not shown.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import BinaryIO

from telegrad.errors import UsageError
from telegrad.launch.environment import job_environment, worker_environment
from telegrad.launch.lines import LineSplitter
from telegrad.launch.process import WorkerProcess

__all__ = ["run_workers"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRACEBACK_BEGINS = (b"Traceback (most recent call last)", b"Exception ignored in")
HELD_LINES = 1000  # of a worker's stderr after an interrupt
DRAIN_SECONDS = 2.0  # how long output may still come after the last worker ended


def run_workers(
    command: Sequence[str],
    workers: int,
    *,
    name_prefix: str = "worker",
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = 10.0,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
) -> int:
    """Runs a command as the worker processes of one job on this host, until all have ended.

    It is what ``telegrad run`` does. Every worker gets the environment of :func:`worker_environment`. Each line that a
    worker prints is printed with its name before it. When a worker fails, the others get SIGTERM, and SIGKILL after
    ``grace`` seconds. SIGINT, SIGTERM and SIGHUP are passed on to the workers; a second SIGINT kills them. No worker
    outlives this call, nor this process.

    Args:
        command (list): The command and its arguments.
        workers (int): The number of workers.
        name_prefix (str, optional): The workers' names in the output are this and their ranks (default: ``"worker"``).
        master_port (int, optional): The port on which the workers meet (default: a free one).
        env (dict, optional): The environment that the workers inherit (default: that of this process).
        grace (float, optional): Seconds between SIGTERM and SIGKILL (default: 10).
        stdout (BinaryIO, optional): Where the lines of the workers' stdout go (default: stdout of this process).
        stderr (BinaryIO, optional): Where the lines of the workers' stderr and the launcher's own go (default: stderr
            of this process).

    Returns:
        An exit code: 0 if all workers succeed, else that of the worker that failed first; 128 + n if signal n killed
        it.

    Raises:
        UsageError: There are no workers, the port cannot be used, or the command cannot be started.

    Example::

        >>> import io, sys
        >>> from telegrad.launch import run_workers
        >>> output = io.BytesIO()
        >>> run_workers([sys.executable, "-c", "print('hello')"], 2, stdout=output, stderr=io.BytesIO())
        0
        >>> sorted(output.getvalue().decode().splitlines())
        ['worker0 | hello', 'worker1 | hello']
    """
    if workers < 1:
        raise UsageError(f"a job needs at least 1 worker, not {workers}")
    base = dict(os.environ if env is None else env)
    job = job_environment(base, workers, master_port)
    out = _Sink(sys.stdout.buffer if stdout is None else stdout)
    err = _Sink(sys.stderr.buffer if stderr is None else stderr)
    if "OMP_NUM_THREADS" not in base and workers > 1:
        err.say(
            "OMP_NUM_THREADS=1 for each worker, so that they do not fight for cores; set it yourself to change that"
        )
    names = [f"{name_prefix}{rank}" for rank in range(workers)]
    launcher = _Launcher(out, err, grace)
    with launcher.in_charge():
        for rank, name in enumerate(names):
            launcher.start(rank, name.ljust(len(names[-1])), command, worker_environment(job, rank))
        return launcher.run()


class _Sink:
    """An output stream for lines, and whether they are coloured."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = not os.environ.get("NO_COLOR") and (terminal or bool(os.environ.get("FORCE_COLOR")))
        self.broken = False

    def say(self, message: str) -> None:
        """Writes a line of the launcher itself."""
        self.write("telegrad", "1", [message.encode()])

    def write(self, name: str, colour: str, lines: list[bytes]) -> None:
        """Writes whole lines, each with its prefix, in one write."""
        if self.broken or not lines:
            return
        # The leading 0 resets a colour that the previous line left on.
        prefix = f"\x1b[0;{colour}m{name} |\x1b[0m " if self._colour else f"{name} | "
        try:
            self._stream.write(b"".join(prefix.encode() + line + b"\n" for line in lines))
            self._stream.flush()
        except BrokenPipeError:  # the reader is gone, as with `| head`
            self.broken = True


class _Pipe:
    """Copies one output of one worker to a sink."""

    def __init__(self, worker: WorkerProcess, fd: int, sink: _Sink) -> None:
        self._worker, self._fd, self._sink = worker, fd, sink
        self._splitter = LineSplitter()
        self._held: collections.deque[bytes] | None = None  # the first traceback after an interrupt, and what follows

    def read(self, before_showing: Callable[[], None]) -> bool:
        """Copies the bytes that are available; False at the end."""
        data = os.read(self._fd, 1 << 16)
        before_showing()
        self._emit(self._splitter.feed(data, time.monotonic()))
        return bool(data)

    def flush(self) -> None:
        """Copies a last line that has no line end."""
        self._emit(self._splitter.close())

    def hold_tracebacks(self) -> None:
        """From now on shows lines only until a traceback begins; ``release`` shows or drops the rest."""
        if self._held is None:
            self._held = collections.deque(maxlen=HELD_LINES)

    def release(self) -> None:
        """Shows the held lines: all if the worker succeeded, the last one if it failed other than by the interrupt."""
        held, self._held = self._held, None
        if held and self._worker.killed_by == 0:
            self._emit(list(held) if self._worker.exit_code == 0 else [held[-1]])

    def _emit(self, lines: list[bytes]) -> None:
        if self._held is not None:
            first = 0
            while not self._held and first < len(lines) and not lines[first].startswith(TRACEBACK_BEGINS):
                first += 1
            self._held.extend(lines[first:])
            lines = lines[:first]
        self._sink.write(self._worker.label, self._worker.colour, lines)


class _Launcher:
    """The running job: the selector, the workers, and why the job is ending, if it is."""

    def __init__(self, out: _Sink, err: _Sink, grace: float) -> None:
        self._out, self._err, self._grace = out, err, grace
        self._workers: list[WorkerProcess] = []
        self._open_pipes: list[_Pipe] = []
        self._error_pipes: list[_Pipe] = []
        self._failed: WorkerProcess | None = None
        self._received: list[int] = []  # signals, in the order in which they came; SIGKILL for a second SIGINT
        self._announced = 0
        self._deadline: float | None = None  # when those still running are killed, or their open pipes given up
        self._killed = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake))

    # -- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """Inside, signals that would end the launcher go to the workers; at the end, remaining workers are killed."""
        wanted: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():  # Python allows handlers on the main thread only
            wanted = [signum for signum in FORWARDED if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup
        before = {signum: signal.signal(signum, self._on_signal) for signum in wanted}
        try:
            yield
        finally:
            for worker in self._workers:
                worker.send(signal.SIGKILL)  # if it has ended: the processes that it started and left running
            for worker in self._workers:
                worker.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._selector.close()
            os.close(self._wake)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Passed on in the handler: the loop may be blocked by a reader of the output that has stopped reading.
        again = signum == signal.SIGINT and signum in self._received
        self._received.append(signal.SIGKILL if again else signum)
        self._hold_tracebacks()
        self._forward()
        os.eventfd_write(self._wake, 1)

    def _hold_tracebacks(self) -> None:
        if signal.SIGINT in self._received:
            for pipe in self._error_pipes:
                pipe.hold_tracebacks()

    def _forward(self) -> None:
        for worker in self._workers:
            while worker.signals_seen < len(self._received):
                worker.signals_seen += 1
                worker.send(self._received[worker.signals_seen - 1])

    # -- the loop --------------------------------------------------------------------------------------------------

    def start(self, rank: int, label: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        worker = WorkerProcess(rank, label, command, env)
        self._workers.append(worker)
        self._forward()  # a signal that came while it started
        assert worker.process.stdout is not None
        assert worker.process.stderr is not None
        self._watch(_Pipe(worker, worker.process.stdout.fileno(), self._out), worker.process.stdout.fileno())
        errors = _Pipe(worker, worker.process.stderr.fileno(), self._err)
        self._error_pipes.append(errors)
        self._hold_tracebacks()
        self._watch(errors, worker.process.stderr.fileno())
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._on_exit(worker))

    def run(self) -> int:
        """Runs until every worker has ended and every pipe is drained."""
        while len(self._selector.get_map()) > 1:  # more than the wake-up
            timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready = self._selector.select(timeout)
            for key, _ in ready:
                key.data()
            self._react()
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._give_up():
                break
        return self._conclude()

    def _watch(self, pipe: _Pipe, fd: int) -> None:
        def on_readable() -> None:
            if not pipe.read(self._announce):  # a signal is announced before what the workers print because of it
                pipe.flush()
                self._open_pipes.remove(pipe)
                self._selector.unregister(fd)

        self._open_pipes.append(pipe)
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def _on_exit(self, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.pidfd)
        worker.note_exit()
        ending = self._received or self._broken
        if worker.exit_code and self._failed is None and not ending:
            self._failed = worker

    @property
    def _broken(self) -> bool:
        return self._out.broken or self._err.broken

    def _react(self) -> None:
        """Decides what to do with the workers that still run, after the last events."""
        self._announce()
        running = self._running
        if not running:
            if self._deadline is None or self._deadline > time.monotonic() + DRAIN_SECONDS:
                self._deadline = time.monotonic() + DRAIN_SECONDS
        elif self._deadline is None and (self._failed is not None or self._broken):
            if self._failed is not None:
                others = "the other worker" if len(running) == 1 else f"the other {len(running)} workers"
                self._err.say(f"{self._failed.name} has ended early: ending {others}{self._threat(running)}")
            for worker in running:
                worker.send(signal.SIGTERM)
            self._deadline = time.monotonic() + self._grace

    @property
    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.exit_code is None]

    def _announce(self) -> None:
        """Say which signals have come since the last time."""
        if self._announced < len(self._received):
            self._announced = len(self._received)
            name = signal.Signals(self._received[-1]).name
            if name == "SIGKILL":
                self._err.say("SIGINT again: the workers are killed")
            else:
                self._err.say(f"{name}: passed on to the workers{self._threat(self._running, name)}")
            if self._deadline is None:
                self._deadline = time.monotonic() + self._grace

    def _threat(self, running: list[WorkerProcess], name: str = "") -> str:
        at_once = ", immediately if you interrupt again" if name == "SIGINT" else ""
        return f" (SIGKILL in {self._grace:g} s{at_once})" if running else ""

    def _give_up(self) -> bool:
        """The deadline has passed: kills what still runs and waits for its last output; the second time, leaves."""
        if self._killed:
            return False
        self._killed = True
        if late := [worker.name for worker in self._running]:
            self._err.say(f"still running after {self._grace:g} s, killed: {', '.join(late)}")
        for worker in self._workers:
            worker.send(signal.SIGKILL)
        self._deadline = time.monotonic() + DRAIN_SECONDS
        return True

    def _conclude(self) -> int:
        for pipe in self._open_pipes:
            pipe.flush()
        if signal.SIGINT in self._received:
            for pipe in self._error_pipes:
                pipe.release()
            self._err.say("interrupted: all workers have ended")
        failed = self._failed
        if failed is not None:
            assert failed.exit_code is not None
            self._err.say(failed.describe() + failed.hint())
            return failed.exit_code
        if self._broken:
            return 128 + signal.SIGPIPE
        if any(worker.exit_code != 0 for worker in self._workers):
            return 128 + self._received[0]
        return 0
