"""Makes up some patients, and gives each party its own file of them.

The hospital gets what it measured; the lab gets the results of its test, for most of the same patients.

    python patients.py hospital hospital.csv
    python patients.py lab lab.csv
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

MEASUREMENTS = 8


def rows(party: str, count: int, seed: int = 0) -> list[list[float]]:
    """One row per patient, the number first."""
    chance = random.Random(seed)
    weights = [chance.gauss(0, 1) for _ in range(MEASUREMENTS)]
    found = []
    for number in range(1000, 1000 + count):
        measured = [chance.gauss(0, 1) for _ in range(MEASUREMENTS)]
        score = sum(weight * value for weight, value in zip(weights, measured, strict=True)) + measured[0] * measured[1]
        ill = int(chance.random() < 1 / (1 + math.exp(-2 * score)))
        tested = chance.random() < 0.9
        if party == "hospital":
            found.append([number, *measured])
        elif tested:
            found.append([number, ill])
    return found


def write(party: str, path: str | Path, count: int) -> None:
    with open(path, "w") as file:
        file.writelines(",".join(map(repr, row)) + "\n" for row in rows(party, count))


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], count=600)
