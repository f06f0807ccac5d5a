"""Runs a program of ``examples/`` as a user would, reads what it prints, and loads its modules."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from worker_processes import telegrad_run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, workers: int, *options: str, timeout: float = 90) -> str:
    """What ``telegrad run --workers N examples/name/name.py options`` prints; it must end well."""
    done = telegrad_run(workers, EXAMPLES / name / f"{name}.py", *options, timeout=timeout)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    return output


def load_example(folder: str, name: str) -> ModuleType:
    """A module of an example, without running it as a program."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def difference(output: str) -> float:
    """The figure of the line that every example ends with."""
    (figure,) = re.findall(r"largest difference from one process: (\S+)", output)
    return float(figure)
