"""The benchmark's statistics, tables and watchfulness, and one quick run of the whole."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import telegrad.rpc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # bench is run from the checkout, never installed

from bench import __main__ as command_line  # noqa: E402
from bench import markdown, picture  # noqa: E402
from bench.limits import LIMITS  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.measure import measure  # noqa: E402
from bench.record import record  # noqa: E402
from bench.results import Failure, Results  # noqa: E402
from bench.row import Case, Plan, WrongReplyError  # noqa: E402
from bench.rows import ROWS  # noqa: E402
from bench.side import Side, SideFailedError  # noqa: E402
from bench.stats import Ratio, percentile, ratio, summary  # noqa: E402
from bench.units import duration, limit_figure, row_figure  # noqa: E402
from bench.verdict import Mark, judge  # noqa: E402


class TestStats:
    def test_percentile_is_a_sample(self) -> None:
        samples = [float(value) for value in range(1, 101)]
        assert percentile(samples, 0.99) == 99.0
        assert percentile(samples, 1.0) == 100.0
        assert percentile([7.0], 0.5) == 7.0

    def test_no_samples_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="no samples"):
            percentile([], 0.5)

    def test_few_samples_have_a_maximum_instead_of_a_p99(self) -> None:
        few = summary([1.0] * 998 + [9.0])
        assert (few.tail, few.p99, few.p50) == ("max", 9.0, 1.0)
        enough = summary([1.0] * 999 + [9.0])
        assert (enough.tail, enough.p99) == ("p99", 1.0)

    def test_ratio_pairs_rounds(self) -> None:
        # One slow round moves the spread, not the value.
        assert ratio([[6.0], [8.0], [60.0]], [[2.0], [2.0], [2.0]]) == Ratio(4.0, 3.0, 30.0)

    def test_rounds_that_do_not_pair_up_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="2 rounds do not pair up with 1"):
            ratio([[1.0], [1.0]], [[1.0]])


def results(*, telegrad: float, torch: float = 1.0, raw: float = 0.1, row: str = "empty_call") -> Results:
    found = Results()
    for drift in (1.0, 2.0, 3.0):  # the machine gets slower, the ratios stay
        sides = {"telegrad": telegrad, "torch": torch, "raw": raw}
        found.add_round(row, {side: [seconds * drift] * 3 for side, seconds in sides.items()})
    return found


class TestVerdict:
    @pytest.mark.parametrize(
        ("telegrad", "mark"),
        [(0.5, Mark.BELOW), (0.34, Mark.BELOW), (0.25, Mark.FLOOR), (0.2, Mark.GOAL), (0.1, Mark.GOAL)],
    )
    def test_marks_of_the_speedup(self, telegrad: float, mark: Mark) -> None:
        (line,) = judge(ROWS.values(), results(telegrad=telegrad)).lines
        assert line.mark is mark

    @pytest.mark.parametrize(("telegrad", "mark"), [(0.15, Mark.GOAL), (0.25, Mark.FLOOR), (0.35, Mark.BELOW)])
    def test_marks_of_the_nearness_to_a_limit(self, telegrad: float, mark: Mark) -> None:
        (near,) = judge(ROWS.values(), results(telegrad=telegrad)).nearness
        assert near.mark is mark

    def test_bandwidth_counts_both_directions(self) -> None:
        # 64 MB there and back is twice what the memcpy moves: in four times its time, half its bandwidth.
        (near,) = judge(ROWS.values(), results(telegrad=0.4, raw=0.1, row="echo_64mb")).nearness
        assert near.sides["telegrad"].value == pytest.approx(0.5)
        assert near.mark is None

    def test_a_worse_tail_is_a_miss(self) -> None:
        found = results(telegrad=0.15)
        found.rows["empty_call"]["telegrad"][0][0] = 6.0
        verdict = judge(ROWS.values(), found)
        assert verdict.misses == ["empty Python call: the max is 2.00× TensorPipe's"]

    def test_misses_are_sentences(self) -> None:
        assert judge(ROWS.values(), results(telegrad=0.5)).misses == [
            "empty Python call: 2.00×, the floor is 3×",
            "empty Python call: 5.00× the raw Unix-socket round trip, the floor is 3×",
        ]

    def test_one_library_alone_has_no_ratio(self) -> None:
        found = results(telegrad=0.5)
        del found.rows["empty_call"]["telegrad"]
        verdict = judge(ROWS.values(), found)
        assert verdict.lines[0].speedup is None
        assert verdict.misses == []


class TestReports:
    def test_units(self) -> None:
        assert [duration(value) for value in (2.5, 0.0123, 456e-6, 7.89e-9)] == [
            "2.50 s",
            "12.3 ms",
            "456 µs",
            "7.89 ns",
        ]
        assert row_figure(ROWS["in_flight"], 0.125) == "8,000 /s"
        assert limit_figure(LIMITS["memcpy"], 64 * 2**20 / 8e9) == "8.00 GB/s"

    def test_markdown(self) -> None:
        found = results(telegrad=0.2)
        found.failures.append(Failure("torch", "echo_1mb", "no answer"))
        page = markdown.page(this_machine(), judge(ROWS.values(), found))
        assert "| 5.00× | 5.00..5.00 | 3× | 5× | 5.00× | ★ goal met |" in page
        assert "Failed: torch in echo_1mb" in page

    def test_record_has_every_round(self) -> None:
        found = results(telegrad=0.2)
        data = json.loads(json.dumps(record(this_machine(), found, judge(ROWS.values(), found))))
        rounds = data["rows"]["empty_call"]["rounds"]
        assert [figures["p50"] for figures in rounds["torch"]] == [1.0, 2.0, 3.0]
        assert set(rounds) == {"telegrad", "torch", "raw"}
        assert {"cpu", "cores", "kernel", "torch", "python", "date"} <= set(data["machine"])

    def test_picture(self, tmp_path: Path) -> None:
        assert picture.draw(tmp_path / "a.png", this_machine(), judge(ROWS.values(), results(telegrad=0.2)))
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    def test_no_picture_without_ratios(self, tmp_path: Path) -> None:
        assert not picture.draw(tmp_path / "a.png", this_machine(), judge(ROWS.values(), Results()))
        assert not (tmp_path / "a.png").exists()


class TestExitCode:
    """Noisy figures do not fail a run unless asked to; a wrong or missing answer always does."""

    @pytest.mark.parametrize(
        ("telegrad", "failures", "options", "code"),
        [
            (0.5, [], [], 0),
            (0.5, [], ["--check"], 1),
            (0.15, [], ["--check"], 0),
            (0.15, [Failure("torch", "echo_1mb", "no answer")], [], 2),
        ],
    )
    def test_exit_code(
        self, monkeypatch: pytest.MonkeyPatch, telegrad: float, failures: list[Failure], options: list[str], code: int
    ) -> None:
        found = results(telegrad=telegrad)
        found.failures += failures
        monkeypatch.setattr(command_line, "run", lambda schedule, tell: found)
        assert command_line.main(["--rows", "empty_call", *options]) == code

    def test_unknown_rows_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            command_line.main(["--rows", "empty_call,telepathy"])
        assert "no row is called telepathy; there are empty_call" in capsys.readouterr().err


class _Counting(Case[int]):
    held = 2

    def __init__(self, wrong: int | None = None) -> None:
        self.log: list[str] = []
        self._wrong = wrong

    def prepare(self, index: int) -> None:
        self.log.append(f"prepare {index}")

    def run(self, index: int) -> int:
        return -1 if index == self._wrong else index

    def check(self, index: int, reply: int) -> None:
        self.log.append(f"check {index}")
        if reply != index:
            raise WrongReplyError(f"call {index}")

    def finish(self, calls: int) -> None:
        self.log.append(f"finish {calls}")


class TestMeasure:
    def test_every_reply_is_checked_and_only_samples_are_returned(self) -> None:
        case = _Counting()
        assert len(measure(case, Plan(warmup=1, samples=3))) == 3
        assert case.log == [
            "prepare 0", "check 0",
            "prepare 1", "prepare 2", "check 1", "check 2",
            "prepare 3", "check 3",
            "finish 4",
        ]  # fmt: skip

    @pytest.mark.parametrize("wrong", [0, 2, 4])
    def test_one_wrong_reply_fails_the_row(self, wrong: int) -> None:
        with pytest.raises(WrongReplyError, match=f"call {wrong}"):
            measure(_Counting(wrong), Plan(warmup=1, samples=4))


@pytest.fixture
def raw_side() -> Iterator[Side]:
    side = Side("raw", timeout=30.0)
    yield side
    side.kill()


def test_a_hung_side_is_killed_with_its_stacks_and_can_start_again(raw_side: Side) -> None:
    plan = Plan(warmup=1, samples=5)
    assert len(raw_side.measure("round_trip", plan)) == 5
    caller, callee = (worker.process for worker in raw_side._workers)
    callee.send_signal(signal.SIGSTOP)  # the caller now waits for ever
    raw_side.timeout = 0.5
    with pytest.raises(SideFailedError) as caught:
        raw_side.measure("round_trip", plan)
    text = str(caught.value)
    assert "raw: round_trip: no answer from the caller within 0.5 s" in text
    assert re.search(r"limits\.py.* in run", text), text  # the stack of the caller, in the middle of its round trip
    assert None not in (caller.poll(), callee.poll())
    raw_side.timeout = 30.0
    assert len(raw_side.measure("round_trip", plan)) == 5
    assert raw_side.stop() is None


def test_imports_point_one_way() -> None:
    """The order of the map in ``bench/__init__.py``: a module imports only what stands above it."""
    order = [
        *("row", "library", "rows", "limits", "measure", "protocol", "worker", "side", "results", "schedule", "stats"),
        *("verdict", "machine", "units", "table", "terminal", "markdown", "picture", "record", "__main__"),
    ]
    files = {path.stem: path for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__"}
    assert set(files) | {"rows"} == set(order)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bench."):
                imported = node.module.split(".")[1]
                under_type_checking = (name, imported) == ("row", "library")
                assert under_type_checking or order.index(imported) < order.index(name), f"{name} imports {imported}"


def test_quick_run(tmp_path: Path) -> None:
    """The whole benchmark, small: processes, rendezvous, rows, checks, tables, files."""
    landed = hasattr(telegrad.rpc, "init_rpc")
    command = [sys.executable, "-m", "bench", "--quick", "--timeout", "40", "--out", str(tmp_path)]
    command += [] if landed else ["--only", "torch"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "latest.json").read_text())
    assert list(data["rows"]) == [row.name for row in ROWS.values() if row.quick]
    assert data["failures"] == []
    assert "empty Python call" in done.stdout
    assert "| empty Python call |" in (tmp_path / "latest.md").read_text()
    if not landed:
        pytest.skip("telegrad.rpc.init_rpc does not exist yet: only the TensorPipe half was run")
    assert data["rows"]["empty_call"]["speedup"]["value"] > 0
    assert (tmp_path / "latest.png").exists()
