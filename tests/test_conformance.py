"""The runner of PyTorch's tests: it survives what tests do, and a run is good only if all passed that should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conformance import exceptions, report, tutorials
from conformance.compare import Both, times
from conformance.driver import ROOT, Result, Run, Settings, run, surprises
from conformance.plan import VARIABLE, Plan
from conformance.suites import SUITES, Suite
from conformance.table import GROUPS, Case, all_cases, fast_ids, parse, select
from conformance.tutorials import Program, Ran
from conformance.verdict import judge
from support import eventually

FAKE = {
    "fake": Suite("tests.conformance.fake", "Fake", "none"),
    "gone": Suite("tests.conformance.no_such_module", "Fake", "none"),
}
QUICK = Settings("none", jobs=1, deadline=0.5, grace=0.5, suites=FAKE)


def case(name: str, group: str = "A", suite: str = "fake") -> Case:
    return Case(suite, name, group)


def results_of(*names: str, settings: Settings = QUICK) -> dict[str, Result]:
    done = run([case(name) for name in names], settings)
    return {result.case.name: result for result in done.results}


# --- running ----------------------------------------------------------------------------------------------------------


def test_results_of_tests_that_end() -> None:
    names = ["test_passes", "test_fails", "test_errs", "test_skips", "test_passes_unexpectedly"]
    results = results_of(*names)
    assert [results[name].status for name in names] == ["passed", "failed", "failed", "skipped", "failed"]
    assert "AssertionError: 2 != 3" in results["test_fails"].text
    assert "said before it failed" in results["test_fails"].output
    assert "this goes to the log" not in results["test_fails"].output  # it is another test's
    assert "LookupError: nothing there" in results["test_errs"].text
    assert results["test_skips"].text == "not today"


def test_a_test_that_hangs_is_killed_and_shows_where_it_was() -> None:
    results = results_of("test_hangs", "test_passes")
    hung = results["test_hangs"]
    assert hung.status == "hung"
    assert 0.9 < hung.seconds < 20
    assert "wait_for_ever" in hung.output
    assert results["test_passes"].status == "passed"  # in a new worker


@pytest.mark.parametrize(("name", "code"), [("test_crashes", 7), ("test_leaves_a_child", 8)])
def test_a_test_that_kills_its_worker(name: str, code: int) -> None:
    results = results_of(name, "test_passes", settings=QUICK._replace(deadline=30))
    assert (results[name].status, results[name].text) == ("crashed", f"exit code {code}")
    assert results["test_passes"].status == "passed"


def test_a_suite_that_cannot_be_imported_fails_alone() -> None:
    done = run([case("test_x", suite="gone"), case("test_passes")], QUICK)
    gone, passes = sorted(done.results, key=lambda result: result.case.suite, reverse=True)
    assert gone.status == "failed"
    assert "could not be imported" in gone.text
    assert "no_such_module" in gone.text
    assert passes.status == "passed"


def test_a_worker_that_does_not_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "in_environment", lambda self: {VARIABLE: "no plan"})
    with pytest.raises(RuntimeError, match=r"did not start:[\s\S]*JSONDecodeError"):
        run([case("test_passes")], QUICK)


def test_two_at_a_time() -> None:
    done = run([case("test_hangs"), case("test_passes")], QUICK._replace(jobs=2, deadline=3))
    order = [result.case.name for result in done.results]
    assert order == ["test_passes", "test_hangs"]


def test_nobody_is_left_when_the_driver_dies() -> None:
    """Not even when it cannot clean up: a worker that is at no test ends when nobody speaks to it."""
    code = (
        "from tests.conformance.driver import Settings, Worker\n"
        "from tests.conformance.suites import Suite\n"
        "worker = Worker(Settings('none'), {'fake': Suite('tests.conformance.fake', 'Fake', 'none')})\n"
        "worker._start()\n"
        "print(worker._process.pid, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.send_signal(signal.SIGKILL)
    assert eventually(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_what_the_table_does_not_know_is_told() -> None:
    told = surprises([case("test_known"), case("test_gone")], {"fake": {"test_known", "test_new"}})
    assert told == ["fake::test_gone is no test", "fake::test_new is in no group"]


# --- telegrad in the place of torch -----------------------------------------------------------------------------------


SEALED = """
import torch
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from tests.conformance.seal import Entries, SealedError

sealed = Entries().seal()
assert sealed > 40, sealed
entries = [
    lambda: rpc.get_rpc_timeout(),
    lambda: rpc.TensorPipeRpcBackendOptions(),
    lambda: rpc.api._invoke_rpc_builtin(),
    lambda: rpc.api._reset_current_rpc_agent(),
    lambda: rpc.WorkerInfo("a", 0),
    lambda: rpc.PyRRef(1),
    lambda: autograd.backward(0, []),
    lambda: autograd.get_gradients(0),
    lambda: autograd.context().__enter__(),
    lambda: torch._C._distributed_rpc._get_current_rpc_agent(),
    lambda: torch._C._rpc_init(),
]
for number, entry in enumerate(entries):
    try:
        entry()
    except SealedError:
        continue
    raise SystemExit(f"entry {number} is open")
"""


def test_torchs_own_cpp_is_sealed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEALED], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


# --- judging ----------------------------------------------------------------------------------------------------------


TOML = """
[[exception]]
reason = "telegrad does not hang"
tests = ["fake::test_asserts_a_hang"]

[[exception]]
reason = "TorchScript"
group = "C"
but = ["fake::test_script_that_works"]

[[exception]]
reason = "no such hardware"
tests = ["fake::test_gpu*"]
outcome = "skipped"

[[exception]]
reason = "a race in the test"
tests = ["fake::test_race"]
outcome = "any"
"""
LISTED = exceptions.parse(TOML)


@pytest.mark.parametrize(
    ("name", "group", "status", "verdict"),
    [
        ("test_x", "A", "passed", "good"),
        ("test_x", "A", "failed", "regression"),
        ("test_x", "A", "skipped", "regression"),
        ("test_x", "B", "hung", "regression"),
        ("test_x", "B", "crashed", "regression"),
        ("test_asserts_a_hang", "A", "failed", "good"),
        ("test_asserts_a_hang", "A", "hung", "good"),
        ("test_asserts_a_hang", "A", "skipped", "regression"),
        ("test_asserts_a_hang", "A", "passed", "stale"),
        ("test_script", "C", "failed", "good"),
        ("test_script", "C", "passed", "stale"),
        ("test_script_that_works", "C", "passed", "good"),
        ("test_script_that_works", "C", "failed", "regression"),
        ("test_gpu_copy", "D", "skipped", "good"),
        ("test_gpu_copy", "D", "failed", "regression"),
        ("test_race", "A", "passed", "good"),
        ("test_race", "A", "failed", "good"),
    ],
)
def test_verdicts(name: str, group: str, status: str, verdict: str) -> None:
    result = Result(case(name, group), status, 1.0, "Error: why")
    judged = judge([result], LISTED)
    assert judged.good == (verdict == "good")
    assert judged.regressions == ([result] if verdict == "regression" else [])
    assert judged.stale == ([result] if verdict == "stale" else [])
    said = report.summary(Run([result], 1.0, []), judged, LISTED)
    assert ("should have passed: fake::" in said) == (verdict == "regression")
    assert ("exceptions.toml says otherwise: fake::" in said) == (verdict == "stale")


def test_counts_by_group() -> None:
    results = [
        Result(case("test_x"), "passed"),
        Result(case("test_y"), "hung"),
        Result(case("test_asserts_a_hang"), "failed"),
        Result(case("test_script", "C"), "failed"),
        Result(case("test_gpu", "D"), "skipped"),
    ]
    assert judge(results, LISTED).counts == {
        "A": Counter(passed=1, failed=2, excepted=1),
        "C": Counter(failed=1, excepted=1),
        "D": Counter(skipped=1, excepted=1),
    }


@pytest.mark.parametrize(
    "text",
    [
        'tests = ["a::b"]',
        'reason = " "\ntests = ["a::b"]',
        'reason = "why"',
        'reason = "why"\ngroup = "A"\ntests = ["a::b"]',
        'reason = "why"\ngroup = "E"',
        'reason = "why"\ntests = ["a::b"]\noutcome = "passed"',
        'reason = "why"\ntest = ["a::b"]',
    ],
)
def test_an_exception_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        exceptions.parse(f"[[exception]]\n{text}")


def test_a_pattern_that_means_no_test_is_told() -> None:
    assert LISTED.idle_patterns([case("test_race"), case("test_gpu_1"), case("test_asserts_a_hang")]) == [
        "fake::test_script_that_works"
    ]


# --- telling ----------------------------------------------------------------------------------------------------------


def test_the_reason_is_that_of_the_child() -> None:
    text = (
        "Traceback (most recent call last):\n"
        "RuntimeError: Process 1 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\n"
        "AttributeError: no such thing\n\n"
        "To execute this test, run the following\n"
    )
    assert report.reason(Result(case("test_x"), "failed", 1.0, text)) == "AttributeError: no such thing"
    assert report.reason(Result(case("test_x"), "failed", 1.0, "Exception: simulated\n")) == "Exception: simulated"
    assert report.reason(Result(case("test_x"), "hung", 1.0, "not done after 60 s")) == "not done after 60 s"


def test_the_story_leaves_out_what_torch_says_twice() -> None:
    output = "E1116 common_distributed.py:1068] AttributeError\nthe library said this\n"
    story = report.story(Result(case("test_x"), "failed", 1.0, "AttributeError", output))
    assert "the library said this" in story
    assert "common_distributed" not in story
    hung = report.story(Result(case("test_x"), "hung", 1.0, "not done after 60 s", output))
    assert "common_distributed" in hung


def test_times_of_both_libraries() -> None:
    results = [
        Both(Result(case("test_x"), "passed", 4.0), Result(case("test_x"), "passed", 2.0)),
        Both(Result(case("test_y"), "passed", 9.0), Result(case("test_y"), "failed", 0.1)),
    ]
    lines = [line.split() for line in times(results).splitlines()]
    assert lines[1:] == [["fake", "4.0", "2.0", "0.50"], ["all", "1", "tests", "4.0", "2.0", "0.50"]]


def test_results_that_came_later_count() -> None:
    first = Run([Result(case("test_x"), "failed"), Result(case("test_y"), "passed")], 5.0, ["odd"])
    again = Run([Result(case("test_x"), "passed")], 2.0, [])
    amended = first.amended(again)
    assert [(each.case.name, each.status) for each in amended.results] == [("test_x", "passed"), ("test_y", "passed")]
    assert (amended.seconds, amended.surprises) == (7.0, ["odd"])


# --- programs of PyTorch's tutorials ----------------------------------------------------------------------------------


def ran(*outputs: list[str], codes: list[int | None] | None = None) -> Ran:
    return Ran(list(outputs), codes or [0] * len(outputs), 1.0)


@pytest.mark.parametrize(
    ("ours", "count"),
    [
        (ran(["loss 1.5", "done"]), 0),
        (ran(["done", "loss 1.5"]), 0),  # of two children
        (ran(["loss 1.6", "done"]), 1),
        (ran(["loss 1.5"]), 1),
        (ran(["loss 1.5", "done"], codes=[1]), 1),
    ],
)
def test_programs_are_compared_line_by_line(ours: Ran, count: int) -> None:
    assert len(tutorials.differences(ran(["loss 1.5", "done"]), ours)) == count


def test_a_program_runs_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'here'\n")
    (tmp_path / "main.py").write_text(
        "import sys, time, neighbour\nprint(neighbour.WORD, sys.argv[1:])\nprint('two')\ntime.sleep(60)\n"
    )
    program = Program("main.py", ("--rank=0", "--rank=1"), lines=2)
    done = tutorials.run(program, tmp_path, (), limit=30)
    assert done.outputs == [["here ['--rank=0']", "two"], ["here ['--rank=1']", "two"]]
    assert done.codes == [None, None]
    assert done.seconds < 30


def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(TimeoutError, match="did not end within 0 s"):
        tutorials.run(Program("main.py"), tmp_path, (), limit=0.3)


# --- the data ---------------------------------------------------------------------------------------------------------


def test_the_table_knows_only_suites_and_groups_that_there_are() -> None:
    cases = all_cases()
    assert {each.suite for each in cases} == set(SUITES)
    assert {each.group for each in cases} == set(GROUPS)
    assert len({each.id for each in cases}) == len(cases)
    with pytest.raises(ValueError, match="no group E"):
        parse("E rpc test_x")


def test_the_exceptions_are_of_tests_that_there_are() -> None:
    listed = exceptions.load()
    assert listed.entries
    assert listed.idle_patterns(all_cases()) == []


def test_the_fast_part_is_of_tests_that_must_pass() -> None:
    known = {each.id: each for each in all_cases()}
    fast = fast_ids()
    assert fast <= known.keys()
    assert [name for name in sorted(fast) if exceptions.load().of(known[name])] == []
    assert {known[name].group for name in fast} == {"A", "B"}
    covered = {known[name].suite for name in fast}
    assert {suite for suite in SUITES if not SUITES[suite].cuda and not suite.startswith("jit")} <= covered


def test_what_a_run_wants() -> None:
    cases = parse("A rpc test_one\nB rpc test_two\nA ddp test_one\nD cuda_rpc test_three\n")

    def chosen(**conditions: object) -> list[str]:
        return [each.id for each in select(cases, **conditions)]  # type: ignore[arg-type]

    assert chosen() == ["rpc::test_one", "rpc::test_two", "ddp::test_one"]
    assert chosen(cuda=True) == [each.id for each in cases]
    assert chosen(suites=["cuda_rpc"]) == ["cuda_rpc::test_three"]
    assert chosen(groups="B") == ["rpc::test_two"]
    assert chosen(patterns=["one"]) == ["rpc::test_one", "ddp::test_one"]
    assert chosen(patterns=["ddp::*", "two"]) == ["rpc::test_two", "ddp::test_one"]
    assert chosen(only={"ddp::test_one"}) == ["ddp::test_one"]


# --- as a command -----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_command_lists_and_refuses() -> None:
    listed = command("--list", "--suite", "optimizer")
    assert listed.returncode == 0
    assert "A optimizer::test_dist_optim\n" in listed.stdout
    assert command("--suite", "no_such").returncode == 2
    assert command("--group", "X").returncode == 2
    assert command("-k", "no_such_test").returncode == 2


def test_one_test_on_torch_itself(tmp_path: Path) -> None:
    """The whole way: torch's suite, its processes, its result."""
    done = command("--lib", "torch", "-k", "rpc::test_self_add", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    (test,) = json.loads((tmp_path / "out.json").read_text())["tests"]
    assert (test["test"], test["status"]) == ("rpc::test_self_add", "passed")
