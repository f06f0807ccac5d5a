"""Runs a program of ``examples/`` as a user would, and reads what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from worker_processes import clean_environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, workers: int, *options: str, timeout: float = 90) -> str:
    """What ``telegrad run --workers N examples/name/name.py options`` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "run", "--workers", str(workers), f"{EXAMPLES}/{name}/{name}.py", *options],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    return output


def difference(output: str) -> float:
    """The figure of the line that every example ends with."""
    (figure,) = re.findall(r"largest difference from one process: (\S+)", output)
    return float(figure)
