"""Long runs and big numbers.  ``make stress`` runs them; the ordinary test run does not."""

from __future__ import annotations

import time

import psutil
import pytest

from programs import remote_functions, segments
from worker_processes import join, leave, running_workers, worker_processes

pytestmark = pytest.mark.stress

MB = 1 << 20
GB = 1 << 30


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)], ids=["unix", "tcp"])
def test_a_hundred_thousand_calls_leave_nothing_behind(transports: tuple[str, ...]) -> None:
    with running_workers(2, transports=transports, secret="a secret of this test") as cast:
        start = time.monotonic()
        measured = cast[0].start(remote_functions.call_and_measure, "worker1", 10_000, 100_000).result(600)
        print(f"{time.monotonic() - start:.1f} s for 110,000 calls")
        for side, (before, after) in measured.items():
            grown = after[0] - before[0]
            print(f"{side}: {grown / MB:+.2f} MB, threads {before[1]} → {after[1]}, files {before[2]} → {after[2]}")
            assert grown < 5 * MB
            assert after[2] <= before[2]
        for process, (before, _) in zip(cast, measured.values(), strict=True):
            deadline = time.monotonic() + 30  # a thread of the pool that has nothing to do ends after ten seconds
            while process.run(remote_functions.resources)[1] > before[1]:
                assert time.monotonic() < deadline, "threads were left behind"
                time.sleep(0.5)
        for process in cast:
            assert process.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS


def test_thirty_two_processes_call_each_other_again_and_again() -> None:
    with worker_processes(32) as cast:
        start = time.monotonic()
        join(cast, timeout=120)
        joined = time.monotonic()
        names = [f"worker{rank}" for rank in range(32)]
        for one in [process.start(remote_functions.call_all, names, 10) for process in cast]:
            assert one.result(120) == 320
        called = time.monotonic()
        leave(cast, 120)
        ended = time.monotonic()
        print(f"joined in {joined - start:.1f} s, called in {called - joined:.1f} s, left in {ended - called:.1f} s")


@pytest.mark.parametrize("way", ["shared memory", "unix socket", "tcp"])
def test_a_message_of_more_than_four_gigabytes(way: str) -> None:
    if psutil.virtual_memory().available < 15 * GB:
        pytest.skip(
            "needs 15 GB of free memory: the message on both sides, or in a segment, and what is kept of the last"
        )
    with worker_processes(2) as cast:
        if way != "shared memory":
            for process in cast:
                process.run(remote_functions.forbid_shared_memory)
        join(cast, transports=("tcp",) if way == "tcp" else ("unix",), secret="a secret of this test")
        there, back = cast[0].start(remote_functions.big_message, "worker1", 4 * GB + 12345).result(300)
        print(f"4 GiB by {way}: {there:.1f} s there, {back:.1f} s back")
        leave(cast)


def test_a_minute_of_everything_at_once() -> None:
    with running_workers(4, rpc_timeout=30) as cast:
        pending = [process.start(remote_functions.soak, rank, 4, 60.0, seed=rank) for rank, process in enumerate(cast)]
        for rank, one in enumerate(pending):
            print(rank, one.result(180))
        for process in cast:
            assert process.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS
            assert "Traceback" not in process.log(), process.log()
            assert "lost" not in process.log(), process.log()


def test_half_a_minute_of_tensors_that_come_go_and_stay() -> None:
    with running_workers(3, rpc_timeout=30) as cast:
        for process in cast:
            process.run(segments.hurry, 0.5, 0.5)
        for rank, one in enumerate([process.start(segments.trade, 3, 30.0, seed) for seed, process in enumerate(cast)]):
            print(rank, one.result(120))
        for process in cast:
            assert process.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS
            assert "Traceback" not in process.log(), process.log()
            deadline = time.monotonic() + 30
            while (left := process.run(segments.mappings)) > 0:
                assert time.monotonic() < deadline, f"{left} mappings of segments were left behind"
                time.sleep(0.5)
