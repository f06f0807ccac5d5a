"""Several passes at once, and passes that follow failed ones."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from support import PATIENCE, Gate, assert_nothing_left, eventually, in_thread, pass_through
from telegrad import autograd, rpc
from telegrad._wire.messages import EndPass
from telegrad.autograd.context import Registry
from telegrad.errors import WorkerLostError
from telegrad.testing import Cluster, cluster
from worker_processes import PROGRAMS, telegrad_run

WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def times_weight(tensor: Tensor) -> Tensor:
    return tensor * WEIGHT


# --- threads of one process -----------------------------------------------------------------------------------------


def test_threads_with_contexts_of_their_own() -> None:
    done = telegrad_run(2, PROGRAMS / "passes_in_threads.py")
    assert "all right" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


# --- two passes over one graph ------------------------------------------------------------------------------------


def test_two_passes_at_once_in_one_context(trio: Cluster) -> None:
    """In a new thread, where torch numbers nodes from 0, and so next to the gates."""
    in_thread(lambda: two_passes_at_once(trio))()


def two_passes_at_once(trio: Cluster) -> None:
    with trio.on("a"):
        _two_passes_at_once(trio)


def _two_passes_at_once(trio: Cluster) -> None:
    """The second begins while the first stands in a hook, with its gates in torch's queue."""
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    entered, go_on = threading.Event(), threading.Event()

    def pause(gradient: Tensor) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    with autograd.context() as context_id:
        shared = torch.tanh(leaf)
        results = [rpc.rpc_sync("b", times_weight, (shared,)) for _ in range(3)]
        top = shared * results[0] * results[1]
        top.register_hook(pause)

        def first() -> None:
            with trio.on("a"):
                autograd.backward(context_id, [top.sum()], retain_graph=True)

        join = in_thread(first)
        assert entered.wait(PATIENCE)
        autograd.backward(context_id, [(shared * results[0] * results[2]).sum()], retain_graph=True)
        go_on.set()
        join()
        found = autograd.get_gradients(context_id)[leaf]
    local = torch.tanh(leaf)
    (expected,) = torch.autograd.grad(2 * (local * (local * WEIGHT) ** 2).sum(), [leaf])
    torch.testing.assert_close(found, expected)


# --- after a failed pass ------------------------------------------------------------------------------------------


def refuse(gradient: Tensor) -> None:
    raise ValueError("the hook refuses")


def with_bad_hook(tensor: Tensor) -> Tensor:
    tensor.register_hook(refuse)
    return tensor * 1.0


def around_a_bad_call(tensor: Tensor) -> Tensor:
    """Runs on c: sources meet there, so that a pass waits at a gate for what b will not send."""
    shared = torch.tanh(tensor * WEIGHT)
    return shared * rpc.rpc_sync("b", with_bad_hook, (shared,))


def through_c(tensor: Tensor) -> Tensor:
    """Runs on b, so that only b tells c of the end of a pass."""
    return rpc.rpc_sync("c", around_a_bad_call, (tensor * 1.0,))


def test_a_pass_that_overtakes_the_end_of_a_failed_one_ends_it(trio: Cluster) -> None:
    fault = trio.fault("delay", EndPass, sender="b", receiver="c", seconds=0.5)
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        bad = rpc.rpc_sync("b", through_c, (leaf,)).sum()
        good = rpc.rpc_sync("c", times_weight, (leaf,)).sum()
        with pytest.raises(ValueError, match="the hook refuses"):
            autograd.backward(context_id, [bad], retain_graph=True)
        autograd.backward(context_id, [good], retain_graph=True)
        assert autograd.get_gradients(context_id)[leaf].tolist() == [2.0, 3.0]
        assert fault.hits == 1
    assert_nothing_left(trio)


# --- contexts that nobody would end -------------------------------------------------------------------------------


def by_c(tensor: Tensor, gate: Gate) -> Tensor:
    """Runs on b."""
    call = rpc.rpc_async("c", times_weight, (tensor * 1.0,))
    gate.pass_through()
    return call.wait()


def test_a_call_of_a_lost_worker_that_waited_in_the_queue_makes_no_context() -> None:
    with cluster("a", "b", "c", graceful=False, threads=1, timeout=PATIENCE) as workers, workers.on("a"):
        busy, sent = Gate(), Gate()
        waits = rpc.rpc_async("c", pass_through, (busy,))
        busy.wait_entered()
        with autograd.context():
            call = rpc.rpc_async("b", by_c, (torch.ones(2, requires_grad=True), sent))
            sent.wait_entered()
            assert eventually(lambda: "1 calls and 0 messages queued" in repr(workers["c"].agent.plane))
            workers.kill("b")
            sent.open()
            assert eventually(lambda: not workers["c"].agent.peer("b").links)
            busy.open()
            waits.wait()
            with pytest.raises(WorkerLostError):
                call.wait()
        assert_nothing_left(workers)


def test_a_message_that_goes_out_while_its_context_ends_leaves_nothing_behind(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks whether it has ended has said before whom it tells."""
    entered = autograd.context()
    context_id = entered.__enter__()
    context = trio["a"].autograd.registry.find(context_id)
    assert context is not None
    told = context.workers

    class Slow(set[int]):
        def add(self, worker: int) -> None:
            trio["a"].autograd.drop(context_id)  # another thread leaves the context just now
            super().add(worker)

    context.workers = Slow(told)
    rpc.rpc_sync("b", times_weight, (torch.ones(2, requires_grad=True),))
    entered.__exit__(None, None, None)
    assert_nothing_left(trio)


def test_a_late_message_does_not_bring_back_a_context_whose_end_its_sender_told() -> None:
    """Two workers told this one of the context; the message of the second waits for a thread while the context ends."""
    registry, context_id = Registry(0), 1 << 48 | 5
    assert registry.join(context_id, sender=2) is not None
    assert registry.drop(context_id, by=3) is None, "only the creator and the worker that told of it first may end it"
    assert registry.find(context_id) is not None
    assert registry.drop(context_id, by=2) is not None
    assert registry.join(context_id, sender=3) is None
    assert registry.join(context_id, sender=2) is None
    assert registry.join(context_id, sender=0) is None, "a call of this worker to itself waited too"
    assert registry.find(context_id) is None
