"""A parameter server is killed in the middle of training; started again, it ends as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from worker_processes import PROGRAMS, telegrad_run

STEPS = 18


def train(folder: Path, *more: str) -> tuple[int, str]:
    done = telegrad_run(3, PROGRAMS / "restart.py", folder, *more)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def losses(output: str) -> dict[int, float]:
    return {int(step): float.fromhex(loss) for step, loss in re.findall(r"step (\d+): (\S+)", output)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a training that nobody disturbs."""
    code, output = train(tmp_path_factory.mktemp("whole"), str(STEPS))
    assert code == 0, output
    found = losses(output)
    assert list(found) == list(range(STEPS))
    assert found[STEPS - 1] < found[0] / 2
    return found


@pytest.mark.parametrize("fatal", [2, 13], ids=["before the first checkpoint", "after two"])
def test_killed_and_restarted_training_has_the_losses_of_one_that_was_not(
    tmp_path: Path, whole: dict[int, float], fatal: int
) -> None:
    code, output = train(tmp_path / "killed", str(STEPS), str(fatal))
    assert code != 0
    assert "worker2 (rank 2) failed: killed by SIGKILL" in output, output
    assert list(losses(output)) == list(range(fatal))

    code, output = train(tmp_path / "killed", str(STEPS))
    assert code == 0, output
    again = losses(output)
    assert list(again) == list(range(fatal - fatal % 5, STEPS))
    assert again == {step: whole[step] for step in again}  # to the last bit
