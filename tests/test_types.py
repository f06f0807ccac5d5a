"""Type checkers know what calls return, and report wrong uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)  # without a cache mypy reads all of torch
def test_calls_have_the_types_of_their_functions_and_wrong_uses_are_reported() -> None:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "tests/programs/typed_calls.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
