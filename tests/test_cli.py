"""The command line, as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.cli import main

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = Path(__file__).parent.parent / "src"


def telegrad(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "telegrad", *args],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def test_help_names_the_command_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "telegrad run --workers 4 train.py" in shown
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--help"])
    assert leaving.value.code == 0
    assert "--master-port PORT" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("telegrad ")


def test_launching_does_not_load_torch() -> None:
    program = "import sys, telegrad.cli, telegrad.launch; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)}).returncode == 0
    )


def test_arguments_after_the_script_are_the_script_s_own() -> None:
    result = telegrad(
        "run",
        "--workers",
        "2",
        "--name-prefix",
        "ps",
        str(PROGRAMS / "environment.py"),
        "--workers",
        "9",
        "-m",
        "--",
        "x",
    )
    assert result.returncode == 0
    lines = dict(line.split(" | ", 1) for line in result.stdout.splitlines())
    assert set(lines) == {"ps0", "ps1"}
    assert json.loads(lines["ps0"])["argv"] == ["--workers", "9", "-m", "--", "x"]


def test_a_module_runs_too() -> None:
    result = telegrad("run", "-n", "1", "-m", "environment", "a", cwd=PROGRAMS)
    assert result.returncode == 0
    assert json.loads(result.stdout)["argv"] == ["a"]


def test_the_exit_code_is_the_failing_worker_s() -> None:
    result = telegrad("run", "-n", "2", str(PROGRAMS / "ending.py"), "1=3")
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1].startswith("telegrad | worker1 (rank 1) failed: exit code 3; ")


def test_a_reader_that_leaves_early_ends_the_job_quietly(tmp_path: Path) -> None:
    script = tmp_path / "counting.py"
    script.write_text("while True: print('x' * 1000)")
    command = [sys.executable, "-m", "telegrad", "run", "-n", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 128 + signal.SIGPIPE


def test_a_chosen_port_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = telegrad("run", "-n", "1", "--master-port", str(port), str(PROGRAMS / "environment.py"))
        assert result.returncode == 2
        assert f"cannot use port {port}" in result.stderr
    result = telegrad("run", "-n", "1", "--port", str(port), str(PROGRAMS / "environment.py"))
    assert json.loads(result.stdout)["MASTER_PORT"] == str(port)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2", "missing.py"], "there is no script 'missing.py'"),
        (["-n", "2", "some.module"], "for a module, say: telegrad run … -m some.module"),
        (["-n", "2", "-m", "no_such_package.train"], "there is no module 'no_such_package.train'"),
        (["-n", "2", str(PROGRAMS)], "is a directory without a __main__.py"),
        (["-n", "0", str(PROGRAMS / "ending.py")], "at least 1 worker, not 0"),
        (["-n", "1", "--grace", "-1", str(PROGRAMS / "ending.py")], "--grace must not be negative"),
        (["-n", "1", "--master-port", "0", str(PROGRAMS / "ending.py")], "0 is not a port"),
        (["-n", "1", "--master-port", "70000", str(PROGRAMS / "ending.py")], "70000 is not a port"),
    ],
)
def test_mistakes_are_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("telegrad run: ")
    assert message in error


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["run"])
    assert leaving.value.code == 2
    assert "required: -n/--workers, script\n" in capsys.readouterr().err
