"""DDP around, inside and beside what other workers compute: the parameters are those of one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from programs.ddp import CASES
from puppets import PROGRAMS, clean_environment
from telegrad.launch import free_port


@pytest.fixture(scope="module")
def output() -> str:
    """Two trainers and a server go through all cases, in one job."""
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "run", "--workers", "3", str(PROGRAMS / "ddp.py"), str(free_port())],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    return f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_give_the_parameters_that_one_process_gives(output: str, name: str) -> None:
    assert output.count(f"{name}: ok") >= 2, output
