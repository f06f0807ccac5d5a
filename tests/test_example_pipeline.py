"""The example of a pipeline: it trains as one process does, and its stages work at the same time."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import EXAMPLES, difference, load_example, run_example
from worker_processes import telegrad_run

SMALL = ("--steps", "8", "--batch", "256", "--width", "192")

#: The one process forgets a sample in each step, and the program must say so.
WRONG = """
import sys

sys.path.insert(0, {folder!r})
import pipeline

step = pipeline.OneProcess.step
pipeline.OneProcess.step = lambda self, points, labels: step(self, points[1:], labels[1:])
pipeline.main()
"""


@pytest.fixture(scope="module")
def output() -> str:
    return run_example("pipeline", 4, *SMALL, timeout=110)


@pytest.fixture(scope="module")
def timeline() -> ModuleType:
    return load_example("pipeline", "timeline")


def test_it_trains_as_one_process_does(output: str) -> None:
    assert difference(output) <= 1e-9
    losses = [float(loss) for loss in re.findall(r"^worker0 \| +\d+ +(\d\.\d{4})$", output, re.MULTILINE)]
    assert len(losses) > 4
    assert losses[-1] < losses[0] - 0.05


def test_stages_work_at_the_same_time_where_there_are_several_micro_batches(output: str) -> None:
    rows = re.findall(r"^worker0 \| +(\d+) +[\d,]+ +(\d+)%$", output, re.MULTILINE)
    share = {int(count): int(percent) for count, percent in rows}
    assert list(share) == [1, 2, 4, 8]
    assert share[1] == 0
    assert min(share[4], share[8]) > 0


def test_every_stage_is_drawn_forward_and_backward(output: str) -> None:
    lines = re.findall(r"^worker0 \| (stage\d) (.+)$", output, re.MULTILINE)
    assert [name for name, _ in lines] == ["stage1", "stage2", "stage3"] * 2
    assert all(set(line) == set(" 1a") or set(line) == set("1a") for _, line in lines[:3])


def test_it_fails_if_one_process_gives_something_else(tmp_path: Path) -> None:
    (program := tmp_path / "wrong.py").write_text(WRONG.format(folder=str(EXAMPLES / "pipeline")))
    done = telegrad_run(4, program, "--steps", 1, "--width", 8)
    assert done.returncode == 1
    assert difference(done.stdout) > 1e-9
    assert "the stages computed something else than one process does" in done.stderr


def test_the_difference_sees_one_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "pipeline")
    pipeline = load_example("pipeline", "pipeline")
    ours = pipeline.OneProcess(4).parameters()
    theirs = pipeline.OneProcess(4).parameters()
    assert pipeline.largest_difference(ours, theirs) == 0
    theirs[3].view(-1)[-1] += 1e-3
    assert pipeline.largest_difference(ours, theirs) == pytest.approx(1e-3, rel=1e-3)
    theirs[3].view(-1)[-1] = torch.nan
    assert not pipeline.largest_difference(ours, theirs) <= pipeline.TOLERANCE


# --- the timeline -------------------------------------------------------------------------------------------------


def test_overlap_counts_stages_and_not_what_one_stage_does_at_once(timeline: ModuleType) -> None:
    span = timeline.Span
    one_by_one = {"a": [span(0, False, 10.0, 11.0)], "b": [span(0, False, 11.0, 12.0)]}
    assert timeline.overlap(one_by_one) == 0
    busy_with_two = {"a": [span(0, True, 10.0, 12.0), span(1, True, 11.0, 13.0)], "b": []}
    assert timeline.overlap(busy_with_two) == 0
    # From 10 to 14 somebody works, but for one second of pause; from 11 to 12 both do.
    both = {"a": [span(0, False, 10.0, 12.0)], "b": [span(0, False, 11.0, 12.0), span(1, False, 13.0, 14.0)]}
    assert timeline.overlap(both) == pytest.approx(1 / 3)


def test_the_drawing_is_to_scale(timeline: ModuleType) -> None:
    span = timeline.Span
    stages = {
        "stage1": [span(0, False, 5.0, 7.0), span(1, False, 7.0, 9.0), span(0, True, 13.0, 15.0)],
        "stage2": [span(0, False, 7.0, 9.0), span(1, True, 9.0, 9.01), span(0, True, 10.0, 13.0)],
    }
    assert timeline.draw(stages, columns=10) == "stage1 1122    aa\nstage2   11baaa"
