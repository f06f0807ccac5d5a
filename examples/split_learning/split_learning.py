"""Split learning: a hospital has measurements, a lab has results, and neither shows the other its data or its code.

Each party has a program of its own, ``hospital.py`` and ``lab.py``; README.md starts them by hand.  This starts them
as workers 0 and 1 of one job, and then the referee, who compares with one process.

    telegrad run --workers 2 examples/split_learning/split_learning.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import patients

HERE = Path(__file__).parent


def start(program: str, *arguments: str | Path) -> None:
    """-P keeps Python from looking beside the program: no party can import the other's."""
    alone = [] if program == "referee" else ["-P"]
    code = subprocess.run([sys.executable, "-u", *alone, HERE / f"{program}.py", *arguments]).returncode
    if code:
        sys.exit(f"{program}.py failed: exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patients", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    if os.environ["WORLD_SIZE"] != "2":
        parser.error("there are two parties: start two workers")
    # Where the referee finds the files of both; the port makes it the same folder for both, and another for other jobs.
    folder = Path(tempfile.gettempdir(), f"split_learning-{os.environ['MASTER_PORT']}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.environ["RANK"] == "1":
        patients.write("lab", folder / "lab.csv", options.patients)
        start("lab", "--results", folder / "lab.csv", "--save", folder / "lab.pt", "--epochs", str(options.epochs))
        return
    patients.write("hospital", folder / "hospital.csv", options.patients)
    try:
        start("hospital", "--records", folder / "hospital.csv", "--save", folder / "hospital.pt")
        start("referee", folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
