"""The launcher with real worker processes; the programs import no torch, so that a job takes a tenth of a second."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from telegrad.errors import UsageError
from telegrad.launch import free_port, run_workers

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = Path(__file__).parent.parent / "src"


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def lines_of(self, name: str) -> list[str]:
        return [line.partition(" | ")[2] for line in self.out.splitlines() if line.split(" | ")[0].strip() == name]


def launch(
    program: str, *args: str, workers: int = 2, env: Mapping[str, str] | None = None, grace: float = 5.0
) -> Result:
    out, err = io.BytesIO(), io.BytesIO()
    command = [sys.executable, "-u", str(PROGRAMS / program), *args]
    code = run_workers(command, workers, env=env, grace=grace, stdout=out, stderr=err)
    return Result(code, out.getvalue().decode(), err.getvalue().decode())


def _obey_signals() -> None:
    """A job in a shell's background ignores the one, under nohup the other, and so would all that is started there."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Launcher:
    """``telegrad run`` as a process of its own, to be signalled."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "telegrad", "run", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            preexec_fn=_obey_signals,
        )

    def wait_for(self, text: str, times: int) -> list[str]:
        """The lines that hold ``text``, once there are that many."""
        assert self.process.stdout is not None
        found: list[str] = []
        while len(found) < times:
            line = self.process.stdout.readline()
            assert line, f"the launcher ended without saying {text!r} {times} times"
            if text in line:
                found.append(line)
        return found

    def finish(self) -> Result:
        out, err = self.process.communicate(timeout=30)
        return Result(self.process.returncode, out, err)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while remaining := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {remaining}"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


# -- what a worker is given ------------------------------------------------------------------------------------------


def test_workers_get_the_variables_of_torchrun() -> None:
    result = launch("environment.py", "--lr", "0.1", workers=3, env={"TORCHELASTIC_RUN_ID": "stale"})
    seen = [json.loads(result.lines_of(f"worker{rank}")[0]) for rank in range(3)]
    port, secret = seen[0]["MASTER_PORT"], seen[0]["TELEGRAD_SECRET"]
    assert 1 <= int(port) <= 65535
    assert len(secret) >= 32
    for rank, environment in enumerate(seen):
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TELEGRAD_SECRET": secret,
            "OMP_NUM_THREADS": "1",
            "argv": ["--lr", "0.1"],
        }


def test_secret_is_fresh_for_each_job_unless_given() -> None:
    secrets = [json.loads(launch("environment.py", env={}).lines_of("worker0")[0])["TELEGRAD_SECRET"] for _ in range(2)]
    assert secrets[0] != secrets[1]
    given = launch("environment.py", env={"TELEGRAD_SECRET": "ours"})
    assert json.loads(given.lines_of("worker1")[0])["TELEGRAD_SECRET"] == "ours"


def test_thread_count_is_limited_once_and_said_once() -> None:
    assert launch("environment.py", env={}).err.count("OMP_NUM_THREADS=1") == 1
    kept = launch("environment.py", env={"OMP_NUM_THREADS": "3"})
    assert json.loads(kept.lines_of("worker0")[0])["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in kept.err
    single = launch("environment.py", workers=1, env={})
    assert "OMP_NUM_THREADS" not in json.loads(single.lines_of("worker0")[0])


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_every_line_stays_whole_under_heavy_output() -> None:
    workers, count = 4, 2000
    result = launch("chatter.py", str(count), workers=workers)
    assert result.code == 0
    for stream, parity in ((result.out, 0), (result.err, 1)):
        numbers: dict[str, list[int]] = {str(rank): [] for rank in range(workers)}
        for line in stream.splitlines():
            name, _, text = line.partition(" | ")
            if name == "telegrad":
                continue
            rank, number, filler = text.removeprefix("<").removesuffix(">").split(" ")
            assert name == f"worker{rank}"
            assert filler == rank * (int(number) * 37 % 2000)
            numbers[rank].append(int(number))
        assert all(seen == list(range(parity, count, 2)) for seen in numbers.values())


def test_a_very_long_line_and_a_last_line_without_an_end() -> None:
    out = io.BytesIO()
    program = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n' + 'the end')"
    assert run_workers([sys.executable, "-c", program], 1, stdout=out) == 0
    assert out.getvalue() == b"worker0 | " + b"x" * 3_000_000 + b"\nworker0 | the end\n"


def test_names_line_up() -> None:
    result = launch("ending.py", *(f"{rank}=0" for rank in range(11)), workers=11)
    names = {line.split("|")[0] for line in result.err.splitlines() if line.startswith("worker")}
    assert {"worker0  ", "worker10 "} <= names


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour_only_where_wanted(variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in launch("environment.py").out) is coloured


# -- how a job ends --------------------------------------------------------------------------------------------------


def test_success_of_all_is_success() -> None:
    assert launch("ending.py", "0=0", "1=0", "2=0", workers=3).code == 0


def test_a_failing_worker_ends_the_others_and_gives_its_code() -> None:
    started = time.monotonic()
    result = launch("ending.py", "1=7", workers=3)
    assert time.monotonic() - started < 30
    assert result.code == 7
    assert "worker1 has ended early: ending the other 2 workers (SIGKILL in 5 s)" in result.err
    assert "worker1 | the reason" in result.err


def test_a_failure_is_shown_once(tmp_path: Path) -> None:
    """The others print more after it, as they do when they lose a peer."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        f"ready = pathlib.Path({str(tmp_path / 'ready')!r})\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not ready.exists(): time.sleep(0.01)\n"
        "    raise ValueError('the reason')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended'))\n"
        "ready.touch()\n"
        "time.sleep(60)"
    )
    err = io.BytesIO()
    assert run_workers([sys.executable, "-c", program], 2, stdout=io.BytesIO(), stderr=err) == 1
    text = err.getvalue().decode()
    assert "worker0 | ended" in text
    assert text.count("worker1 | Traceback") == text.count("worker1 | ValueError: the reason") == 1
    assert text.count("failed") == text.count("exit code") == 1
    assert text.splitlines()[-1].startswith("telegrad | worker1 (rank 1) failed: exit code 1; ")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_worker_gives_128_and_the_signal(name: str) -> None:
    result = launch("ending.py", f"0={name}")
    assert result.code == 128 + signal.Signals[name]
    assert f"worker0 (rank 0) failed: killed by {name}" in result.err


def test_an_exit_code_above_128_is_not_taken_for_a_signal() -> None:
    result = launch("ending.py", "0=139")
    assert result.code == 139
    assert "worker0 (rank 0) failed: exit code 139" in result.err


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"ready = pathlib.Path({str(tmp_path / 'ready')!r})\n"
        "if os.environ['RANK'] == '1':\n"
        "    ready.touch()\n"
        "    time.sleep(60)\n"
        "while not ready.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(5)"
    )
    err = io.BytesIO()
    started = time.monotonic()
    assert run_workers([sys.executable, "-c", program], 2, grace=0.3, stdout=io.BytesIO(), stderr=err) == 5
    assert time.monotonic() - started < 30
    assert b"still running after 0.3 s, killed: worker1" in err.getvalue()


def test_what_a_worker_started_and_left_behind_ends_with_the_job() -> None:
    result = launch("family.py", "leave")
    assert result.code == 0
    wait_until_gone([int(pid) for rank in (0, 1) for pid in result.lines_of(f"worker{rank}")[0].split()[1:]])


def test_a_reader_that_goes_away_ends_the_job() -> None:
    program = "import time\nfor i in range(10**9): print(i); time.sleep(0.001)"
    read_end, write_end = os.pipe()
    codes: list[int] = []

    def job() -> None:
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            codes.append(run_workers([sys.executable, "-uc", program], 2, stdout=pipe, stderr=io.BytesIO()))

    thread = threading.Thread(target=job)
    thread.start()
    os.read(read_end, 10)
    os.close(read_end)
    thread.join(20)
    assert codes == [128 + signal.SIGPIPE]


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_each_worker_once(signum: signal.Signals) -> None:
    launcher = Launcher("-n", "2", str(PROGRAMS / "signals.py"), "0")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signum)
    result = launcher.finish()
    assert result.lines_of("worker0") == result.lines_of("worker1") == [f"got {signum.name}"]
    assert result.code == 0
    assert f"{signum.name}: passed on" in result.err


def test_workers_that_end_badly_after_a_signal_are_not_blamed() -> None:
    launcher = Launcher("-n", "2", str(PROGRAMS / "signals.py"), "9")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert result.code == 128 + signal.SIGINT
    assert "failed" not in result.err


def test_workers_that_ignore_a_signal_are_killed_after_the_grace_period() -> None:
    launcher = Launcher("-n", "2", "--grace", "0.3", str(PROGRAMS / "signals.py"), "stubborn")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signal.SIGTERM)
    result = launcher.finish()
    assert result.code == 128 + signal.SIGTERM
    assert "still running after 0.3 s, killed: worker0, worker1" in result.err


def test_an_interrupt_shows_a_few_lines_and_no_tracebacks() -> None:
    launcher = Launcher("-n", "3", str(PROGRAMS / "interrupted.py"), "normally")
    launcher.wait_for("ready", 3)
    launcher.process.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert result.code == 128 + signal.SIGINT
    first, *others, last = [line for line in result.err.splitlines() if "OMP_NUM_THREADS" not in line]
    assert first.startswith("telegrad | SIGINT: passed on to the workers (SIGKILL in 10 s, immediately if you")
    assert sorted(others) == [f"worker{rank} | saving" for rank in range(3)]
    assert last == "telegrad | interrupted: all workers have ended"


def test_a_worker_that_ends_well_after_an_interrupt_shows_all_it_says() -> None:
    launcher = Launcher("-n", "2", str(PROGRAMS / "interrupted.py"), "quietly")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert result.code == 0
    assert result.err.count("| stopped\n") == 2
    assert result.err.count(" | Traceback (most recent call last):") == 2
    assert result.err.count("wait(depth - 1)") >= 2


def test_a_worker_that_fails_in_its_own_way_after_an_interrupt_shows_its_last_line() -> None:
    launcher = Launcher("-n", "2", str(PROGRAMS / "interrupted.py"), "loudly")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert result.code == 128 + signal.SIGINT
    assert "worker0 | ValueError: could not save\n" in result.err
    assert "worker1 | ValueError: could not save\n" in result.err
    assert "Traceback" not in result.err


def test_a_second_interrupt_kills_at_once() -> None:
    launcher = Launcher("-n", "2", "--grace", "600", str(PROGRAMS / "signals.py"), "stubborn")
    launcher.wait_for("ready", 2)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.stderr is not None
    while "passed on" not in launcher.process.stderr.readline():
        assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert "SIGINT again: the workers are killed" in result.err
    assert result.code == 128 + signal.SIGINT


def test_killing_the_launcher_leaves_no_worker() -> None:
    launcher = Launcher("-n", "3", str(PROGRAMS / "family.py"), "wait")
    lines = launcher.wait_for("pids", 3)
    pids = [[int(pid) for pid in line.split("pids ")[1].split()] for line in lines]
    launcher.process.kill()
    try:
        wait_until_gone([worker for worker, _ in pids])
    finally:
        for _, child in pids:  # the kernel ends the workers, not what they started
            os.kill(child, signal.SIGKILL)
        launcher.finish()


def test_a_job_can_run_outside_the_main_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launch("ending.py", "0=0", "1=4").code))
    thread.start()
    thread.join(20)
    assert codes == [4]


# -- in a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """``telegrad run`` with a person at a terminal."""

    def __init__(self, *args: str) -> None:
        self._person, self._screen = pty.openpty()

        def take_the_terminal() -> None:
            _obey_signals()
            fcntl.ioctl(self._screen, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "telegrad", "run", *args],
            stdin=self._screen,
            stdout=self._screen,
            stderr=self._screen,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=take_the_terminal,
        )
        os.close(self._screen)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._person, keys.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        while self.shown.count(text) < times:
            assert self._read(), f"no {text!r} in: {self.shown}"

    def finish(self) -> int:
        while self._read():
            pass
        os.close(self._person)
        return self.process.wait(30)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._person], [], [], 30)
        assert ready, f"nothing more came after: {self.shown}"
        try:
            data = os.read(self._person, 1 << 16)
        except OSError:  # all programs in it have ended
            return False
        self.shown += data.decode()
        return bool(data)


def test_ctrl_c_in_a_terminal() -> None:
    terminal = Terminal("-n", "3", str(PROGRAMS / "interrupted.py"), "normally")
    terminal.wait_for("ready", 3)
    before = len(terminal.shown)
    terminal.type("\x03")
    assert terminal.finish() == 128 + signal.SIGINT
    assert len(terminal.shown[before:].splitlines()) <= 6, terminal.shown


def test_a_single_worker_can_be_debugged() -> None:
    terminal = Terminal("-n", "1", str(PROGRAMS / "debugged.py"))
    terminal.wait_for("(Pdb)")
    terminal.type("p secret + 58\n")
    terminal.wait_for("100")
    terminal.type("secret = 7\n")
    terminal.wait_for("(Pdb)", 3)
    terminal.type("c\n")
    assert terminal.finish() == 0
    assert "after 7" in terminal.shown


def test_a_breakpoint_of_one_worker_among_several_says_what_to_do() -> None:
    result = launch("debugged.py", workers=2, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert result.code == 1
    assert "breakpoint() cannot open a debugger here" in result.err
    assert "telegrad run --workers 1" in result.err
    assert "debugged.py" in result.err
    skipped = launch("debugged.py", workers=2, env={**os.environ, "PYTHONBREAKPOINT": "0"})
    assert (skipped.code, skipped.lines_of("worker1")) == (0, ["after 42"])


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_no_workers_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least 1 worker, not 0"):
        run_workers(["true"], 0)


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot start worker0: no-such-command: No such file"):
        run_workers(["no-such-command"], 2, stderr=io.BytesIO())


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot use port {port} on 127.0.0.1: Address already in use"):
            run_workers(["true"], 1, master_port=port)
    assert free_port(port) == port
