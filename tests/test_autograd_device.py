"""Autograd on a device, whose nodes torch's engine runs on a thread of its own.  The device is simulated in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from programs import device, gradients
from support import NOTHING, both_modes
from worker_processes import WorkerProcess, join, leave, worker_processes


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    with worker_processes(3) as cast:
        for process in cast:
            process.run(device.register)
        join(cast, device_maps={f"worker{n}": {device.DEVICE: device.DEVICE} for n in range(3)}, rpc_timeout=20.0)
        yield cast
        for process in cast:
            assert process.run(gradients.left_over) == NOTHING
        leave(cast)


@both_modes
@pytest.mark.parametrize("program", ["one_call", "chain", "fan_out", "around_on_the_cpu"])
def test_gradients_on_a_device_equal_local_ones(workers: list[WorkerProcess], program: str, mode: str) -> None:
    expected, found, where = workers[0].run(device.compare, program, mode)
    assert found == pytest.approx(expected)
    assert where == device.DEVICE
    assert workers[1].run(device.ran_on_threads_of_the_engine), "or this tests nothing"


@both_modes
def test_a_unit_on_a_device_that_must_wait_for_a_gradient_is_refused(workers: list[WorkerProcess], mode: str) -> None:
    text = workers[0].run(device.refused, device.compare, "around", mode)
    assert re.search(r"^\w+Backward0? runs on a device, in a part of the graph that must wait for gradients", text)
    assert "to worker 'worker1' (float32[4] of MulBackward0)" in text
    assert "Call .cpu() on that tensor first" in text


@both_modes
def test_second_derivatives_on_a_device_are_refused_and_not_wrong(workers: list[WorkerProcess], mode: str) -> None:
    """A gradient that leaves on the device's thread is recorded, too, and its backward needs a gate."""
    text = workers[0].run(device.refused, device.second_order, "", mode)
    assert "runs on a device, in a part of the graph that must wait" in text
