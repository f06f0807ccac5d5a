"""The way of a call and of a backward through the code stays short, and ``docs/design.md`` shows it as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from walk import show
from walk.__main__ import walk_all
from walk.bounds import BOUNDS, Bound
from walk.recorder import ENTER, LEAVE, RESUME, Event, Recorder, Round, ThreadLog
from walk.scenes import SCENES, TITLES
from walk.way import Line, ThreadWay, Walk, Way, thread_way, typical

pytestmark = pytest.mark.timeout(300)  # it starts two processes and pauses between rounds: 10 s, or 70 beside much load

FAR = 0.25  # by which share a count in the document may differ: which thread reads first changes it by 15 %


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return {walk.scene: walk for walk in walk_all()}


# --- the counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES)
def test_the_way_is_no_longer_than_its_bound(walks: dict[str, Walk], scene: str) -> None:
    walk, bound = walks[scene], BOUNDS[scene]
    counts = Bound(walk.caller.total, walk.callee.total)
    assert counts.caller <= bound.caller, show.terminal([walk])
    assert counts.callee <= bound.callee, show.terminal([walk])


@pytest.mark.parametrize("scene", SCENES)
def test_the_document_shows_about_the_same(walks: dict[str, Walk], scene: str) -> None:
    written = show.counts_in(show.DOCUMENT.read_text())[scene]
    counts = Bound(walks[scene].caller.total, walks[scene].callee.total)
    assert counts == pytest.approx(written, rel=FAR), "python -m tests.walk --write brings docs/design.md up to date"


def first_on_main_thread(walk: Walk) -> Line:
    """The first function of telegrad that the program calls."""
    [main] = [each for each in walk.caller.threads if each.thread == "MainThread"]
    program, first, *_ = main.lines
    assert not program.counts
    return first


@pytest.mark.parametrize(("scene", "remote"), [("empty call", "nothing"), ("tensor call", "double")])
def test_a_call_goes_from_the_public_function_to_the_remote_one(
    walks: dict[str, Walk], scene: str, remote: str
) -> None:
    first = first_on_main_thread(walks[scene])
    assert (first.file, first.function) == ("rpc/calls.py", "rpc_sync")
    called = [line for each in walks[scene].callee.threads for line in each.lines if not line.counts]
    assert [line.function for line in called] == [remote]
    assert 0 < first.time < called[0].time  # by the clock that both processes share


def test_a_backward_goes_through_the_other_worker(walks: dict[str, Walk]) -> None:
    first = first_on_main_thread(walks["backward"])
    assert (first.file, first.function) == ("autograd/api.py", "backward")
    assert "autograd/functions.py" in walks["backward"].callee.files()  # called by torch: nodes of its graph


def test_every_scene_has_a_bound_and_a_title() -> None:
    assert list(SCENES) == list(BOUNDS) == list(TITLES)


# --- the recorder -----------------------------------------------------------------------------------------------------


def leaf() -> None:
    pass


def comprehends() -> list[int]:
    return [number for number in range(3)]  # noqa: C416 - a frame of its own in Python 3.11


@contextmanager
def surroundings() -> Iterator[None]:
    leaf()
    yield
    leaf()


def winding_way() -> None:
    for _ in range(3):
        leaf()
    leaf()
    comprehends()
    with surroundings():
        threading.Event().is_set()


@contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    recorder.install()
    try:
        yield
    finally:
        recorder.uninstall()


def recorded(function: Callable[[], None]) -> ThreadLog:
    """What it does on a thread of its own that begins before the recorder is on, as a worker's threads do."""
    recorder = Recorder(__file__)
    go = threading.Event()

    def main() -> None:
        assert go.wait(10)
        function()

    with installed(recorder):
        thread = threading.Thread(target=main, name="walker-7")
        thread.start()
        recorder.start()
        go.set()
        thread.join(10)
        [log] = [log for log in recorder.stop() if log.name == thread.name]
    return log


def test_functions_are_shown_in_order_with_loops_drawn_together() -> None:
    way = thread_way(recorded(winding_way), 0)
    assert way.thread == "walker-*"
    shown = [(line.depth, line.function, line.times) for line in way.lines if line.function != "recorded.main"]
    depth = shown[0][0]
    assert [(line[0] - depth, *line[1:]) for line in shown] == [
        (0, "winding_way", 1),
        (1, "leaf", 3),
        (1, "leaf", 1),  # from another place
        (1, "comprehends", 1),
        (1, "surroundings", 1),
        (2, "leaf", 1),
        (1, "leaf", 1),  # where the generator resumes, which is not entered again
    ]
    times = [line.time for line in way.lines]
    assert times == sorted(times)


def test_functions_of_others_are_one_number() -> None:
    assert recorded(winding_way).others > recorded(leaf).others


def test_a_thread_that_is_not_recorded_is_noticed() -> None:
    recorder, end = Recorder(__file__), threading.Event()
    early = threading.Thread(target=end.wait, args=(10,), name="early")
    early.start()
    with installed(recorder):
        late = threading.Thread(target=end.wait, args=(10,), name="late")
        late.start()
        missed = recorder.missed(patience=0.5)
    end.set()
    early.join(10)
    late.join(10)
    assert "early" in missed
    assert "late" not in missed


# --- the typical way --------------------------------------------------------------------------------------------------


def log(thread: str, *functions: str) -> ThreadLog:
    events = []
    for number, function in enumerate(functions):
        events += [Event(kind, number, number, "file.py", function, function) for kind in (ENTER, LEAVE)]
    return ThreadLog(thread, events, 1)


def test_the_typical_way_is_taken() -> None:
    usual = Round([log("main", "f", "g")], [log("pool-1", "h")])
    other_thread = Round([log("main", "f", "g")], [log("pool-2", "h")])
    with_timer = Round([log("main", "f", "g"), log("timer", "tick")], [log("pool-1", "h")])
    walk = typical("empty call", [with_timer, usual, other_thread])
    assert (walk.caller.total, walk.caller.rounds, walk.caller.of) == (2, 2, 3)
    assert (walk.callee.total, walk.callee.rounds, walk.callee.of) == (1, 3, 3)
    assert [each.thread for each in walk.callee.threads] == ["pool-*"]
    assert typical("empty call", [with_timer, usual]).caller.total == 2  # of two the shorter


def test_where_the_rounds_differ_the_lower_quartile_is_taken() -> None:
    rounds = [Round([log("main", *functions)], []) for functions in ("abcdefg", "abcdefg", "ab", "abc", "a")]
    walk = typical("empty call", rounds)
    assert (walk.caller.total, walk.caller.rounds) == (2, 1)


def test_how_often_a_loop_went_round_makes_no_difference() -> None:
    def spinning(times: int) -> Round:
        looks = [Event(kind, 0, 0, "file.py", "look", "spin:8") for _ in range(times) for kind in (ENTER, LEAVE)]
        return Round([ThreadLog("main", looks, 0)], [])

    walk = typical("empty call", [spinning(5), spinning(50), spinning(1)])
    assert (walk.caller.total, walk.caller.rounds) == (1, 3)
    assert walk.caller.threads[0].lines[0].times == 5


def test_leaving_what_was_entered_before_changes_nothing() -> None:
    events = [Event(LEAVE, 0, 7, "file.py", "wait", ""), *log("main", "f").events]
    events.append(Event(RESUME, 1, 8, "file.py", "generator", ""))
    way = thread_way(ThreadLog("main", events, 0), 0)
    assert [line.function for line in way.lines] == ["f"]


# --- the text ---------------------------------------------------------------------------------------------------------


def some_walk() -> Walk:
    lines = [Line(0, "", "step", 1, 0), Line(1, "rpc/api.py", "rpc_sync", 1, 5000), Line(2, "spin.py", "look", 9, 7000)]
    caller = Way([ThreadWay("MainThread", lines, 3)], 4, 15)
    return Walk("empty call", caller, Way([ThreadWay("pool-*", lines[1:2], 0)], 15, 15))


def test_the_terminal_shows_order_threads_and_totals() -> None:
    text = show.terminal([some_walk()])
    assert "caller, thread MainThread" in text
    assert "      5  rpc/api.py    rpc_sync\n      7  spin.py         look x 9\n" in text
    assert "caller: 2 functions in 2 files (rpc/api.py 1, spin.py 1)" in text
    assert text.count("not stable") == 1
    assert max(map(len, text.splitlines())) <= show.WIDTH


def test_no_line_is_wider_than_the_terminal(walks: dict[str, Walk]) -> None:
    assert max(map(len, show.terminal(list(walks.values())).splitlines())) <= show.WIDTH


def test_the_document_gets_the_walk_between_its_marks() -> None:
    document = f"before\n{show.BEGIN}\nold\n{show.END}\nafter\n"
    new = show.rewritten(document, [some_walk()])
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert "spin.py         look (loop)" in new
    assert show.counts_in(new) == {"empty call": Bound(2, 1)}
    assert show.rewritten(new, [some_walk()]) == new
    with pytest.raises(ValueError, match="no place"):
        show.rewritten("no marks", [some_walk()])
