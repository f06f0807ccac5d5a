"""Autograd over real processes: the way of a gradient, death at every moment, and nothing left behind."""

from __future__ import annotations

import time

import pytest

from programs import gradients, remote_functions
from support import NOTHING
from worker_processes import WorkerProcess, join, leave, running_workers, worker_processes

MB = 1 << 20

# d/dx of sum(3x · w · 3x), and of that with a second factor w on the way, for w = 2
DIRECT = [36.0] * 4
THROUGH = [72.0] * 4


@pytest.mark.parametrize("options", [{}, {"transports": ("tcp",), "secret": "open sesame"}], ids=["unix", "tls"])
def test_gradients_come_back_through_three_processes(options: dict[str, object]) -> None:
    with running_workers(3, **options) as (first, second, third):
        assert first.run(gradients.gradient_of, "worker1")[0] == DIRECT
        assert first.run(gradients.gradient_of, "worker1", "worker2")[0] == THROUGH
        assert third.run(gradients.gradient_of, "worker2")[0] == DIRECT  # to itself
        for process in (first, second, third):
            assert process.run(gradients.left_over) == NOTHING


@pytest.mark.parametrize("via", ["", "worker2"], ids=["next to the root", "behind another worker"])
@pytest.mark.parametrize("moment", ["forward", "discovery", "backward"])
def test_a_worker_that_is_killed_ends_the_pass_at_once_and_nothing_else(moment: str, via: str) -> None:
    with worker_processes(4) as cast:
        join(cast)
        root, victim = cast[:2]
        survivors = [root, *cast[2:]]
        assert root.run(gradients.gradient_of, "worker1", via)[0] == (THROUGH if via else DIRECT)
        victim.run(gradients.die_at, moment)
        kind, text, seconds = root.run(gradients.outcome, "worker1", via)
        assert kind == "WorkerLostError"
        assert "'worker1'" in text
        assert seconds < 1.0
        victim.wait_dead()
        for process in survivors:
            assert process.run(gradients.left_over) == NOTHING
        assert root.run(gradients.gradient_of, "worker2", "worker3")[0] == THROUGH
        leave(survivors)


def test_a_worker_that_is_killed_while_a_context_is_dropped_harms_nobody() -> None:
    with worker_processes(3) as cast:
        join(cast)
        root, victim, third = cast
        victim.run(gradients.die_at, "clean-up")
        assert root.run(gradients.gradient_of, "worker1", "worker2")[0] == THROUGH
        victim.wait_dead()
        for process in (root, third):
            assert process.run(gradients.left_over) == NOTHING
        assert root.run(gradients.gradient_of, "worker2")[0] == DIRECT
        leave([root, third])


def test_when_the_root_is_killed_the_others_drop_its_contexts() -> None:
    with worker_processes(3) as cast:
        join(cast)
        root, second, third = cast
        second.run(gradients.die_at, "never")
        root.start(gradients.hold_a_context, ("worker1", "worker2"))
        for process in (second, third):
            assert process.run(gradients.wait_for_a_context)
        root.kill()
        for process in (second, third):
            assert process.run(gradients.left_over) == NOTHING
        assert second.run(gradients.gradient_of, "worker2")[0] == DIRECT
        leave([second, third])


def _measure(cast: list[WorkerProcess], warm_up: int, count: int) -> None:
    measured = cast[0].start(gradients.contexts_and_measure, ("worker1", "worker2"), warm_up, count).result(600)
    for name, (before, after) in measured.items():
        print(f"{name}: {(after[0] - before[0]) / MB:+.2f} MB, threads {before[1]} → {after[1]}, {after[2]} files")
        assert after[0] - before[0] < 5 * MB
        assert after[2] <= before[2]
    for process, (before, _) in zip(cast, measured.values(), strict=True):
        deadline = time.monotonic() + 30  # a thread of the pool that has nothing to do ends after ten seconds
        while process.run(remote_functions.resources)[1] > before[1]:
            assert time.monotonic() < deadline, "threads were left behind"
            time.sleep(0.5)
        assert process.run(gradients.left_over) == NOTHING
        assert process.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS


def test_five_hundred_contexts_leave_nothing_behind() -> None:
    with running_workers(3) as cast:
        _measure(cast, 200, 500)


@pytest.mark.stress
def test_ten_thousand_contexts_leave_nothing_behind() -> None:
    with running_workers(3) as cast:
        _measure(cast, 1_000, 10_000)
