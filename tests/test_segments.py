"""Big tensors between processes of one host: snapshots in shared memory, which come back, are kept, or outlive."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from programs import remote_functions, segments
from telegrad import rpc
from telegrad._transport.buffers import size_class
from telegrad.errors import WorkerLostError
from worker_processes import WorkerProcess, join, leave, running_workers, worker_processes

MB = 1 << 20
NOBODY_CALLS = {"heartbeat": 60.0}  # seconds; a ping after a quarter of them would take along what is posted


def soon(look: Callable[[], Any], expected: Any, timeout: float = 8.0) -> None:
    """What is looked at becomes as expected, in time."""
    deadline = time.monotonic() + timeout
    while (found := look()) != expected:
        assert time.monotonic() < deadline, f"{found}, not {expected}"
        time.sleep(0.02)


@pytest.fixture
def pair() -> Iterator[list[WorkerProcess]]:
    """Two workers that are silent unless they have something to say."""
    with running_workers(2, **NOBODY_CALLS) as cast:
        yield cast


def introduce(*cast: WorkerProcess) -> None:
    """Waits until all of them share memory, both ways: a side uses it once the other has said that it can read it."""
    names = [f"worker{rank}" for rank in range(len(cast))]
    for name, process in zip(names, cast, strict=True):
        others = [other for other in names if other != name]
        soon(lambda process=process, others=others: process.run(segments.memory_is_shared, *others), True)


# --- a snapshot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100_000, 20 * MB])
def test_a_tensor_may_be_changed_as_soon_as_it_is_sent(pair: list[WorkerProcess], size: int) -> None:
    caller, callee = pair
    introduce(caller, callee)
    callee.signal(signal.SIGSTOP)  # so that it looks at the message when all is over
    try:
        caller.run(segments.send_and_change, "worker1", size, before=1, after=2)
        assert caller.run(segments.segment_counts)["out"] == 1, "it went through shared memory"
    finally:
        callee.signal(signal.SIGCONT)
    assert caller.run(segments.answer) == 1


def test_a_result_may_be_changed_as_soon_as_it_is_sent(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    callee.run(segments.become, 1, MB)
    caller.run(segments.ask_for_state, "worker1")
    caller.signal(signal.SIGSTOP)
    try:
        callee.run(segments.let_go_on)
        soon(lambda: callee.run(segments.segment_counts)["out"], 1)
        callee.run(segments.become, 2, MB)
    finally:
        caller.signal(signal.SIGCONT)
    assert caller.run(segments.answer) == 1


# --- coming back ----------------------------------------------------------------------------------------------------

GIVEN_BACK = {"segments": 1, "out": 0, "idle": size_class(MB)}


def test_a_segment_of_arguments_comes_back_over_an_idle_link(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    assert caller.run(segments.send, "worker1", MB, 7) == [7]
    soon(lambda: caller.run(segments.segment_counts), GIVEN_BACK)
    assert callee.run(segments.borrowed) == 0


def test_a_segment_of_a_result_comes_back_over_an_idle_link(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    assert caller.run(segments.fetch, "worker1", MB, 7) == [7]
    soon(lambda: callee.run(segments.segment_counts), GIVEN_BACK)
    assert caller.run(segments.borrowed) == 0


def test_a_segment_comes_back_when_a_tensor_that_was_kept_is_dropped(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    caller.run(segments.send_to_keep, "worker1", MB, 1, 2, 3)
    assert caller.run(segments.segment_counts)["out"] == 3
    assert callee.run(segments.kept_values) == [1, 2, 3]
    callee.run(segments.drop_kept)
    soon(lambda: caller.run(segments.segment_counts), {"segments": 3, "out": 0, "idle": 3 * size_class(MB)})
    assert caller.run(segments.send, "worker1", MB, 4, 5, 6) == [4, 5, 6]
    assert caller.run(segments.segment_counts)["segments"] == 3, "they serve again"


def test_the_answer_of_a_call_that_timed_out_gives_its_segment_back(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    callee.run(segments.become, 1, MB)
    kind, _, _ = caller.run(remote_functions.outcome, rpc.rpc_sync, "worker1", segments.hand_out_state, timeout=0.05)
    assert kind == "RpcTimeoutError"
    callee.run(segments.let_go_on)
    soon(lambda: callee.run(segments.segment_counts), GIVEN_BACK)


def test_memory_that_nobody_needs_goes_back_to_the_system(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    assert caller.run(segments.send, "worker1", MB, *range(10)) == list(range(10))
    assert callee.run(segments.mappings) == 10
    for process in pair:
        process.run(segments.hurry, 60.0)
    soon(
        lambda: (
            caller.run(segments.segment_counts)["segments"],
            caller.run(segments.mappings),
            callee.run(segments.mappings),
        ),
        (0, 0, 0),
        15,
    )


def test_beyond_the_last_segment_tensors_go_by_the_socket(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    caller.run(segments.allow_segments, 3)
    assert caller.run(segments.send, "worker1", MB, *range(10)) == list(range(10))
    caller.run(segments.send_to_keep, "worker1", MB, *range(10))
    assert caller.run(segments.segment_counts)["segments"] == 3
    assert callee.run(segments.kept_values) == list(range(10))


# --- being kept -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_kept_for_long_keeps_its_segment(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    caller.run(segments.send_to_keep, "worker1", MB, 1, 2)
    assert caller.run(segments.segment_counts) == {"segments": 2, "out": 2, "idle": 0}
    callee.run(segments.hurry)
    soon(lambda: caller.run(segments.segment_counts), {"segments": 0, "out": 0, "idle": 0})
    assert callee.run(segments.borrowed) == 0
    for value in range(3, 20):
        assert caller.run(segments.send, "worker1", MB, value, value + 1) == [value, value + 1]
    assert callee.run(segments.kept_values) == [1, 2]
    callee.run(segments.drop_kept)
    soon(lambda: callee.run(segments.mappings), 0, 15)


def test_a_result_that_is_kept_for_long_keeps_its_segment(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    caller.run(segments.fetch_to_keep, "worker1", MB, 1)
    caller.run(segments.hurry)
    soon(lambda: callee.run(segments.segment_counts), {"segments": 0, "out": 0, "idle": 0})
    assert caller.run(segments.fetch, "worker1", MB, *range(2, 20)) == list(range(2, 20))
    assert caller.run(segments.kept_values) == [1]


def test_tensors_outlive_the_job() -> None:
    with worker_processes(2) as cast:
        join(cast)
        introduce(*cast)
        cast[0].run(segments.send_to_keep, "worker1", MB, 1, 2)
        cast[1].run(segments.fetch_to_keep, "worker0", MB, 3)
        leave(cast)
        assert cast[1].run(segments.kept_values) == [1, 2, 3]
        join(cast)
        introduce(*cast)
        assert cast[0].run(segments.send, "worker1", MB, 7) == [7]
        assert cast[1].run(segments.kept_values) == [1, 2, 3]
        leave(cast)


# --- outliving ------------------------------------------------------------------------------------------------------


def test_tensors_outlive_the_process_that_sent_them() -> None:
    with worker_processes(3) as cast:
        join(cast)
        introduce(*cast)
        sender, receiver, third = cast
        sender.run(segments.send_to_keep, "worker1", MB, 1, 2)
        receiver.run(segments.fetch_to_keep, "worker0", 20 * MB, 3)
        sender.kill()
        receiver.wait_for_log("worker 'worker0' is lost")
        assert receiver.run(segments.kept_values) == [1, 2, 3]
        receiver.run(segments.hurry)
        assert third.run(segments.send, "worker1", MB, *range(10)) == list(range(10))
        soon(lambda: receiver.run(segments.mappings), 3, 15)  # what the tensors live on, and nothing else
        assert receiver.run(segments.kept_values) == [1, 2, 3]
        receiver.run(segments.drop_kept)
        soon(lambda: receiver.run(segments.mappings), 0)
        leave([receiver, third])


def test_segments_that_a_dead_receiver_had_are_let_go() -> None:
    with worker_processes(3) as cast:
        join(cast)
        introduce(*cast)
        sender, receiver, _ = cast
        sender.run(segments.send_to_keep, "worker1", MB, 1, 2, 3)
        assert sender.run(segments.segment_counts)["out"] == 3
        receiver.kill()
        soon(lambda: sender.run(segments.segment_counts), {"segments": 0, "out": 0, "idle": 0})
        assert sender.run(segments.send, "worker2", MB, 5) == [5]
        leave([cast[0], cast[2]])


# --- failure --------------------------------------------------------------------------------------------------------


def test_a_callee_that_cannot_map_a_segment_says_so_and_gives_it_back(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    callee.run(segments.refuse_mappings)
    with pytest.raises(WorkerLostError, match=r"worker 'worker0' took 1,048,576 bytes away: .*Cannot allocate memory"):
        caller.run(segments.send, "worker1", MB, 1, 2)
    soon(lambda: caller.run(segments.segment_counts), {"segments": 2, "out": 0, "idle": 2 * size_class(MB)})
    assert caller.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3, "the link is as good as before"
    callee.run(segments.allow_mappings)
    assert caller.run(segments.send, "worker1", MB, 3, 4) == [3, 4]


def test_a_caller_that_cannot_map_a_segment_says_so_and_gives_it_back(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    introduce(caller, callee)
    caller.run(segments.refuse_mappings)
    with pytest.raises(WorkerLostError, match=r"worker 'worker1' took 1,048,576 bytes away: .*Cannot allocate memory"):
        caller.run(segments.fetch, "worker1", MB, 1)
    soon(lambda: callee.run(segments.segment_counts), GIVEN_BACK)
    caller.run(segments.allow_mappings)
    assert caller.run(segments.fetch, "worker1", MB, 2) == [2]


def test_neither_side_collects_descriptors(pair: list[WorkerProcess]) -> None:
    introduce(*pair)
    pair[0].run(segments.send, "worker1", MB, *range(5))
    before = [_files(process) for process in pair]
    for _ in range(5):
        pair[0].run(segments.send, "worker1", MB, *range(5))
        pair[0].run(segments.fetch, "worker1", MB, *range(5))
    sender, receiver = ([name for name in _files(process) if "memfd" in name] for process in pair)
    assert 1 < len(sender) <= 12, "one for the proof, one for each segment that is out or waits"
    assert len(receiver) <= 12
    assert all(len(_files(process)) <= len(files) + 12 for process, files in zip(pair, before, strict=True))


def _files(process: WorkerProcess) -> list[str]:
    return list(process.run(remote_functions.descriptors).values())
