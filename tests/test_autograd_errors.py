"""What can go wrong with gradients: bad input, errors of users, deadlines, lost workers, lost messages.

Whatever it is, it comes out of ``backward`` soon and says what happened; nothing stays behind, and the next context
works.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support import (
    AT_ONCE,
    NOTHING,
    Gate,
    assert_nothing_left,
    eventually,
    in_thread,
    known_on,
)
from telegrad import autograd, rpc
from telegrad._wire.frames import Frame
from telegrad._wire.messages import (
    Discover,
    DropContext,
    EndPass,
    Explored,
    Finished,
    Gradients,
    PassFailed,
    PlanKnown,
    PlanWanted,
    TellMe,
)
from telegrad.errors import RpcTimeoutError, TelegradError, UsageError, WorkerLostError
from telegrad.testing import Cluster


def assert_no_pass_runs(workers: Cluster) -> None:
    """The pass was ended on every worker, though the context goes on."""
    for worker in workers:
        if not worker.closed:
            assert eventually(lambda name=worker.name: known_on(workers, name)["passes"] == []), worker.name


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def relay(to: str, tensor: Tensor) -> Tensor:
    """The two sends of this worker meet."""
    shared = tensor * 3
    return rpc.rpc_sync(to, double, (shared,)) + shared


def meeting_sources(one: str = "b", other: str = "c") -> Tensor:
    """Every kind of message but those of failure: both sides need the plan, and the wave comes back to its parent."""
    x = leaf()
    with autograd.context() as context_id:
        shared = x * 1
        there = rpc.rpc_sync(one, relay, (other, shared))
        again = rpc.rpc_sync(one, relay, (other, there * shared.detach()))
        autograd.backward(context_id, [(again + there + shared).sum()])
        gradient = autograd.get_gradients(context_id)[x]
    assert gradient.tolist() == [9.0 * 9.0 * n + 10.0 for n in (1.0, 2.0, 3.0)]
    return gradient


def far_source() -> None:
    """Only b needs the plan, so it asks for it."""
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", relay, ("c", x)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [9.0] * 3


# --- bad input --------------------------------------------------------------------------------------------------


def test_no_such_context(trio: Cluster) -> None:
    for use in (lambda number: autograd.backward(number, [leaf().sum()]), autograd.get_gradients):
        with pytest.raises(UsageError, match=r"no context 5: it has ended, or never was.*inside its `with` block"):
            use(5)
        with pytest.raises(UsageError, match="a context is named by the number"):
            use("5")
        with pytest.raises(UsageError, match="a context is named by the number"):
            use(None)


@pytest.mark.parametrize("number", [-1, 99 << 48, 1 << 80])
def test_a_number_that_no_worker_of_this_job_can_have_made(trio: Cluster, number: int) -> None:
    with pytest.raises(UsageError, match=f"no context {number}"):
        autograd.get_gradients(number)


def test_a_context_that_has_ended(trio: Cluster) -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("b", double, (leaf(),))
    with pytest.raises(UsageError, match=f"no context {context_id}: it has ended"):
        autograd.backward(context_id, [leaf().sum()])
    with pytest.raises(UsageError, match=f"no context {context_id}: it has ended"):
        autograd.get_gradients(context_id)
    assert_nothing_left(trio)
    with trio.on("b"), pytest.raises(UsageError, match=f"no context {context_id}: it has ended"):
        autograd.get_gradients(context_id)


def test_a_context_of_another_worker(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with trio.on("b"), pytest.raises(UsageError, match=f"no context {context_id} here: worker 'a' made it"):
            autograd.get_gradients(context_id)


def test_contexts_do_not_nest(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match=f"already in context {context_id}: contexts do not nest"):
            autograd.context().__enter__()
        with pytest.raises(UsageError, match="contexts do not nest"):
            rpc.rpc_sync("b", enter_a_context)
        assert known_on(trio, "a")["contexts"] == [repr(next(iter(trio["a"].autograd.registry)))]
        rpc.rpc_sync("b", double, (leaf(),))  # still in the outer one
        assert known_on(trio, "a")["sends"] == 1
    with autograd.context():
        pass


def enter_a_context() -> None:
    with autograd.context():
        pass


def test_roots_must_be_a_list_of_something(trio: Cluster) -> None:
    with autograd.context() as context_id:
        for roots in (leaf().sum(), rpc.RRef(leaf().sum()), None, {leaf().sum()}, iter([leaf().sum()])):
            with pytest.raises(UsageError, match=r"takes a list of roots, not .*backward\(context_id, \[loss\]\)"):
                autograd.backward(context_id, roots)
        for empty in ([], ()):
            with pytest.raises(UsageError, match="given no roots"):
                autograd.backward(context_id, empty)


def test_a_root_must_be_a_tensor(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="root 1 is a str, not a tensor or an RRef to one"):
            autograd.backward(context_id, [leaf().sum(), "loss"])
        with pytest.raises(UsageError, match="root 0 is a str"):
            autograd.backward(context_id, [rpc.remote("b", str, (5,))])
        with pytest.raises(UsageError, match="its value is a str, not a tensor"):
            rpc.remote("b", str, (5,)).backward(context_id)


def test_a_root_must_need_a_gradient(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="root 0 needs no gradient"):
            autograd.backward(context_id, [torch.ones(())])
        with pytest.raises(UsageError, match="root 1 needs no gradient"):
            autograd.backward(context_id, [leaf().sum(), rpc.rpc_sync("b", double, (torch.ones(()),))])
        with torch.no_grad():
            loss = leaf().sum()
        with pytest.raises(UsageError, match="inside no_grad"):
            autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id) == {}


def test_a_root_must_be_a_scalar_or_have_a_gradient_of_its_shape(trio: Cluster) -> None:
    with autograd.context() as context_id:
        root = rpc.rpc_sync("b", double, (leaf(),))
        with pytest.raises(UsageError, match=r"root 0 has shape \[3\]: backward needs a scalar, or grad_tensors"):
            autograd.backward(context_id, [root])
        with pytest.raises(UsageError, match=r"root 1 has shape \[3\]"):
            autograd.backward(context_id, [root, root], grad_tensors=[torch.ones(3), None])
        with pytest.raises(UsageError, match=r"root 0 has shape \[3\], but its grad_tensor \[2\]"):
            autograd.backward(context_id, [root], grad_tensors=[torch.ones(2)])
        with pytest.raises(UsageError, match="its grad_tensor list"):
            autograd.backward(context_id, [root], grad_tensors=[[1.0, 1.0, 1.0]])
        with pytest.raises(UsageError, match="1 roots, but 2 grad_tensors"):
            autograd.backward(context_id, [root], grad_tensors=[torch.ones(3)] * 2)
        with pytest.raises(UsageError, match="1 roots, but 0 grad_tensors"):
            autograd.backward(context_id, [root], grad_tensors=[])


def test_a_complex_root_needs_a_gradient_as_it_does_locally(trio: Cluster) -> None:
    root = (leaf() * 1j).sum()
    with pytest.raises(RuntimeError, match="real scalar"):
        root.backward(retain_graph=True)
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="root 0"):
            autograd.backward(context_id, [root])


def test_a_mode_that_is_none(trio: Cluster) -> None:
    with autograd.context() as context_id:
        for mode in ("SMART", "", None, 1):
            with pytest.raises(UsageError, match="mode is 'smart' or 'fast', not "):
                autograd.backward(context_id, [leaf().sum()], mode=mode)


def test_a_timeout_that_is_none(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="a timeout is a number of seconds"):
            autograd.backward(context_id, [leaf().sum()], timeout=-3)


def plain_backward(tensor: Tensor) -> None:
    double(tensor).sum().backward()


def test_a_plain_backward_through_a_received_tensor_says_what_to_call(trio: Cluster) -> None:
    with autograd.context() as context_id:
        advice = re.escape(f"telegrad.autograd.backward({context_id}, [loss])")
        with pytest.raises(UsageError, match=advice):
            rpc.rpc_sync("b", double, (leaf(),)).sum().backward()
        with pytest.raises(UsageError, match=advice):
            plain_backward(rpc.rpc_sync("b", double, (leaf(),)))
        with pytest.raises(UsageError, match=f"(?s){advice}.*on worker 'b'"):
            rpc.rpc_sync("b", plain_backward, (leaf(),))


@pytest.mark.parametrize("where", ["here", "over there"])
def test_a_second_backward_without_retain_graph(trio: Cluster, where: str) -> None:
    with autograd.context() as context_id:
        tensor = leaf()
        loss = rpc.rpc_sync("b", torch.exp, (tensor,)).sum() if where == "over there" else tensor.exp().sum()
        autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time") as caught:
            autograd.backward(context_id, [loss])
        assert ("on worker 'b'" in str(caught.value)) == (where == "over there")
        assert_no_pass_runs(trio)
    meeting_sources()


# --- errors of users --------------------------------------------------------------------------------------------


class OddError(Exception):
    """Cannot be made from its text, and holds something that cannot be sent."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one, other)
        self.lock = threading.Lock()


def bad_hook(gradient: Tensor) -> None:
    raise ZeroDivisionError("no gradient today")


def odd_hook(gradient: Tensor) -> None:
    raise OddError(1, 2)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return bad_hook(gradient)


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ones(17)


def bad_after_accumulation(tensor: Tensor) -> Tensor:
    own = leaf()
    own.register_post_accumulate_grad_hook(bad_hook)
    return tensor * own


def with_hook(hook: Any, tensor: Tensor) -> Tensor:
    result = tensor * 2
    result.register_hook(hook)
    return result


def bad_function(kind: str, tensor: Tensor) -> Tensor:
    match kind:
        case "hook":
            return with_hook(bad_hook, tensor)
        case "hook of a received tensor":
            tensor.register_hook(bad_hook)
            return tensor * 2
        case "custom backward":
            return BadBackward.apply(tensor)
        case _:
            return bad_after_accumulation(tensor)


def bad_relay(kind: str, to: str, tensor: Tensor) -> Tensor:
    shared = tensor * 3
    return rpc.rpc_sync(to, bad_function, (kind, shared)) + shared


KINDS = ["hook", "hook of a received tensor", "custom backward", "hook after accumulation"]


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("far", [False, True], ids=["next to the root", "behind another worker"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_over_there_comes_out_of_backward(trio: Cluster, kind: str, far: bool, mode: Any) -> None:
    with autograd.context() as context_id:
        shared = leaf() * 1
        if far:
            result = rpc.rpc_sync("b", bad_relay, (kind, "c", shared))
        else:
            result = rpc.rpc_sync("b", bad_function, (kind, shared))
        loss = (result + rpc.rpc_sync("c", double, (shared,)) + shared).sum()
        start = time.monotonic()
        with pytest.raises(ZeroDivisionError, match="no gradient today") as caught:
            autograd.backward(context_id, [loss], mode=mode)
        assert time.monotonic() - start < AT_ONCE
        text = str(caught.value)
        assert f"This was raised on worker {'c' if far else 'b'!r}:" in text
        assert "in bad_hook" in text
        assert 'raise ZeroDivisionError("no gradient today")' in text
        assert_no_pass_runs(trio)
    assert_nothing_left(trio)
    meeting_sources()


def test_an_error_here_comes_out_of_backward_with_its_own_traceback(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = with_hook(bad_hook, rpc.rpc_sync("b", double, (leaf(),))).sum()
        with pytest.raises(ZeroDivisionError, match=r"^no gradient today$") as caught:
            autograd.backward(context_id, [loss])
        story = "".join(traceback.format_exception(caught.value))
        assert "in bad_hook" in story
        assert_no_pass_runs(trio)
    meeting_sources()


def test_an_error_that_cannot_be_rebuilt_still_comes_out(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", with_hook, (odd_hook, leaf())).sum()
        with pytest.raises(Exception, match=r"(?s)\(1, 2\).*on worker 'b'.*in odd_hook"):
            autograd.backward(context_id, [loss])
    meeting_sources()


def test_a_gradient_of_the_wrong_shape(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", WrongShape.apply, (leaf(),)).sum()
        with pytest.raises(RuntimeError, match=r"(?s)invalid gradient at index 0.*on worker 'b'"):
            autograd.backward(context_id, [loss])
    meeting_sources()


def test_errors_on_several_workers_at_once(trio: Cluster) -> None:
    for _ in range(3):
        with autograd.context() as context_id:
            shared = leaf() * 1
            loss = sum(rpc.rpc_sync(to, with_hook, (bad_hook, shared)).sum() for to in "bcbc") + shared.sum()
            with pytest.raises(ZeroDivisionError, match=r"on worker '[bc]'"):
                autograd.backward(context_id, [loss])
        assert_nothing_left(trio)
    meeting_sources()


def test_an_error_of_one_pass_leaves_another_alone(trio: Cluster) -> None:
    gate = Gate()

    def slow() -> list[float]:
        x = leaf()
        with trio.on("a"), autograd.context() as context_id:
            loss = rpc.rpc_sync("b", with_hook, (GateHook(gate), x)).sum()
            autograd.backward(context_id, [loss])
            return autograd.get_gradients(context_id)[x].tolist()

    join = in_thread(slow)
    gate.wait_entered()
    with autograd.context() as context_id:
        with pytest.raises(ZeroDivisionError):
            autograd.backward(context_id, [rpc.rpc_sync("b", with_hook, (bad_hook, leaf())).sum()])
    gate.open()
    assert join() == [2.0] * 3


class GateHook:
    """A hook that waits until the test lets it go on."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __call__(self, gradient: Tensor) -> None:
        self.gate.pass_through()


# --- deadlines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meets", [False, True], ids=["the root waits", "the root is blocked at a send"])
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_deadline_says_what_came_what_is_missing_and_from_whom(trio: Cluster, mode: Any, meets: bool) -> None:
    gate = Gate()
    with autograd.context() as context_id:
        shared = leaf() * 1
        result = rpc.rpc_sync("b", with_hook, (GateHook(gate), shared))
        loss = (result + shared).sum() if meets else result.sum()
        start = time.monotonic()
        with pytest.raises(RpcTimeoutError, match=r"backward did not end within 0\.3 s") as caught:
            autograd.backward(context_id, [loss], timeout=0.3, mode=mode)
        assert 0.3 <= time.monotonic() - start < 0.3 + AT_ONCE
        text = str(caught.value)
        here, there = text.split("Worker 'b': ")
        assert re.search(rf"This worker: <Pass 0:\d+ in context {context_id}: ", here)
        assert "came: ['the roots']" in here
        if meets or mode == "fast":
            assert re.search(r"missing: \[.message \d+ to worker 'b' \(float32\[3\] of MulBackward0\)", here)
        else:
            assert "waits for [1]" in here
        assert re.search(rf"<Pass 0:\d+ in context {context_id}: 1 active; .*'runs'", there)
        assert re.search(r"came: \[.message \d+ to worker 'a'", there)
        gate.open()
        assert_no_pass_runs(trio)
    assert_nothing_left(trio)
    meeting_sources()


def test_a_deadline_in_the_wave(trio: Cluster) -> None:
    trio.fault("stall", Explored)
    with autograd.context() as context_id:
        shared = leaf() * 1
        loss = (rpc.rpc_sync("b", double, (shared,)) + shared).sum()
        with pytest.raises(RpcTimeoutError, match=r"waits for the plan.*wave: waits for \[1\]"):
            autograd.backward(context_id, [loss], timeout=0.1)
    trio.faults.clear()
    assert_nothing_left(trio)
    meeting_sources()


def test_without_a_timeout_a_pass_takes_as_long_as_it_takes(trio: Cluster) -> None:
    fault = trio.fault("delay", Gradients, count=1, seconds=0.15)
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", double, (x,)).sum()], timeout=0)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3
    assert fault.hits == 1


@pytest.mark.parametrize(("sender", "receiver"), [("a", "b"), ("b", "a")])
def test_a_late_gradient_of_a_pass_that_failed_changes_nothing(trio: Cluster, sender: str, receiver: str) -> None:
    """The first backward times out, the second works, and then what belonged to the first arrives."""
    gate = Gate()
    first = 2  # the number of the pass that fails
    late: list[Callable[[], None]] = []

    def hold(link: Any, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Gradients)
        if message.head.pass_id[1] == first and trio[link.peer_id].name == sender and not late:
            late.append(lambda: handle(link, frame))
            gate.entered.set()
        else:
            handle(link, frame)

    x = leaf()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", double, (x * 1,)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        handle = trio[receiver].agent.on_request(Gradients, hold)
        assert handle is not None
        with pytest.raises(RpcTimeoutError):
            autograd.backward(context_id, [loss], retain_graph=True, timeout=0.05)
        gate.wait_entered()
        autograd.backward(context_id, [loss], retain_graph=True)
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0] * 3
        with trio.on(receiver):
            late[0]()
        for worker in trio:
            assert eventually(lambda worker=worker: not worker.agent.plane.unfinished)
        assert known_on(trio, "a")["passes"] == []
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0] * 3


# --- lost workers -----------------------------------------------------------------------------------------------


def wait_here(gate: Gate, tensor: Tensor) -> Tensor:
    gate.pass_through()
    return tensor * 2


def gate_relay(gate: Gate, to: str, tensor: Tensor) -> Tensor:
    shared = tensor * 3
    return rpc.rpc_sync(to, with_hook, (GateHook(gate), shared)) + shared


def assert_lost(
    workers: Cluster,
    victim: str,
    program: Callable[[int], None],
    gate: Gate,
    ready: Callable[[], object] | None = None,
) -> None:
    """Runs a program in a context of worker a, kills another when it has come to the gate, and sees what happens."""

    def run() -> tuple[BaseException | None, float]:
        with workers.on("a"), autograd.context() as context_id:
            try:
                program(context_id)
            except TelegradError as error:
                return error, time.monotonic()
            return None, time.monotonic()

    join = in_thread(run)
    (ready or gate.wait_entered)()
    start = time.monotonic()
    killed = in_thread(lambda: workers.kill(victim))
    error, end = join()
    assert isinstance(error, WorkerLostError), error
    assert f"worker {victim!r}" in str(error)
    assert end - start < 1.0  # seconds within which all must hear of a lost worker
    assert_nothing_left(workers)
    gate.open()
    killed()


def next_context_works(workers: Cluster, *survivors: str) -> None:
    with workers.on(survivors[0]):
        for to in survivors[1:]:
            x = leaf()
            with autograd.context() as context_id:
                shared = x * 1
                autograd.backward(context_id, [(rpc.rpc_sync(to, double, (shared,)) + shared).sum()])
                assert autograd.get_gradients(context_id)[x].tolist() == [3.0] * 3
    assert_nothing_left(workers)


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("far", [False, True], ids=["next to the root", "behind another worker"])
@pytest.mark.parametrize("meets", [False, True], ids=["the root waits", "the root is blocked at a send"])
def test_a_worker_is_lost_in_the_backward(trio: Cluster, meets: bool, far: bool, mode: Any) -> None:
    gate = Gate()

    def program(context_id: int) -> None:
        shared = leaf() * 1
        if far:
            result = rpc.rpc_sync("b", gate_relay, (gate, "c", shared))
        else:
            result = rpc.rpc_sync("b", with_hook, (GateHook(gate), shared))
        autograd.backward(context_id, [(result + shared).sum() if meets else result.sum()], mode=mode)

    assert_lost(trio, "c" if far else "b", program, gate)
    next_context_works(trio, "a", "b" if far else "c")


@pytest.mark.parametrize("message", [Discover, Explored, PlanKnown, PlanWanted], ids=lambda kind: kind.__name__)
def test_a_worker_is_lost_in_the_discovery(trio: Cluster, message: type) -> None:
    """The message is on its way to or from b when b is lost."""
    far = message in (PlanKnown, PlanWanted)
    fault = trio.fault("stall", message, sender="b" if message in (Explored, PlanWanted) else None)

    def program(context_id: int) -> None:
        shared = leaf() * 1
        result = rpc.rpc_sync("b", relay, ("c", shared))
        autograd.backward(context_id, [result.sum() if far else (result + shared).sum()])

    assert_lost(trio, "b", program, Gate(), lambda: eventually(lambda: fault.hits > 0))
    trio.faults.clear()
    next_context_works(trio, "a", "c")


def test_a_worker_is_lost_in_the_forward(trio: Cluster) -> None:
    gate = Gate()

    def program(context_id: int) -> None:
        shared = leaf() * 1
        rpc.rpc_sync("c", double, (shared,))
        rpc.rpc_sync("b", wait_here, (gate, shared))

    assert_lost(trio, "b", program, gate)
    next_context_works(trio, "a", "c")


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_is_lost_between_forward_and_backward(trio: Cluster, victim: str, mode: Any) -> None:
    ready = Gate()

    def program(context_id: int) -> None:
        shared = leaf() * 1
        loss = (rpc.rpc_sync("b", relay, ("c", shared)) + shared).sum()
        ready.entered.set()
        assert eventually(lambda: trio[victim].closed)
        autograd.backward(context_id, [loss], mode=mode)

    assert_lost(trio, victim, program, ready)
    next_context_works(trio, "a", "c" if victim == "b" else "b")


def test_a_worker_that_has_nothing_to_do_with_a_pass_may_be_lost(trio: Cluster) -> None:
    gate = Gate()
    x = leaf()

    def program() -> list[float]:
        with trio.on("a"), autograd.context() as context_id:
            rpc.rpc_sync("c", double, (torch.ones(3),))
            shared = x * 1
            result = rpc.rpc_sync("b", with_hook, (GateHook(gate), shared))
            autograd.backward(context_id, [(result + shared).sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    join = in_thread(program)
    gate.wait_entered()
    trio.kill("c")
    gate.open()
    assert join() == [3.0] * 3
    next_context_works(trio, "a", "b")


@pytest.mark.parametrize("far", [False, True], ids=["next to the root", "behind another worker"])
def test_the_root_is_lost_in_the_backward(trio: Cluster, far: bool) -> None:
    gate = Gate()

    def program() -> None:
        with trio.on("a"), autograd.context() as context_id:
            shared = leaf() * 1
            if far:
                result = rpc.rpc_sync("b", gate_relay, (gate, "c", shared))
            else:
                result = rpc.rpc_sync("b", with_hook, (GateHook(gate), shared))
            autograd.backward(context_id, [(result + shared).sum()], timeout=0.4)

    join = in_thread(program)
    gate.wait_entered()
    killed = in_thread(lambda: trio.kill("a"))
    for worker in "bc":
        assert eventually(lambda worker=worker: known_on(trio, worker) == NOTHING, AT_ONCE), known_on(trio, worker)
    gate.open()
    with pytest.raises(TelegradError):
        join()
    killed()
    next_context_works(trio, "b", "c")


@pytest.mark.parametrize("late", [False, True])
def test_who_told_a_worker_of_a_context_is_lost(trio: Cluster, late: bool) -> None:
    """c heard of the context from b only; when b is lost, it asks the creator to tell it of the end."""
    fault = trio.fault("delay", TellMe, count=2, seconds=0.05) if late else None
    with autograd.context():
        rpc.rpc_sync("b", relay, ("c", leaf()))
        trio.kill("b")
        assert eventually(lambda: fault is None or fault.hits > 0)
        assert len(known_on(trio, "c")["contexts"]) == 1
    assert_nothing_left(trio)
    next_context_works(trio, "a", "c")


# --- faults of the network --------------------------------------------------------------------------------------

INTERNAL = [Gradients, Finished, Discover, Explored, PlanWanted, PlanKnown, DropContext]


@pytest.mark.parametrize("message", INTERNAL, ids=lambda message: message.__name__)
def test_late_messages_are_only_late(trio: Cluster, message: type) -> None:
    fault = trio.fault("delay", message, seconds=0.03)
    meeting_sources()
    far_source()
    assert eventually(lambda: fault.hits > 0)
    assert_nothing_left(trio)


@pytest.mark.parametrize("message", [PassFailed, EndPass, DropContext], ids=lambda message: message.__name__)
def test_a_failure_that_is_told_late(trio: Cluster, message: type) -> None:
    fault = trio.fault("delay", message, seconds=0.03)
    with autograd.context() as context_id:
        shared = leaf() * 1
        loss = (rpc.rpc_sync("b", bad_relay, ("hook", "c", shared)) + shared).sum()
        with pytest.raises(ZeroDivisionError, match="on worker 'c'"):
            autograd.backward(context_id, [loss])
        assert_no_pass_runs(trio)
    assert eventually(lambda: fault.hits > 0)
    assert_nothing_left(trio)
    meeting_sources()


def test_all_messages_are_late_at_once(trio: Cluster) -> None:
    late = [
        trio.fault("delay", message, count=4, seconds=0.005 + 0.005 * number) for number, message in enumerate(INTERNAL)
    ]
    for _ in range(3):
        meeting_sources()
        meeting_sources("c", "b")
        far_source()
    assert_nothing_left(trio)
    assert all(fault.hits for fault in late)


@pytest.mark.parametrize("bytes", [0, 20, 1 << 20], ids=["before", "within", "after"])
@pytest.mark.parametrize("message", INTERNAL, ids=lambda message: message.__name__)
def test_a_connection_is_cut_at_a_message(trio: Cluster, message: type, bytes: int) -> None:
    """The pass fails at once, unless the message was not needed any more; nothing stays behind on either side."""
    fault = trio.fault("cut", message, count=1, bytes=bytes)
    start = time.monotonic()
    with contextlib.suppress(WorkerLostError):
        meeting_sources()
        far_source()
    assert time.monotonic() - start < AT_ONCE
    assert eventually(lambda: fault.hits == 1)
    assert_nothing_left(trio)


def test_a_link_that_is_cut_is_a_lost_worker(trio: Cluster) -> None:
    gate = Gate()

    def run() -> BaseException | None:
        with trio.on("a"), autograd.context() as context_id:
            shared = leaf() * 1
            result = rpc.rpc_sync("b", with_hook, (GateHook(gate), shared))
            with pytest.raises(WorkerLostError, match="worker 'b'"):
                autograd.backward(context_id, [(result + shared).sum()])

    join = in_thread(run)
    gate.wait_entered()
    trio.cut("a", "b")
    join()
    gate.open()
    assert_nothing_left(trio)
    next_context_works(trio, "a", "c")
