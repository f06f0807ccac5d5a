"""The benchmark's statistics, tables and watchfulness, and one quick run of the whole."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from support import eventually

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # bench is run from the checkout, never installed

from bench import __main__ as command_line  # noqa: E402
from bench import markdown, picture  # noqa: E402
from bench.ablations import ABLATIONS  # noqa: E402
from bench.limits import LIMITS  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.measure import measure  # noqa: E402
from bench.record import record  # noqa: E402
from bench.results import Failure, Results  # noqa: E402
from bench.row import Case, Plan, WrongReplyError  # noqa: E402
from bench.rows import ROWS  # noqa: E402
from bench.rows.graphs import expected, make_graph  # noqa: E402
from bench.rows.local_backward import LocalGraph  # noqa: E402
from bench.schedule import Schedule  # noqa: E402
from bench.side import Side, SideFailedError  # noqa: E402
from bench.stats import Ratio, exponent, percentile, ratio, summary  # noqa: E402
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

    @pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
    def test_exponent_of_a_power(self, power: float) -> None:
        assert exponent([(size, 3e-6 * size**power) for size in (1, 10, 300, 1000)]) == pytest.approx(power)


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


class TestModesAndGrowth:
    @pytest.mark.parametrize(
        ("smart", "mark"), [(1.2, Mark.GOAL), (1.25, Mark.GOAL), (1.4, Mark.FLOOR), (2, Mark.BELOW)]
    )
    def test_marks_of_smart_against_fast(self, smart: float, mark: Mark) -> None:
        (modes,) = judge(ROWS.values(), in_both_modes(smart)).modes
        assert modes.mark is mark
        assert modes.ratio.value == pytest.approx(smart)

    def test_smart_that_is_too_slow_is_a_miss(self) -> None:
        misses = judge(ROWS.values(), in_both_modes(2.0)).misses
        assert misses == ["context: one small call: SMART takes 2.00× FAST, the floor is 1.5×"]

    def test_fast_is_no_library(self) -> None:
        (line,) = judge(ROWS.values(), in_both_modes(1.0)).lines
        assert set(line.sides) == {"telegrad", "torch"}

    def test_a_row_without_floor_is_only_shown(self) -> None:
        # Slower than torch in the median and in the tail, but near enough to torch.autograd.grad.
        verdict = judge(ROWS.values(), results(telegrad=0.12, torch=0.1, raw=0.1, row="local_backward"))
        assert verdict.lines[0].mark is None
        assert verdict.nearness[0].mark is Mark.FLOOR
        assert verdict.misses == []

    def test_a_local_backward_that_is_too_slow_is_a_miss(self) -> None:
        verdict = judge(ROWS.values(), results(telegrad=0.14, torch=1.0, raw=0.1, row="local_backward"))
        assert verdict.misses == ["backward of 1,600 nodes: 1.40× the plain torch.autograd.grad, the floor is 1.3×"]

    def test_points_make_curves(self) -> None:
        verdict = judge(ROWS.values(), growing())
        sends, nodes = verdict.growth
        assert [size for size, _ in sends.curves["telegrad"].points] == [1, 10, 100, 300, 1000]
        assert [size for size, _ in nodes.curves["torch"].points] == [1600, 5000, 16000, 50000]
        assert sends.curves["telegrad"].exponent == pytest.approx(1.0)
        assert sends.curves["torch"].last_exponent == pytest.approx(2.0)
        assert verdict.lines == []

    def test_one_point_has_no_exponent(self) -> None:
        (sends,) = judge(ROWS.values(), results(telegrad=1.0, row="sends_10")).growth
        assert sends.curves["telegrad"].exponent is None


def in_both_modes(smart: float) -> Results:
    """A row in which SMART takes so many times as long as FAST."""
    found = results(telegrad=smart, torch=100.0, row="context_small")
    found.rows["context_small"]["fast"] = results(telegrad=1.0).rows["empty_call"]["telegrad"]
    return found


def growing() -> Results:
    """Curves: telegrad's are linear, torch's quadratic."""
    found = Results()
    for row in ROWS.values():
        if row.point is not None:
            size = row.point.size
            found.add_round(row.name, {"telegrad": [size * 1e-6], "torch": [size**2 * 1e-9]})
    return found


class TestSchedule:
    def schedule(self, *names: str, quick: bool = False) -> Schedule:
        rows = [ROWS[name] for name in names]
        return Schedule(rows, ["telegrad", "torch"], rounds=1, quick=quick, timeout=1.0, budget=1.0)

    def test_only_a_row_that_needs_them_has_more_workers_started(self) -> None:
        assert self.schedule("empty_call", "context_fan_out").workers == 2
        assert self.schedule("empty_call", "context_chain").workers == 4

    def test_telegrad_runs_in_both_modes_and_torch_in_its_only_one(self) -> None:
        schedule, row = self.schedule("context_small"), ROWS["context_small"]
        assert [(turn.column, turn.fast) for turn in schedule.turns(row, "telegrad")] == [
            ("telegrad", False),
            ("fast", True),
        ]
        assert [(turn.column, turn.fast) for turn in schedule.turns(row, "torch")] == [("torch", False)]
        assert schedule.turns(ROWS["small_tensor"], "raw") == []  # it has no limit

    def test_the_raw_side_measures_the_limit_next_to_a_row(self) -> None:
        (turn,) = self.schedule("local_backward", quick=True).turns(ROWS["local_backward"], "raw")
        assert (turn.column, turn.name, turn.plan) == ("raw", "plain_backward", LIMITS["plain_backward"].quick)


class TestGraphs:
    @pytest.mark.parametrize("nodes", [50, 1600])
    def test_a_graph_has_as_many_nodes_as_asked_for(self, nodes: int) -> None:
        seen, todo = set(), [make_graph(nodes, 0).loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        assert len(seen) == nodes

    def test_a_stale_gradient_is_noticed(self) -> None:
        task = LocalGraph(50)
        task.forward(1)
        right = dict(zip(task._leaves, expected(50, 1), strict=True))
        task.verify(1, right)
        with pytest.raises(WrongReplyError, match="pass 1: the gradient is"):
            task.verify(1, dict(zip(task._leaves, expected(50, 0), strict=True)))
        right.popitem()
        with pytest.raises(WrongReplyError, match="3 gradients for 4 leaves"):
            task.verify(1, right)

    def test_the_plain_backward_of_the_limits(self) -> None:
        with socket.socket() as unused:
            assert len(measure(LIMITS["plain_backward"].case(unused), Plan(warmup=1, samples=2))) == 2
        assert not torch.equal(expected(1600, 0)[0], expected(1600, 1)[0])


class TestByHand:
    @staticmethod
    def callees() -> list[str]:
        """The commands of those that this process has."""
        commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
        return [command for command in commands if "bench.by_hand" in command]

    @pytest.mark.parametrize("limit", ["hand_made_call", "hand_made_chain", "hand_made_threads"])
    def test_every_pass_is_right_and_no_process_is_left(self, limit: str) -> None:
        with socket.socket() as unused:
            assert len(measure(LIMITS[limit].case(unused), Plan(warmup=1, samples=2))) == 2
        assert self.callees() == []

    def test_a_wrong_gradient_is_noticed(self) -> None:
        with socket.socket() as unused:
            case = LIMITS["hand_made_call"].case(unused)
            reply = case.run(0)
            case.check(0, reply)
            with pytest.raises(WrongReplyError, match="pass 1 gave"):
                case.check(1, reply)
            case.finish(1)

    def test_a_callee_ends_when_its_caller_does(self) -> None:
        with socket.socket() as unused:
            case = LIMITS["hand_made_call"].case(unused)
            assert len(self.callees()) == 1
            case.run(0)
            (callee,) = case._callees  # type: ignore[attr-defined]
            callee.links[0].close()
            assert callee._process.wait(10) == 0


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

    def test_markdown_of_modes_and_growth(self) -> None:
        machine = this_machine()
        page = markdown.page(machine, judge(ROWS.values(), in_both_modes(1.2)))
        assert "| context: one small call | 2.40 s | 2.00 s | 1.20× | 1.20..1.20 | 1.5× | 1.25× | ★ goal met |" in page
        cells = "| telegrad | 1: 1.00 µs | 1,000: 1.00 ms | 1.00 µs | 1.00 | 1.00 |"
        verdict = judge(ROWS.values(), growing())
        assert cells in markdown.page(machine, verdict)
        assert cells in markdown.block(machine, verdict)

    def test_record_has_every_round(self) -> None:
        found = results(telegrad=0.2)
        data = json.loads(json.dumps(record(this_machine(), found, judge(ROWS.values(), found))))
        rounds = data["rows"]["empty_call"]["rounds"]
        assert [figures["p50"] for figures in rounds["torch"]] == [1.0, 2.0, 3.0]
        assert set(rounds) == {"telegrad", "torch", "raw"}
        assert {"cpu", "cores", "kernel", "torch", "python", "date"} <= set(data["machine"])

    def test_record_has_modes_and_points(self) -> None:
        found = in_both_modes(1.2)
        found.rows |= growing().rows
        data = json.loads(json.dumps(record(this_machine(), found, judge(ROWS.values(), found))))
        assert data["modes"]["context_small"]["smart_over_fast"]["value"] == pytest.approx(1.2)
        assert set(data["rows"]["context_small"]["rounds"]) == {"telegrad", "fast", "torch", "raw"}
        nodes = data["growth"]["nodes"]["sides"]["telegrad"]
        assert nodes["points"][-1] == {"size": 50000, "seconds": pytest.approx(0.05)}
        assert nodes["exponent"] == pytest.approx(1.0)
        assert list(data["rows"]) == ["context_small"]

    def test_picture_of_autograd(self, tmp_path: Path) -> None:
        machine, path = this_machine(), tmp_path / "a.png"
        assert not picture.draw_autograd(path, machine, judge(ROWS.values(), results(telegrad=0.2)))
        assert not path.exists()
        for found in (in_both_modes(1.2), growing(), results(telegrad=1.0, row="sends_10")):
            assert picture.draw_autograd(path, machine, judge(ROWS.values(), found))
            assert path.read_bytes().startswith(b"\x89PNG")
            path.unlink()

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


def test_a_side_that_polls_is_stopped_while_nothing_is_asked_of_it() -> None:
    def states() -> set[str]:
        stats = [Path(f"/proc/{worker.process.pid}/stat").read_text() for worker in side._workers]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    side = Side("torch", timeout=60.0)
    try:
        for _ in range(2):
            assert len(side.measure("empty_call", Plan(warmup=1, samples=5))) == 5
            assert eventually(lambda: states() == {"T"})
        side.idle_cores(0.1)  # wakes it for that; how much it uses is not ours to promise
        assert eventually(lambda: states() == {"T"})
        assert side.stop() is None
    finally:
        side.kill()


def test_an_idle_side_uses_nothing_and_one_that_works_does(raw_side: Side) -> None:
    assert len(raw_side.measure("round_trip", Plan(warmup=1, samples=5))) == 5
    assert raw_side.idle_cores(0.5) < 0.1
    before = raw_side._processor_time()
    raw_side.measure("round_trip", Plan(warmup=1, samples=20_000))
    assert raw_side._processor_time() - before > 0.02


def test_workers_do_not_outlive_their_parent() -> None:
    """Not even those that are stopped."""
    program = (
        "import os, signal; from bench.side import Side; from bench.row import Plan\n"
        "side = Side('torch', timeout=60.0)\n"
        "side.measure('empty_call', Plan(warmup=1, samples=2))\n"
        "print(*[worker.process.pid for worker in side._workers], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_imports_point_one_way() -> None:
    """The order of the map in ``bench/__init__.py``: a module imports only what stands above it."""
    order = [
        *(
            "row",
            "library",
            "rows",
            "by_hand",
            "limits",
            "measure",
            "results",
            "protocol",
            "ablations",
            "worker",
            "side",
            "schedule",
        ),
        *("stats", "verdict", "machine", "units", "table", "terminal", "markdown", "picture", "record", "__main__"),
        "compare",
    ]
    files = {path.stem: path for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__"}
    assert set(files) | {"rows"} == set(order)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bench."):
                imported = node.module.split(".")[1]
                under_type_checking = (name, imported) == ("row", "library")
                assert under_type_checking or order.index(imported) < order.index(name), f"{name} imports {imported}"


@pytest.mark.timeout(300)
def test_quick_run(tmp_path: Path) -> None:
    """The whole benchmark, small: processes, rendezvous, rows, checks, tables, files.  It takes a minute when idle."""
    command = [sys.executable, "-m", "bench", "--quick", "--timeout", "40", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "latest.json").read_text())
    assert list(data["rows"]) == [row.name for row in ROWS.values() if row.quick and row.point is None]
    assert data["failures"] == []
    assert list(data["idle_cores"]) == ["telegrad", "torch"]
    assert "empty Python call" in done.stdout
    assert "| empty Python call |" in (tmp_path / "latest.md").read_text()
    assert data["rows"]["empty_call"]["speedup"]["value"] > 0
    assert list(data["modes"]) == [row.name for row in ROWS.values() if row.modes]
    assert [len(curve["sides"]["telegrad"]["points"]) for curve in data["growth"].values()] == [3, 2]
    assert (tmp_path / "latest.png").exists()
    assert (tmp_path / "latest-autograd.png").exists()


def test_a_version_without_a_part_is_compared() -> None:
    command = [sys.executable, "-m", "bench.compare", "--rows", "empty_call", "--rounds", "1", "--restarts", "1"]
    command += ["--without", "spin", "--against", str(ROOT), "--no-torch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    headings, _, row, *_ = done.stdout.splitlines()
    assert headings == f"| row | without spin | {ROOT} |"
    assert re.fullmatch(r"\| empty Python call( \| [0-9.]+ \([0-9.]+\.\.[0-9.]+\)){2} \|", row)


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_the_parts_to_switch_off_exist(name: str) -> None:
    program = f"from bench.ablations import apply; apply({name!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=100)
