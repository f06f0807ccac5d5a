"""Run: what it sends together, what it runs together, and that the gradients are the same whatever it does."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support import (
    PATIENCE,
    assert_nothing_left,
    both_modes,
    eventually,
    known_on,
)
from telegrad import autograd, rpc
from telegrad._wire.messages import Gradients
from telegrad._worker import Worker
from telegrad.autograd import graph, run
from telegrad.autograd.functions import here
from telegrad.errors import UsageError
from telegrad.testing import Cluster

Call = Callable[..., Any]  # call(to, function, *args)
Mode = Literal["smart", "fast"]

#: What each worker has of its own.
WEIGHTS: dict[str, Tensor] = {}
#: What hooks have seen, as (which, gradient).
SEEN: list[tuple[Any, Tensor]] = []


@pytest.fixture(autouse=True)
def _weights() -> Iterator[None]:
    generator = torch.Generator().manual_seed(11)
    for name in ("a", "another of a", "b", "c"):
        WEIGHTS[name] = (torch.rand(3, dtype=torch.float64, generator=generator) + 0.5).requires_grad_()
    SEEN.clear()
    yield
    WEIGHTS.clear()
    SEEN.clear()


# --- what is sent and run ---------------------------------------------------------------------------------------


class Sent(NamedTuple):
    sender: str
    to: str
    message: Any


@contextmanager
def messages_of(workers: Cluster) -> Iterator[list[Sent]]:
    """All internal messages that are sent inside."""
    sent: list[Sent] = []

    def listen(worker: Worker) -> None:
        send: Any = worker.agent.send_message

        def counted(to: int, message: Any, *rest: Any, **options: Any) -> bool:
            sent.append(Sent(worker.name, workers[to].name, message))
            return send(to, message, *rest, **options)

        worker.agent.send_message = counted  # type: ignore[method-assign]

    for worker in workers:
        listen(worker)
    try:
        yield sent
    finally:
        for worker in workers:
            del worker.agent.send_message


def kinds(sent: list[Sent]) -> Counter[str]:
    return Counter(type(each.message).__name__ for each in sent)


def batches(sent: list[Sent], sender: str, to: str) -> list[int]:
    """Of how many messages each batch between these two had gradients."""
    return [
        len(each.message.messages)
        for each in sent
        if isinstance(each.message, Gradients) and (each.sender, each.to) == (sender, to)
    ]


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that called torch's engine."""
    run_engine, calls = run.run_engine, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(threading.current_thread().name)
        return run_engine(*args, **options)

    monkeypatch.setattr(run, "run_engine", counted)
    return calls


# --- programs ---------------------------------------------------------------------------------------------------


def locally(to: str, function: Any, *args: Any) -> Any:
    return function(*args)


def by_sync(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def branch(where: str, number: int, tensor: Tensor) -> Tensor:
    return (tensor * WEIGHTS[where]).sin() * number


def fan_out(call: Call, count: int = 8, function: Any = branch, to: str = "b") -> Tensor:
    """Many calls with one tensor."""
    shared = WEIGHTS["a"].exp()
    results = [
        call(to[number % len(to)], function, to[number % len(to)], number + 1, shared) for number in range(count)
    ]
    return torch.stack(results).pow(2).sum()


def gradients(workers: Cluster, context_id: int) -> dict[str, Tensor]:
    found = {}
    for name, weight in WEIGHTS.items():
        with workers.on(name[-1]):
            if context_id in [context.id for context in workers[name[-1]].autograd.registry]:
                mine = autograd.get_gradients(context_id)
                found |= {name: mine[weight]} if weight in mine else {}
    return found


def local_gradients(program: Callable[[Call], Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(program(locally), list(WEIGHTS.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(WEIGHTS, found, strict=True) if gradient is not None}


def seen() -> list[tuple[Any, Tensor]]:
    """What hooks have seen since the last time, in the order of what they belong to."""
    found = sorted(SEEN, key=lambda each: each[0])
    SEEN.clear()
    return found


def assert_seen(expected: list[tuple[Any, Tensor]]) -> None:
    found = seen()
    assert [which for which, _ in found] == [which for which, _ in expected]
    torch.testing.assert_close([gradient for _, gradient in found], [gradient for _, gradient in expected])


def see(which: Any) -> Callable[[Tensor], None]:
    return lambda gradient: SEEN.append((which, gradient.clone()))


def check(
    workers: Cluster, program: Callable[[Call], Tensor], mode: Mode = "smart", seen_by_hooks: int = 0
) -> list[Sent]:
    """One program, here and across workers: the same gradients, and the same seen by hooks.  What was sent for it."""
    expected = local_gradients(program)
    hooks = seen()
    assert len(hooks) == seen_by_hooks
    with autograd.context() as context_id:
        loss = program(by_sync)
        with messages_of(workers) as sent:
            autograd.backward(context_id, [loss], mode=mode)
        torch.testing.assert_close(gradients(workers, context_id), expected)
    assert_seen(hooks)
    return sent


# --- a fan-out --------------------------------------------------------------------------------------------------


def test_a_fan_out_costs_two_messages(trio: Cluster) -> None:
    """Eight gradients go there in one and come back in one, with the answer that all is done."""
    sent = check(trio, fan_out)
    assert kinds(sent) == {"Gradients": 2}
    assert batches(sent, "a", "b") == batches(sent, "b", "a") == [8]
    assert [each.message.finished is not None for each in sent] == [False, True]


def test_a_fan_out_costs_two_messages_in_fast_too(trio: Cluster) -> None:
    sent = check(trio, fan_out, "fast")
    assert kinds(sent) == {"Gradients": 2}


def test_units_that_are_ready_together_run_in_one_call_of_torchs_engine(trio: Cluster, engine_calls: list[str]) -> None:
    check(trio, fan_out)
    assert len(engine_calls) == 3, "the loss, all branches, and what they have in common"


@both_modes
def test_a_fan_out_to_several_workers(trio: Cluster, mode: Mode) -> None:
    sent = check(trio, lambda call: fan_out(call, 9, to="bc"), mode)
    assert batches(sent, "a", "b") == batches(sent, "b", "a") == [5]
    assert batches(sent, "a", "c") == batches(sent, "c", "a") == [4]


@both_modes
def test_the_hook_of_a_tensor_that_many_calls_use_sees_the_whole_gradient_once(trio: Cluster, mode: Mode) -> None:
    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"].exp()
        shared.register_hook(see("shared"))
        return torch.stack([call("b", branch, "b", number, shared) for number in range(1, 9)]).prod(0).sum()

    check(trio, program, mode, seen_by_hooks=1)


def hooked(where: str, number: int, tensor: Tensor) -> Tensor:
    """Hooks on what was received, on what comes between, and on the result."""
    tensor.register_hook(see((number, "received")))
    between = tensor * WEIGHTS[where]
    between.register_hook(see((number, "between")))
    result = between.sin() * number
    result.register_hook(see((number, "result")))
    return result


@both_modes
def test_the_hooks_of_units_that_run_together_fire_once_each(
    trio: Cluster, engine_calls: list[str], mode: Mode
) -> None:
    def program(call: Call) -> Tensor:
        # A tensor for each, so that the hooks on what was received see the same as locally.
        shared = WEIGHTS["a"].exp()
        results = [call("b", hooked, "b", number, shared * number) for number in range(1, 9)]
        return torch.stack(results).pow(2).sum()

    check(trio, program, mode, seen_by_hooks=24)
    assert len(engine_calls) == 3


def doubling(where: str, number: int, tensor: Tensor) -> Tensor:
    between = tensor * WEIGHTS[where]
    between.register_hook(lambda gradient: gradient * number)
    return between.exp()


@both_modes
def test_hooks_of_units_that_run_together_change_each_its_own_gradient(trio: Cluster, mode: Mode) -> None:
    check(trio, lambda call: fan_out(call, function=doubling), mode)


# --- leaves that units share ------------------------------------------------------------------------------------


@both_modes
def test_gradients_of_a_leaf_that_was_sent_many_times_add_up(
    trio: Cluster, engine_calls: list[str], mode: Mode
) -> None:
    def program(call: Call) -> Tensor:
        leaf, other = WEIGHTS["a"], WEIGHTS["another of a"]
        results = [call("b", branch, "b", number, other if number == 4 else leaf) for number in range(1, 9)]
        return torch.stack(results).pow(2).sum()

    sent = check(trio, program, mode)
    assert kinds(sent) == {"Gradients": 2}
    assert len(engine_calls) == 3


def sums_of(where: str, number: int, tensor: Tensor) -> Tensor:
    return tensor.expand(3, 3).sum(0) + WEIGHTS[where] * number


@both_modes
def test_gradients_that_torch_expands_add_up(trio: Cluster, mode: Mode) -> None:
    check(trio, lambda call: fan_out(call, function=sums_of), mode)


TABLE = torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()


def embedded(where: str, number: int, tensor: Tensor) -> Tensor:
    indices = torch.tensor([number % 4, 3, number % 4])
    return functional.embedding(indices, TABLE, sparse=True).sum(0) * tensor


def embedded_or_not(where: str, number: int, tensor: Tensor) -> Tensor:
    return embedded(where, number, tensor) if number % 2 else TABLE.exp().sum(0) * tensor


@both_modes
@pytest.mark.parametrize("function", [embedded, embedded_or_not], ids=["sparse", "sparse and dense"])
def test_sparse_gradients_of_a_leaf_that_units_share_add_up(
    trio: Cluster, engine_calls: list[str], function: Any, mode: Mode
) -> None:
    (expected,) = torch.autograd.grad(fan_out(locally, function=function), TABLE)
    with autograd.context() as context_id:
        autograd.backward(context_id, [fan_out(by_sync, function=function)], mode=mode)
        with trio.on("b"):
            found = autograd.get_gradients(context_id)[TABLE]
    assert len(engine_calls) == 3
    assert found.is_sparse == expected.is_sparse == (function is embedded)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


@both_modes
@pytest.mark.parametrize("kind", ["hook", "hook after accumulation"])
@pytest.mark.parametrize("where", ["a", "b"], ids=["of who sent it", "of who was called"])
def test_the_hook_of_a_leaf_that_units_share_sees_the_sum_once(
    trio: Cluster, where: str, kind: str, mode: Mode
) -> None:
    def program(call: Call) -> Tensor:
        return torch.stack([call("b", branch, "b", n, WEIGHTS["a"]) for n in range(1, 9)]).pow(2).sum()

    expected = local_gradients(program)
    leaf = WEIGHTS[where]
    if kind == "hook":
        leaf.register_hook(see("whole"))
    else:
        leaf.register_post_accumulate_grad_hook(lambda leaf: see("whole")(leaf.grad))
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)], mode=mode)
        assert_seen([("whole", expected[where])])
        torch.testing.assert_close(gradients(trio, context_id), expected)


def test_a_leaf_with_a_hook_after_accumulation_beside_units_without(trio: Cluster) -> None:
    """Those that share it are one unit; the others still go along in the same call."""
    leaf = WEIGHTS["a"]
    expected = local_gradients(two_leaves)
    leaf.register_post_accumulate_grad_hook(lambda leaf: see("whole")(leaf.grad))
    with autograd.context() as context_id:
        autograd.backward(context_id, [two_leaves(by_sync)])
        assert_seen([("whole", expected["a"])])
        torch.testing.assert_close(gradients(trio, context_id), expected)


def two_leaves(call: Call) -> Tensor:
    names = ["a", "another of a"]
    return torch.stack([call("b", branch, "b", n, WEIGHTS[names[n % 2]]) for n in range(1, 9)]).prod(0).sum()


class Halfway(torch.autograd.Function):
    """Has a gradient for one of its inputs only: for which, says the number."""

    @staticmethod
    def forward(ctx: Any, number: int, one: Tensor, other: Tensor) -> Tensor:
        ctx.number = number
        return one * number + other.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scaled = gradient * ctx.number
        return (None, scaled, None) if ctx.number % 2 else (None, None, scaled)


def halfway(number: int, one: Tensor, other: Tensor) -> Tensor:
    return Halfway.apply(number, one, other) * WEIGHTS["b"]


@both_modes
def test_undefined_gradients_among_defined_ones(trio: Cluster, mode: Mode) -> None:
    def program(call: Call) -> Tensor:
        one, other = WEIGHTS["a"], WEIGHTS["another of a"]
        return torch.stack([call("b", halfway, n, one * n, other.exp()) for n in range(1, 9)]).pow(2).sum()

    check(trio, program, mode)


# --- what waits and what does not -------------------------------------------------------------------------------


def scaled(number: int, tensor: Tensor) -> Tensor:
    return tensor * number


def check_sizes(workers: Cluster, sizes: list[int]) -> list[Sent]:
    """Calls with tensors of these sizes, one after the other; torch's engine comes to the last one first."""
    with autograd.context() as context_id:
        leaves = [torch.rand(size).requires_grad_() for size in sizes]
        results = [rpc.rpc_sync("b", scaled, (n, leaf)) for n, leaf in enumerate(leaves, 1)]
        weights = [torch.rand(size) for size in sizes]
        loss = torch.cat([result * weight for result, weight in zip(results, weights, strict=True)]).sum()
        with messages_of(workers) as sent:
            autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        for n, (leaf, weight) in enumerate(zip(leaves, weights, strict=True), 1):
            torch.testing.assert_close(found[leaf], weight * n)
    return sent


SMALL, BIG = 4, 1 << 18  # floats: 1 MB


def test_big_gradients_leave_at_once(trio: Cluster) -> None:
    sent = check_sizes(trio, [BIG] * 4)
    assert batches(sent, "a", "b") == batches(sent, "b", "a") == [1] * 4


def test_a_big_gradient_takes_along_what_waits_for_the_same_worker(trio: Cluster) -> None:
    sent = check_sizes(trio, [SMALL, SMALL, BIG, SMALL, SMALL, SMALL])
    assert batches(sent, "a", "b") == [4, 2]


def test_gradients_leave_at_once_where_something_is_computed_after_them(trio: Cluster) -> None:
    def program(call: Call) -> Tensor:
        first = call("b", branch, "b", 1, WEIGHTS["a"])
        between = first.exp()
        second = call("b", branch, "b", 2, WEIGHTS["another of a"])
        return (between * second).sum()

    sent = check(trio, program)
    assert batches(sent, "a", "b") == [1, 1]


@both_modes
def test_a_batch_that_nothing_can_join_leaves_from_within_the_engine(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """But not the one that may take along that its sender has finished."""
    leaves: list[tuple[bool, bool]] = []
    send = run.Run._send_batch

    def noted(self: run.Run, to: int, batch: run.GradientBatch) -> None:
        leaves.append((self.this.is_root, here.call is not None))
        send(self, to, batch)

    monkeypatch.setattr(run.Run, "_send_batch", noted)
    sent = check(trio, lambda call: call("b", branch, "b", 1, WEIGHTS["a"]).sum(), mode)
    assert batches(sent, "a", "b") == batches(sent, "b", "a") == [1]
    assert leaves == [(True, True), (False, False)]


# --- units beside each other ------------------------------------------------------------------------------------


def recycled_weight() -> Tensor:
    return recycling(7, WEIGHTS["b"] * 1, WEIGHTS["b"] * 1)


def recycled(tensor: Tensor) -> Tensor:
    return recycling(3, tensor, tensor * 1)


@both_modes
def test_a_unit_that_received_nothing_does_not_spoil_what_another_sends(trio: Cluster, mode: Mode) -> None:
    def program(call: Call) -> Tensor:
        own, received = call("b", recycled_weight), call("b", recycled, WEIGHTS["a"].exp())
        return (own * received.detach() + received).sum()

    check(trio, program, mode)


def sink(tensor: Tensor) -> Tensor:
    return tensor.sum()


def for_nothing(tensor: Tensor) -> Tensor:
    result = WEIGHTS["b"].tanh()
    rpc.rpc_sync("c", sink, (result * tensor,))
    return result


def late(tensor: Tensor) -> Tensor:
    result = tensor * 1
    result.register_hook(lambda _: time.sleep(0.1))
    return result * 1


def test_a_unit_whose_recvs_are_dead_sends_nothing_for_those_of_another(trio: Cluster) -> None:
    with autograd.context() as context_id:
        dead = rpc.rpc_sync("b", for_nothing, (WEIGHTS["a"],))
        live = rpc.rpc_sync("c", late, (rpc.rpc_sync("b", torch.mul, (WEIGHTS["another of a"], 3.0)),))
        with messages_of(trio) as sent:
            autograd.backward(context_id, [dead.sum() + live.sum()])
        found = gradients(trio, context_id)
    assert found["another of a"].tolist() == [3.0] * 3
    assert "a" not in found
    assert sum(batches(sent, "b", "a")) == 1


# --- torch's engine ---------------------------------------------------------------------------------------------


@both_modes
def test_forty_calls_need_more_than_one_batch(trio: Cluster, mode: Mode) -> None:
    sent = check(trio, lambda call: fan_out(call, 40), mode)
    assert batches(sent, "a", "b") == [32, 8]
    back = batches(sent, "b", "a")
    assert sum(back) == 40
    assert max(back) <= 32


@both_modes
def test_forty_calls_at_once(trio: Cluster, mode: Mode) -> None:
    def at_once(call: Call) -> Tensor:
        shared = WEIGHTS["a"].exp()
        if call is locally:
            results = [branch("b", number, shared) for number in range(1, 41)]
        else:
            futures = [rpc.rpc_async("b", branch, ("b", number, shared)) for number in range(1, 41)]
            results = [future.wait() for future in futures]
        return torch.stack(results).pow(2).sum()

    check(trio, at_once, mode)


def inner_fan_out(where: str, number: int, tensor: Tensor) -> Tensor:
    results = [rpc.rpc_sync("c", branch, ("c", each, tensor * WEIGHTS[where])) for each in range(1, 4)]
    return torch.stack(results).prod(0) * number


def local_inner(where: str, number: int, tensor: Tensor) -> Tensor:
    return torch.stack([branch("c", each, tensor * WEIGHTS[where]) for each in range(1, 4)]).prod(0) * number


@both_modes
def test_a_fan_out_of_fan_outs(trio: Cluster, mode: Mode) -> None:
    check(trio, lambda call: fan_out(call, 5, local_inner if call is locally else inner_fan_out), mode)


# --- second derivatives -----------------------------------------------------------------------------------------


@both_modes
def test_second_derivatives_through_a_fan_out(trio: Cluster, mode: Mode) -> None:
    leaves = [WEIGHTS["a"], WEIGHTS["b"]]
    first = torch.autograd.grad(fan_out(locally), leaves, create_graph=True)
    second = torch.autograd.grad(first[0].pow(2).sum(), leaves)
    with autograd.context() as context_id:
        autograd.backward(context_id, [fan_out(by_sync)], create_graph=True, mode=mode)
        found = gradients(trio, context_id)
        torch.testing.assert_close(found, dict(zip("ab", first, strict=True)))
        autograd.backward(context_id, [found["a"].pow(2).sum()])
        both = {name: one + other for name, one, other in zip("ab", first, second, strict=True)}
        torch.testing.assert_close(gradients(trio, context_id), both)


# --- which thread runs what -------------------------------------------------------------------------------------------


def long_branch(where: str, number: int, tensor: Tensor) -> Tensor:
    """A unit of its own call of torch's engine, where no more than 40 nodes are few."""
    for _ in range(50):
        tensor = tensor + 0.01
    return branch(where, number, tensor)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_FEW", 40)


def compute_for_long(gradient: Tensor) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < 0.003:
        pass


def long_hook(where: str, number: int, tensor: Tensor) -> Tensor:
    result = branch(where, number, tensor)
    result.register_hook(compute_for_long)
    return result


def long_hook_alone(where: str, number: int, tensor: Tensor) -> Tensor:
    result = long_branch(where, number, tensor)
    result.register_hook(compute_for_long)
    return result


def any_kind(where: str, number: int, tensor: Tensor) -> Tensor:
    return [branch, long_branch, long_hook, long_hook_alone][number % 4](where, number, tensor)


@both_modes
@pytest.mark.parametrize("function", [long_branch, long_hook, long_hook_alone, any_kind])
@pytest.mark.usefixtures("few")
def test_units_that_take_long(trio: Cluster, function: Any, mode: Mode) -> None:
    check(trio, lambda call: fan_out(call, 8, function), mode)


@pytest.mark.usefixtures("few")
def test_units_after_whose_recvs_something_is_computed_run_alone(trio: Cluster, engine_calls: list[str]) -> None:
    check(trio, lambda call: fan_out(call, 8, long_branch))
    assert len(engine_calls) == 1 + 8 + 1


MEETINGS: list[threading.Barrier] = []


def meet(gradient: Tensor) -> None:
    MEETINGS[-1].wait(PATIENCE / 2)


def meeting(where: str, number: int, tensor: Tensor) -> Tensor:
    """All units must run at the same time."""
    result = long_branch(where, number, tensor)
    if MEETINGS:
        result.register_hook(meet)
    return result


@pytest.mark.usefixtures("few")
def test_units_that_do_not_share_a_call_run_at_the_same_time(trio: Cluster) -> None:
    expected = local_gradients(lambda call: fan_out(call, 3, meeting))
    MEETINGS.append(threading.Barrier(3))
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [fan_out(by_sync, 3, meeting)])
            torch.testing.assert_close(gradients(trio, context_id), expected)
    finally:
        MEETINGS.clear()


CAME = threading.Event()


def wait_until_it_came(gradient: Tensor) -> None:
    assert CAME.wait(PATIENCE / 2), "what the other unit computed has not left"


def waiting(where: str, number: int, tensor: Tensor) -> Tensor:
    result = long_branch(where, number, tensor)
    result.register_hook(wait_until_it_came)
    return result


@pytest.mark.usefixtures("few")
def test_what_a_unit_has_computed_does_not_wait_for_another_unit(trio: Cluster) -> None:
    """Here it waits for what another's gradient causes on the other side."""
    CAME.clear()
    one, other = WEIGHTS["a"], WEIGHTS["another of a"]
    with autograd.context() as context_id:
        there = other.exp()
        there.register_hook(lambda gradient: CAME.set())
        results = [rpc.rpc_sync("b", waiting, ("b", 1, one)), rpc.rpc_sync("b", branch, ("b", 2, there))]
        with messages_of(trio) as sent:
            autograd.backward(context_id, [torch.stack(results).sum()])
    assert batches(sent, "a", "b") == [2], "both came at once"
    assert batches(sent, "b", "a") == [1, 1]


GOT_IT = threading.Event()


def with_sign(tensor: Tensor) -> Tensor:
    result = tensor * WEIGHTS["c"]
    result.register_hook(lambda gradient: GOT_IT.set())
    return result


def got_it() -> bool:
    return GOT_IT.wait(1.0)


def test_what_a_run_has_collected_leaves_before_a_hook_waits_for_another_worker(trio: Cluster) -> None:
    """Locally the newer call's branch has run by then."""

    def program(call: Call) -> Tensor:
        GOT_IT.clear()
        older, newer = call("b", branch, "b", 1, WEIGHTS["a"]), call("c", with_sign, WEIGHTS["another of a"])
        older.register_hook(lambda gradient: answers.append(call("c", got_it)))
        return (older + newer).sum()

    answers: list[bool] = []
    check(trio, program)
    assert answers == [True, True]


# --- whose memory it is -----------------------------------------------------------------------------------------

BUFFER = torch.zeros(3, dtype=torch.float64)


class Recycling(torch.autograd.Function):
    """Returns its gradients in the same memory each time."""

    @staticmethod
    def forward(ctx: Any, number: int, one: Tensor, other: Tensor) -> Tensor:
        ctx.number = number
        return one * number + other * number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.mul(gradient, ctx.number, out=BUFFER)
        return None, BUFFER, BUFFER


def recycling(number: int, one: Tensor, other: Tensor) -> Tensor:
    return Recycling.apply(number, one, other)


def renumber(worker: Worker, context_id: int, threads: int) -> None:
    """As if so many threads had served the calls, in turns.

    Of the nodes that are ready torch's engine runs the one with the highest number, and each thread counts on its own.
    """
    numbers = [itertools.count(1) for _ in range(threads)]
    context = worker.autograd.registry.find(context_id)
    assert context is not None
    for send, counter in zip(context.sends.values(), itertools.cycle(numbers), strict=False):
        (top,) = send.parts
        function: Any = top.next_functions[0][0]
        recvs = [node for node, _ in function.next_functions if node is not None]
        for node in (*recvs, function, top):
            node._set_sequence_nr(next(counter))


def check_recycling(workers: Cluster, threads: int, mode: Mode) -> None:
    def program(call: Call) -> Tensor:
        one, other = WEIGHTS["a"], WEIGHTS["another of a"]
        results = [call("b", recycling, number, one * number, other.exp()) for number in range(1, 9)]
        return torch.stack(results).pow(2).sum()

    expected = local_gradients(program)
    with autograd.context() as context_id:
        loss = program(by_sync)
        renumber(workers["b"], context_id, threads)
        autograd.backward(context_id, [loss], mode=mode)
        BUFFER.zero_()
        torch.testing.assert_close(gradients(workers, context_id), expected)


@both_modes
def test_a_gradient_leaves_as_it_was_when_it_was_computed(trio: Cluster, engine_calls: list[str], mode: Mode) -> None:
    """A custom function may use the memory of what it returned again, once that has been taken."""
    check_recycling(trio, 1, mode)
    assert len(engine_calls) == 3


@both_modes
def test_a_gradient_leaves_as_it_was_when_it_was_computed_whichever_thread_served_the_call(
    trio: Cluster, mode: Mode
) -> None:
    check_recycling(trio, 8, mode)


def big_recycling(number: int, tensor: Tensor) -> Tensor:
    return BigRecycling.apply(number, tensor)


BIG_BUFFER = torch.zeros(BIG)


class BigRecycling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, tensor: Tensor) -> Tensor:
        ctx.number = number
        return tensor * number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, torch.mul(gradient, ctx.number, out=BIG_BUFFER)


def test_a_big_gradient_leaves_as_it_was_when_it_was_computed(trio: Cluster) -> None:
    with autograd.context() as context_id:
        leaves = [torch.ones(BIG).requires_grad_() for _ in range(4)]
        loss = torch.zeros(())
        for number, leaf in enumerate(leaves, 1):  # each received just before it is used: so here, too, it leaves first
            loss = loss + big_recycling(number, rpc.rpc_sync("b", scaled, (1, leaf))).sum()
        autograd.backward(context_id, [loss])
        BIG_BUFFER.zero_()
        found = autograd.get_gradients(context_id)
        assert [found[leaf].unique().tolist() for leaf in leaves] == [[1.0], [2.0], [3.0], [4.0]]


# --- errors -----------------------------------------------------------------------------------------------------


def bad_hook(gradient: Tensor) -> None:
    raise ZeroDivisionError("no gradient today")


def bad_branch(where: str, number: int, tensor: Tensor) -> Tensor:
    result = branch(where, number, tensor)
    if number == 3:
        result.register_hook(bad_hook)
    return result


def bad_long_branch(where: str, number: int, tensor: Tensor) -> Tensor:
    result = long_branch(where, number, tensor)
    if number == 3:
        result.register_hook(bad_hook)
    return result


def assert_bad(workers: Cluster, function: Any, mode: Mode) -> list[Sent]:
    """Fails, leaves nothing behind, and does no harm to the next context."""
    with autograd.context() as context_id:
        loss = fan_out(by_sync, 8, function)
        with messages_of(workers) as sent:
            with pytest.raises(ZeroDivisionError, match=r"(?s)no gradient today.*This was raised on worker 'b':"):
                autograd.backward(context_id, [loss], mode=mode)
        for worker in workers:
            assert eventually(lambda name=worker.name: known_on(workers, name)["passes"] == []), worker.name
        assert not gradients(workers, context_id).keys() & {"a"}
    assert_nothing_left(workers)
    check(workers, fan_out, mode)
    return sent


@both_modes
def test_a_hook_that_raises_in_one_of_the_units_that_run_together(trio: Cluster, mode: Mode) -> None:
    sent = assert_bad(trio, bad_branch, mode)
    assert batches(sent, "a", "b") == [8]
    assert batches(sent, "b", "a") == [], "what others of them computed before does not leave any more"


@both_modes
@pytest.mark.usefixtures("few")
def test_a_hook_that_raises_in_one_of_the_units_that_came_together(trio: Cluster, mode: Mode) -> None:
    assert_bad(trio, bad_long_branch, mode)


@both_modes
def test_a_hook_that_raises_in_what_many_calls_have_in_common(trio: Cluster, mode: Mode) -> None:
    with autograd.context() as context_id:
        shared = WEIGHTS["a"].exp()
        shared.register_hook(bad_hook)
        loss = torch.stack([rpc.rpc_sync("b", branch, ("b", number, shared)) for number in range(1, 9)]).sum()
        with pytest.raises(ZeroDivisionError, match=r"^no gradient today$"):
            autograd.backward(context_id, [loss], mode=mode)
    assert_nothing_left(trio)
    check(trio, fan_out, mode)


# --- which run a node belongs to ------------------------------------------------------------------------------------


def test_a_plain_backward_in_a_copy_of_a_hooks_context_is_refused(trio: Cluster) -> None:
    """It runs on another thread, and its gradients are none of the pass's."""
    with ThreadPoolExecutor() as threads, autograd.context() as context_id:
        weight = torch.ones(2, requires_grad=True)
        received = rpc.rpc_sync("b", torch.mul, (weight, 2))
        product = received * 3
        errors: list[BaseException | None] = []

        def plain() -> None:
            with torch.enable_grad():
                (received * 5).sum().backward()

        def hook(gradient: Tensor) -> None:
            errors.append(threads.submit(copy_context().run, plain).exception(PATIENCE))

        product.register_hook(hook)
        autograd.backward(context_id, [product.sum()])
        assert [type(error) for error in errors] == [UsageError]
        assert autograd.get_gradients(context_id)[weight].tolist() == [6, 6]


def test_backwards_may_be_nested_deeper_than_torch_recurses(trio: Cluster) -> None:
    """Beyond 60 levels torch's engine runs the nodes on a thread of its own."""
    depth = 64
    with autograd.context() as context_id:
        leaves = [torch.ones(2, requires_grad=True) for _ in range(depth)]
        received = [rpc.rpc_sync("b", torch.mul, (leaf, 2)) for leaf in leaves]

        def backward(level: int) -> None:
            with trio.on("a"), torch.enable_grad():
                product = received[level] * 3
                if level + 1 < depth:
                    product.register_hook(lambda gradient: backward(level + 1))
                autograd.backward(context_id, [product.sum()], retain_graph=True)

        backward(0)
        found = autograd.get_gradients(context_id)
        assert all(found[leaf].tolist() == [6, 6] for leaf in leaves)


# --- the end of a thread ------------------------------------------------------------------------------------------

# The last of its exit handlers keeps the GIL until the interpreter ends.  A thread that needs it after its last line of
# Python, as one does in which torch keeps an object, then aborts the process.
ENDS_LAST = """
import atexit, functools, threading

go = threading.Event()

def end():
    go.set()
    thread.join()

atexit.register(functools.partial(pow, 3, 2_000_000))
atexit.register(end)

import torch
from telegrad import autograd, rpc
from telegrad.testing import cluster

def train():
    with cluster("a", "b") as workers, workers.on("a"), autograd.context() as context_id:
        weight = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync("b", torch.mul, (weight, 3)).sum()])
        print(autograd.get_gradients(context_id)[weight].tolist())
    go.wait()

thread = threading.Thread(target=train, daemon=True)
thread.start()
"""


def test_a_thread_that_ran_a_backward_may_end_together_with_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_LAST], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3.0, 3.0]\n", "")
