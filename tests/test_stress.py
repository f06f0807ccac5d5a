"""Long runs and big numbers.  ``make stress`` runs them; the ordinary test run does not."""

from __future__ import annotations

import time

import psutil
import pytest

from programs import deeds, segments
from puppets import join, leave, puppets, troupe

pytestmark = pytest.mark.stress

MB = 1 << 20
GB = 1 << 30


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)], ids=["unix", "tcp"])
def test_a_hundred_thousand_calls_leave_nothing_behind(transports: tuple[str, ...]) -> None:
    with troupe(2, transports=transports, secret="a secret of this test") as cast:
        start = time.monotonic()
        measured = cast[0].start(deeds.call_and_measure, "worker1", 10_000, 100_000).result(600)
        print(f"{time.monotonic() - start:.1f} s for 110,000 calls")
        for side, (before, after) in measured.items():
            grown = after[0] - before[0]
            print(f"{side}: {grown / MB:+.2f} MB, threads {before[1]} → {after[1]}, files {before[2]} → {after[2]}")
            assert grown < 5 * MB
            assert after[2] <= before[2]
        for puppet, (before, _) in zip(cast, measured.values(), strict=True):
            deadline = time.monotonic() + 30  # a thread of the pool that has nothing to do ends after ten seconds
            while puppet.run(deeds.resources)[1] > before[1]:
                assert time.monotonic() < deadline, "threads were left behind"
                time.sleep(0.5)
        for puppet in cast:
            assert puppet.run(deeds.leftovers) == deeds.NO_LEFTOVERS


def test_thirty_two_processes_call_each_other_again_and_again() -> None:
    with puppets(32) as cast:
        start = time.monotonic()
        join(cast, timeout=120)
        joined = time.monotonic()
        names = [f"worker{rank}" for rank in range(32)]
        for one in [puppet.start(deeds.call_all, names, 10) for puppet in cast]:
            assert one.result(120) == 320
        called = time.monotonic()
        leave(cast, 120)
        ended = time.monotonic()
        print(f"joined in {joined - start:.1f} s, called in {called - joined:.1f} s, left in {ended - called:.1f} s")


@pytest.mark.parametrize("way", ["lane", "unix socket", "tcp"])
def test_a_message_of_more_than_four_gigabytes(way: str) -> None:
    if psutil.virtual_memory().available < 15 * GB:
        pytest.skip(
            "needs 15 GB of free memory: the message on both sides, or in a segment, and what is kept of the last"
        )
    with puppets(2) as cast:
        if way != "lane":
            for puppet in cast:
                puppet.run(deeds.close_lanes)
        join(cast, transports=("tcp",) if way == "tcp" else ("unix",), secret="a secret of this test")
        there, back = cast[0].start(deeds.big_message, "worker1", 4 * GB + 12345).result(300)
        print(f"4 GiB by {way}: {there:.1f} s there, {back:.1f} s back")
        leave(cast)


def test_a_minute_of_everything_at_once() -> None:
    with troupe(4, rpc_timeout=30) as cast:
        pending = [puppet.start(deeds.soak, rank, 4, 60.0, seed=rank) for rank, puppet in enumerate(cast)]
        for rank, one in enumerate(pending):
            print(rank, one.result(180))
        for puppet in cast:
            assert puppet.run(deeds.leftovers) == deeds.NO_LEFTOVERS
            assert "Traceback" not in puppet.log(), puppet.log()
            assert "lost" not in puppet.log(), puppet.log()


def test_half_a_minute_of_tensors_that_come_go_and_stay() -> None:
    with troupe(3, rpc_timeout=30) as cast:
        for puppet in cast:
            puppet.run(segments.hurry, 0.5, 0.5)
        for rank, one in enumerate([puppet.start(segments.trade, 3, 30.0, seed) for seed, puppet in enumerate(cast)]):
            print(rank, one.result(120))
        for puppet in cast:
            assert puppet.run(deeds.leftovers) == deeds.NO_LEFTOVERS
            assert "Traceback" not in puppet.log(), puppet.log()
            deadline = time.monotonic() + 30
            while (left := puppet.run(segments.mappings)) > 0:
                assert time.monotonic() < deadline, f"{left} mappings of segments were left behind"
                time.sleep(0.5)
