"""Gradients through calls: whatever a program does, it gets what local autograd computes for the same program."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support import (
    NOTHING,
    PATIENCE,
    Gate,
    assert_no_contexts,
    assert_nothing_left,
    eventually,
    in_thread,
    known_on,
    pass_through,
)
from telegrad import autograd, rpc
from telegrad._core.python.link import PythonLink
from telegrad._wire import messages
from telegrad.errors import MissingGradientError
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster

Call = Callable[..., Any]  # call(to, function, *args)

#: What each worker has of its own.
WEIGHTS: dict[str, Tensor] = {}


@pytest.fixture(autouse=True)
def _weights() -> None:
    generator = torch.Generator().manual_seed(7)
    for name in "abc":
        weight = torch.rand(3, dtype=torch.float64, generator=generator) + 0.5
        WEIGHTS[name] = weight.requires_grad_()


def gradients(workers: Cluster, context_id: int) -> dict[str, Tensor | None]:
    """What the weights got; each has its gradient on its own worker, and nowhere else."""
    found: dict[str, Tensor | None] = {}
    for name, weight in WEIGHTS.items():
        with workers.on(name):
            known = context_id in [context.id for context in workers[name].autograd.registry]
            mine = autograd.get_gradients(context_id) if known else {}
        found[name] = mine.get(weight)
        others = [other for other in WEIGHTS if other != name and WEIGHTS[other] in mine]
        assert not others, f"worker {name} has gradients of {others}"
        assert weight.grad is None
    return found


def local_gradients(program: Callable[[Call], Tensor]) -> dict[str, Tensor | None]:
    program(locally).backward()
    found = {name: weight.grad for name, weight in WEIGHTS.items()}
    for weight in WEIGHTS.values():
        weight.grad = None
    return found


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), f"{name}: {found[name]}, not {gradient}"
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)


def check(
    workers: Cluster, program: Callable[[Call], Tensor], call: Call | None = None, mode: Any = "smart", **options: Any
) -> None:
    """One program, here and across workers."""
    expected = local_gradients(program)
    with autograd.context() as context_id:
        loss = program(call or by_sync)
        autograd.backward(context_id, [loss], mode=mode, **options)
        assert_same(gradients(workers, context_id), expected)


# --- ways to call -----------------------------------------------------------------------------------------------


def locally(to: str, function: Any, *args: Any) -> Any:
    return function(*args)


def by_sync(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def by_async(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_async(to, function, args).wait()


def by_remote(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, function, args).to_here()


class Doer:
    def do(self, function: Any, *args: Any) -> Any:
        return function(*args)

    @async_execution
    def do_later(self, function: Any, *args: Any) -> Any:
        return rpc.rpc_async(rpc.get_worker_info().name, function, args)


def by_proxy_sync(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, Doer).rpc_sync().do(function, *args)


def by_proxy_async(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, Doer).rpc_async().do(function, *args).wait()


def by_proxy_remote(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, Doer).remote().do(function, *args).to_here()


def by_proxy_later(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, Doer).rpc_sync().do_later(function, *args)


def same(*values: Any) -> Any:
    return values


@async_execution
def through_others(function: Any, *args: Any) -> Any:
    """The arguments by way of c, then the function here, then its result by way of c, and no thread waits."""
    return (
        rpc.rpc_async("c", same, args)
        .then(lambda passed: function(*passed.wait()))
        .then(lambda done: rpc.rpc_sync("c", same, (done.wait(),))[0])
    )


def by_chain(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, through_others, (function, *args))


def by_reference(to: str, function: Any, *args: Any) -> Any:
    """Arguments and result as RRefs."""
    rrefs = [rpc.RRef(arg) if isinstance(arg, Tensor) else arg for arg in args]
    return rpc.rpc_sync(to, fetch_and_do, (function, *rrefs)).to_here()


def fetch_and_do(function: Any, *args: Any) -> Any:
    return rpc.RRef(function(*[arg.to_here() if isinstance(arg, rpc.RRef) else arg for arg in args]))


WAYS = [
    by_sync,
    by_async,
    by_remote,
    by_proxy_sync,
    by_proxy_async,
    by_proxy_remote,
    by_proxy_later,
    by_chain,
    by_reference,
]

# --- programs ---------------------------------------------------------------------------------------------------


def times(where: str, *tensors: Tensor) -> Tensor:
    result = WEIGHTS[where]
    for tensor in tensors:
        result = result * tensor.sin()
    return result


def argument_and_result(call: Call) -> Tensor:
    result = call("b", times, "b", WEIGHTS["a"].exp())
    return (result * result).sum()


def a_leaf_as_argument(call: Call) -> Tensor:
    return call("b", times, "b", WEIGHTS["a"]).sum()


def only_weights_over_there(call: Call) -> Tensor:
    return call("b", times, "b").prod() * 3


def relay(call: Call, tensor: Tensor) -> Tensor:
    return call("c", times, "c", tensor * WEIGHTS["b"]) + tensor


def nested(call: Call) -> Tensor:
    return call("b", relay, call, WEIGHTS["a"].exp()).pow(2).sum()


def back(call: Call, tensor: Tensor) -> Tensor:
    return call("a", times, "a", tensor * WEIGHTS["b"]) * tensor


def a_call_back_to_the_caller(call: Call) -> Tensor:
    return call("b", back, call, WEIGHTS["a"].exp()).pow(2).sum()


def a_call_to_oneself(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    return (call("a", times, "a", shared) * shared).sum()


def to_and_fro(call: Call) -> Tensor:
    """The wave comes back to its parent, more than once."""
    shared = WEIGHTS["a"].exp()
    one = call("b", times, "b", shared)
    other = call("b", times, "b", one * shared)
    third = call("b", times, "b", other + one)
    return (third + shared).sum()


def sources_that_meet(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    one, other = call("b", times, "b", shared), call("c", times, "c", shared)
    third = call("b", times, "b", one + other, shared)
    return (one * other * shared + third).sum()


def ring(call: Call, left: int, tensor: Tensor) -> Tensor:
    where = "abc"[left % 3]
    ahead = "abc"[(left - 1) % 3]
    tensor = tensor.sin() * WEIGHTS[where]
    return tensor if left == 0 else call(ahead, ring, call, left - 1, tensor) + tensor


def round_and_round(call: Call) -> Tensor:
    return call("b", ring, call, 4, WEIGHTS["a"].exp()).sum()


def the_same_tensor_twice(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    return call("b", times, "b", shared, shared, shared[1:].sum()).sum()


def views(call: Call) -> Tensor:
    base = WEIGHTS["a"].exp().expand(2, 3)
    square = torch.outer(base[0], base[1])
    result = call("b", times, "b", square.t()[1], square[::2, 1].sum(), base.reshape(6)[1:4])
    return (result.view(3, 1) * result.flip(0)).sum()


def transposed(where: str, tensor: Tensor) -> Tensor:
    return (tensor * WEIGHTS[where]).t()


def a_result_that_is_a_view(call: Call) -> Tensor:
    result = call("b", transposed, "b", torch.outer(WEIGHTS["a"], WEIGHTS["a"]))
    return (result[0] * result[:, 1]).sum()


def several(where: str, tensor: Tensor) -> Any:
    weight = WEIGHTS[where]
    return {"one": [tensor * weight, (tensor.exp() * weight, 3)], "two": weight.exp()}


def parts_of_a_result_that_are_not_used(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    result = call("b", several, "b", shared)
    return (result["one"][0] * shared).sum() + result["one"][1][1]


EASY = [  # every send gets a gradient, so FAST can do it too
    argument_and_result,
    a_leaf_as_argument,
    only_weights_over_there,
    nested,
    a_call_back_to_the_caller,
    a_call_to_oneself,
    to_and_fro,
    sources_that_meet,
    round_and_round,
    the_same_tensor_twice,
    views,
    a_result_that_is_a_view,
    parts_of_a_result_that_are_not_used,
]


def a_result_that_is_not_used(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    call("c", times, "c", shared)
    return (call("b", times, "b", shared) * shared).sum()


def detached(where: str, tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.detach() * WEIGHTS[where] + other


def an_input_that_the_other_side_detached(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    return call("b", detached, "b", shared, shared * 2).sum() + call("c", detached, "c", shared, shared.detach()).sum()


def a_branch_that_ended(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    one = call("b", times, "b", shared)
    other = call("c", times, "c", one)
    return (one * other.detach()).sum() + shared.sum()


def a_branch_that_ended_far_away(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    call("b", relay, call, shared)
    call("b", relay, call, shared).detach()
    return call("b", relay, call, shared * 2).sum() * shared.sum()


def nothing_of_the_calls_is_used(call: Call) -> Tensor:
    shared = WEIGHTS["a"].exp()
    call("b", relay, call, shared)
    return shared.sum()


HARD = [
    a_result_that_is_not_used,
    an_input_that_the_other_side_detached,
    a_branch_that_ended,
    a_branch_that_ended_far_away,
    nothing_of_the_calls_is_used,
]


def name(value: Any) -> str:
    return value.__name__


@pytest.mark.parametrize("way", WAYS, ids=name)
@pytest.mark.parametrize("program", EASY + HARD, ids=name)
def test_the_same_gradients_as_locally(trio: Cluster, program: Callable[[Call], Tensor], way: Call) -> None:
    check(trio, program, way)


@pytest.mark.parametrize("way", [by_sync, by_async, by_chain], ids=name)
@pytest.mark.parametrize("program", EASY, ids=name)
def test_fast_equals_smart(trio: Cluster, program: Callable[[Call], Tensor], way: Call) -> None:
    check(trio, program, way, mode="fast")


@pytest.mark.parametrize("program", EASY + HARD, ids=name)
def test_the_same_gradients_from_any_worker(trio: Cluster, program: Callable[[Call], Tensor]) -> None:
    """Whoever is the root: it calls a, which runs the program."""
    expected = local_gradients(program)
    with trio.on("c"), autograd.context() as context_id:
        assert context_id >> 48 == 2
        loss = rpc.rpc_sync("a", program, (by_sync,))
        autograd.backward(context_id, [loss])
        assert_same(gradients(trio, context_id), expected)


def test_a_wave_that_comes_back_to_its_parent_ends(trio: Cluster) -> None:
    for _ in range(5):
        check(trio, to_and_fro)


def test_a_result_opened_on_a_fresh_thread_meets_what_was_sent(trio: Cluster) -> None:
    """Its node has the lowest sequence number that there is, and must still run before the send waits."""

    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"].exp()
        return (call("b", times, "b", shared) * shared).sum()

    check(trio, program, by_async)


# --- what is recorded -------------------------------------------------------------------------------------------


def what_is_known() -> dict[str, Any]:
    return autograd.debug_info()


def kind_of(tensor: Tensor) -> tuple[str | None, bool, bool]:
    node = tensor.grad_fn
    return (node.name() if node is not None else None, tensor.requires_grad, isinstance(tensor, nn.Parameter))


def look_at(*tensors: Tensor) -> tuple[list[Any], dict[str, Any]]:
    return [kind_of(tensor) for tensor in tensors], autograd.debug_info()


def test_sends_and_recvs_are_nodes_of_the_graph(trio: Cluster) -> None:
    with autograd.context():
        (kind,), known = rpc.rpc_sync("b", look_at, (WEIGHTS["a"],))
        assert kind == ("RecvRpcBackward", True, False)
        assert (known["sends"], known["recvs"]) == (0, 1)
        result = rpc.rpc_sync("b", times, ("b", WEIGHTS["a"]))
        assert kind_of(result) == ("RecvRpcBackward", True, False)
        (context,) = trio["a"].autograd.registry
        assert [node.name() for send in context.sends.values() for node in send.parts] == ["SendRpcBackward"] * 2
        assert known_on(trio, "a") | {"contexts": 1} == {"contexts": 1, "passes": [], "sends": 2, "recvs": 1}


def test_outside_of_a_context_nothing_is_recorded(trio: Cluster) -> None:
    (kind,), known = rpc.rpc_sync("b", look_at, (WEIGHTS["a"],))
    assert kind == (None, True, False)
    assert known == NOTHING


def test_inside_no_grad_nothing_is_recorded_and_no_context_reaches_the_callee(trio: Cluster) -> None:
    with autograd.context(), torch.no_grad():
        kinds, known = rpc.rpc_sync("b", look_at, (WEIGHTS["a"].exp(),))
        assert kinds == [(None, False, False)]
        assert known == NOTHING
        result = rpc.rpc_sync("b", times, ("b", WEIGHTS["a"]))
        assert not result.requires_grad
        for way in (by_async, by_remote, by_proxy_async):
            assert not way("b", times, "b", WEIGHTS["a"]).requires_grad
        assert known_on(trio, "a")["sends"] == known_on(trio, "a")["recvs"] == 0
        assert known_on(trio, "b") == NOTHING


def test_tensors_that_need_no_gradient_record_nothing_though_the_context_goes_along(trio: Cluster) -> None:
    with autograd.context() as context_id:
        kinds, known = rpc.rpc_sync("b", look_at, (torch.ones(2), torch.arange(3)))
        assert kinds == [(None, False, False)] * 2
        assert len(known["contexts"]) == 1
        assert (known["sends"], known["recvs"]) == (0, 0)
        assert (known_on(trio, "a")["sends"], known_on(trio, "a")["recvs"]) == (0, 0)
        assert autograd.get_gradients(context_id) == {}


def multiply(parameter: Tensor, tensor: Tensor) -> Tensor:
    assert isinstance(parameter, nn.Parameter)
    return parameter * tensor


def test_a_parameter_stays_a_parameter_and_keeps_its_graph(trio: Cluster) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    with autograd.context() as context_id:
        (kind,), _ = rpc.rpc_sync("b", look_at, (parameter,))
        assert kind == ("RecvRpcBackward", True, True)
        autograd.backward(context_id, [rpc.rpc_sync("b", multiply, (parameter, torch.tensor([3.0, 4.0]))).sum()])
        assert autograd.get_gradients(context_id)[parameter].tolist() == [3.0, 4.0]


def run_module(module: nn.Module, tensor: Tensor) -> Tensor:
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert len(list(module.parameters())) == 2
    return module(tensor)


def test_a_module_that_is_sent_gets_its_gradients_where_it_came_from(trio: Cluster) -> None:
    module = nn.Linear(3, 2)
    value = torch.rand(4, 3)
    expected = torch.autograd.grad(module(value).pow(2).sum(), list(module.parameters()))
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", run_module, (module, value)).pow(2).sum()])
        found = autograd.get_gradients(context_id)
        torch.testing.assert_close([found[parameter] for parameter in module.parameters()], list(expected))


# --- where gradients go -----------------------------------------------------------------------------------------


def test_grad_is_left_alone(trio: Cluster) -> None:
    before = {}
    for name, weight in WEIGHTS.items():
        weight.grad = before[name] = torch.full((3,), 5.0, dtype=torch.float64)
    with autograd.context() as context_id:
        autograd.backward(context_id, [nested(by_sync)])
        for name, weight in WEIGHTS.items():
            assert weight.grad is before[name]
            assert before[name].tolist() == [5.0] * 3


def test_several_backwards_add_up_and_what_was_asked_for_before_stays(trio: Cluster) -> None:
    expected = local_gradients(sources_that_meet)
    with autograd.context() as context_id:
        loss = sources_that_meet(by_sync)
        autograd.backward(context_id, [loss], retain_graph=True)
        first = gradients(trio, context_id)
        autograd.backward(context_id, [loss], True)
        autograd.backward(context_id, [loss], mode="fast")
        assert_same(first, expected)
        assert_same(gradients(trio, context_id), {name: 3 * gradient for name, gradient in expected.items()})


def test_two_losses_one_after_the_other(trio: Cluster) -> None:
    def two(call: Call) -> tuple[Tensor, Tensor]:
        shared = WEIGHTS["a"].exp()
        one, other = call("b", times, "b", shared), call("c", times, "c", shared)
        return (one * shared).sum(), (one * other).sum()

    expected = local_gradients(lambda call: sum(two(call)))
    with autograd.context() as context_id:
        first, second = two(by_sync)
        autograd.backward(context_id, [first], retain_graph=True)
        autograd.backward(context_id, [second])
        assert_same(gradients(trio, context_id), expected)


def test_losses_of_parts_that_have_nothing_in_common_need_no_retain_graph(trio: Cluster) -> None:
    expected = local_gradients(lambda call: argument_and_result(call) + nested(call))
    with autograd.context() as context_id:
        autograd.backward(context_id, [argument_and_result(by_sync)])
        autograd.backward(context_id, [nested(by_sync)])
        assert_same(gradients(trio, context_id), expected)


def test_several_roots_and_their_gradients(trio: Cluster) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def roots(call: Call) -> list[Tensor]:
        shared = WEIGHTS["a"].exp()
        return [call("b", times, "b", shared), shared * 2, call("c", times, "c", shared).sum()]

    def program(call: Call) -> Tensor:
        one, other, third = roots(call)
        return (one * weight).sum() + (other * 2).sum() + third

    expected = local_gradients(program)
    with autograd.context() as context_id:
        autograd.backward(context_id, roots(by_sync), grad_tensors=[weight, torch.full_like(weight, 2), None])
        assert_same(gradients(trio, context_id), expected)


def test_a_root_that_is_a_leaf_or_was_just_received(trio: Cluster) -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [leaf])
        assert autograd.get_gradients(context_id)[leaf].item() == 1.0
        autograd.backward(context_id, [rpc.rpc_sync("b", torch.mul, (leaf, 3))])
        assert autograd.get_gradients(context_id)[leaf].item() == 4.0
        autograd.backward(context_id, [leaf, rpc.rpc_sync("b", torch.mul, (leaf, 3)), leaf * leaf])
        assert autograd.get_gradients(context_id)[leaf].item() == 12.0


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_roots_may_be_references(trio: Cluster, mode: Any) -> None:
    expected = local_gradients(lambda call: argument_and_result(call) + 2 * nested(call).sum())
    with autograd.context() as context_id:
        mine = rpc.RRef(argument_and_result(by_sync))
        far = rpc.remote("b", nested, (by_sync,))
        autograd.backward(context_id, [mine, far], grad_tensors=[None, torch.tensor(2.0).double()], mode=mode)
        found = {name: gradients_anywhere(trio, context_id, weight) for name, weight in WEIGHTS.items()}
        assert_same(found, expected)


def gradients_anywhere(workers: Cluster, context_id: int, leaf: Tensor) -> Tensor | None:
    """In one process a function may use a weight of any worker; its gradient is where the function ran."""
    found = []
    for worker in workers:
        with workers.on(worker.name):
            if any(context.id == context_id for context in worker.autograd.registry):
                found += [gradient for tensor, gradient in autograd.get_gradients(context_id).items() if tensor is leaf]
    return sum(found) if found else None


def loss_of(tensor: Tensor) -> Tensor:
    return (tensor * WEIGHTS["b"]).pow(2).sum()


def test_backward_of_a_reference(trio: Cluster) -> None:
    expected = local_gradients(lambda call: loss_of(WEIGHTS["a"].exp()))
    with autograd.context() as context_id:
        rpc.remote("b", loss_of, (WEIGHTS["a"].exp(),)).backward(context_id)
        assert_same(gradients(trio, context_id), expected)
    with autograd.context() as context_id:
        rref = rpc.remote("b", loss_of, (WEIGHTS["a"].exp(),))
        rref.backward(context_id, retain_graph=True)
        rref.backward(context_id)
        assert_same(gradients(trio, context_id), {each: expected[each] * 2 for each in "ab"})
    expected = local_gradients(argument_and_result)
    with autograd.context() as context_id:
        rpc.RRef(argument_and_result(by_sync)).backward(context_id)
        assert_same(gradients(trio, context_id), expected)


def test_backward_of_a_reference_without_a_context_is_a_plain_backward_on_its_owner(trio: Cluster) -> None:
    rref = rpc.remote("b", loss_of, (torch.ones(3, dtype=torch.float64),))
    rref.backward()
    expected = 2 * WEIGHTS["b"].detach()
    gradient, WEIGHTS["b"].grad = WEIGHTS["b"].grad, None
    torch.testing.assert_close(gradient, expected)


def my_gradients(context_id: int) -> dict[str, list[float]]:
    return {
        name: gradient.tolist()
        for name, weight in WEIGHTS.items()
        for leaf, gradient in autograd.get_gradients(context_id).items()
        if leaf is weight
    }


def test_each_worker_asks_for_its_own_gradients(trio: Cluster) -> None:
    expected = local_gradients(nested)
    with autograd.context() as context_id:
        loss = nested(by_sync)
        assert my_gradients(context_id) == rpc.rpc_sync("b", my_gradients, (context_id,)) == {}
        autograd.backward(context_id, [loss])
        for name in "abc":
            found = rpc.rpc_sync(name, my_gradients, (context_id,))
            assert list(found) == [name]
            torch.testing.assert_close(torch.tensor(found[name]).double(), expected[name])


# --- FAST -------------------------------------------------------------------------------------------------------


def test_fast_says_which_send_got_no_gradient(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = a_result_that_is_not_used(by_sync)
        with pytest.raises(
            MissingGradientError,
            match=r"on worker 'a': message \d+ to worker 'c' \(float64\[3\] of ExpBackward0\)",
        ):
            autograd.backward(context_id, [loss], mode="fast")


def useless_call(tensor: Tensor) -> Tensor:
    rpc.rpc_sync("c", times, ("c", WEIGHTS["b"].cos()))
    return tensor * WEIGHTS["b"]


def test_fast_says_on_which_worker_it_was(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", useless_call, (WEIGHTS["a"].exp(),)).sum()
        with pytest.raises(
            MissingGradientError, match=r"on worker 'b': message \d+ to worker 'c' \(float64\[3\] of CosBackward0\)"
        ) as caught:
            autograd.backward(context_id, [loss], mode="fast")
        assert "on worker 'a'" not in str(caught.value)


@pytest.mark.parametrize("program", HARD, ids=name)
def test_fast_raises_where_a_send_gets_no_gradient_and_smart_still_works_then(
    trio: Cluster, program: Callable[[Call], Tensor]
) -> None:
    with autograd.context() as context_id:
        with pytest.raises(MissingGradientError, match="got no gradient, so FAST cannot finish"):
            autograd.backward(context_id, [program(by_sync)], mode="fast")
    check(trio, program)


# --- kinds of gradients -----------------------------------------------------------------------------------------


def embed(table: Tensor, indices: Tensor) -> Tensor:
    return functional.embedding(indices, table, sparse=True)


def embed_here(indices: Tensor) -> Tensor:
    return embed(TABLE, indices)


TABLE = torch.arange(12.0).view(4, 3).requires_grad_()
INDICES = torch.tensor([1, 3, 1])


def sparse_of(context_id: int, table: Tensor) -> Tensor:
    found = autograd.get_gradients(context_id)[table]
    assert found.is_sparse
    return found.to_dense()


def test_a_sparse_gradient_on_the_other_side(trio: Cluster) -> None:
    (expected,) = torch.autograd.grad(embed(TABLE, INDICES).pow(2).sum(), TABLE)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", embed_here, (INDICES,)).pow(2).sum()])
        with trio.on("b"):
            torch.testing.assert_close(sparse_of(context_id, TABLE), expected.to_dense())


def test_a_sparse_gradient_comes_back(trio: Cluster) -> None:
    table = TABLE.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(embed(table, INDICES).pow(2).sum(), table)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", embed, (table, INDICES)).pow(2).sum()])
        torch.testing.assert_close(sparse_of(context_id, table), expected.to_dense())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["sparse first", "dense first"])
def test_sparse_and_dense_gradients_of_one_leaf_add_up(trio: Cluster, order: tuple[int, int]) -> None:
    table = TABLE.detach().clone().requires_grad_()
    kinds = [lambda: rpc.rpc_sync("b", embed, (table, INDICES)).sum(), lambda: table.pow(2).sum()]
    dense = table.detach() * 2
    (sparse,) = torch.autograd.grad(embed(table, INDICES).sum(), table)
    with autograd.context() as context_id:
        for index in order:
            autograd.backward(context_id, [kinds[index]()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[table], dense + sparse.to_dense())


def test_sparse_and_dense_gradients_meet_in_one_pass(trio: Cluster) -> None:
    table = TABLE.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((embed(table, INDICES).sum() + table.pow(2).sum()), table)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", embed, (table, INDICES)).sum() + table.pow(2).sum()
        autograd.backward(context_id, [loss])
        torch.testing.assert_close(autograd.get_gradients(context_id)[table], expected)


def weighted(sparse: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(sparse, dense)


def test_a_sparse_tensor_is_sent(trio: Cluster) -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    dense = torch.arange(6.0).view(3, 2).requires_grad_()
    expected = torch.autograd.grad(weighted(sparse * 2, dense * 3).pow(2).sum(), [sparse, dense])
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", weighted, (sparse * 2, dense * 3)).pow(2).sum()])
        found = autograd.get_gradients(context_id)
        torch.testing.assert_close(found[sparse].to_dense(), expected[0].to_dense())
        torch.testing.assert_close(found[dense], expected[1])


class Stubborn(torch.autograd.Function):
    """Has no gradient for its second input."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


def stubborn(where: str, one: Tensor, other: Tensor) -> Tensor:
    return Stubborn.apply(one, other) + WEIGHTS[where]


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_gradients_that_are_none(trio: Cluster, mode: str) -> None:
    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"].exp()
        return call("b", stubborn, "b", shared, WEIGHTS["a"] * 2).sum()

    check(trio, program, mode=mode)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_nothing_but_none_comes_back(trio: Cluster, mode: str) -> None:
    def program(call: Call) -> Tensor:
        result = call("b", stubborn, "b", torch.ones(3).double(), WEIGHTS["a"].exp())
        return call("c", stubborn, "c", result, call("b", times, "b", WEIGHTS["a"])).sum()

    expected = local_gradients(program)
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)], mode=mode)
        found = gradients(trio, context_id)
    assert expected["a"] is None or not expected["a"].any()
    assert found["a"] is None or not found["a"].any()
    torch.testing.assert_close([found["b"], found["c"]], [expected["b"], expected["c"]])


def integer_and_float(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, indices = (tensor * WEIGHTS["b"]).sort()
    return values, indices, torch.zeros(0, 3, dtype=torch.float64) * tensor


def test_results_of_other_dtypes_and_of_no_elements(trio: Cluster) -> None:
    def program(call: Call) -> Tensor:
        values, indices, empty = call("b", integer_and_float, WEIGHTS["a"].exp())
        return (values * indices).sum() + empty.sum()

    check(trio, program)


def complex_power(tensor: Tensor) -> Tensor:
    return (tensor * 1j).exp() * WEIGHTS["b"]


def test_complex_numbers(trio: Cluster) -> None:
    check(trio, lambda call: (call("b", complex_power, WEIGHTS["a"] + 0j).abs() ** 3).sum())


def test_half_precision_inside_autocast(trio: Cluster) -> None:
    one = torch.randn(4, 3, requires_grad=True)
    other = torch.randn(3, 5, requires_grad=True)
    expected = torch.autograd.grad(autocast_mm(one * 2, other).float().pow(2).sum(), [one, other])
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", autocast_mm, (one * 2, other))
        assert result.dtype is torch.bfloat16
        autograd.backward(context_id, [result.float().pow(2).sum()])
        found = autograd.get_gradients(context_id)
        torch.testing.assert_close([found[one], found[other]], list(expected))


def autocast_mm(one: Tensor, other: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return one @ other


# --- changes in place -------------------------------------------------------------------------------------------


def test_a_change_in_place_after_sending_raises_as_it_does_locally(trio: Cluster) -> None:
    with autograd.context() as context_id:
        saved = WEIGHTS["a"].exp()  # exp needs its result for the gradient
        loss = rpc.rpc_sync("b", times, ("b", saved)).sum()
        saved.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


def test_a_change_in_place_after_sending_does_not_reach_what_was_sent(trio: Cluster) -> None:
    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"] * 2
        result = call("b", times, "b", shared.clone() if call is locally else shared)
        shared.add_(1).mul_(WEIGHTS["a"])
        return (result * shared).sum()

    check(trio, program)


def test_a_change_in_place_while_the_other_side_works_does_not_reach_what_was_sent(trio: Cluster) -> None:
    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"] * 2
        if call is locally:
            result = times("b", shared.clone())
            shared.mul_(WEIGHTS["a"])
        else:
            future = rpc.rpc_async("b", times, ("b", shared))
            shared.mul_(WEIGHTS["a"])
            result = future.wait()
        return (result * shared).sum()

    check(trio, program)


KEPT: dict[str, Tensor] = {}


def keep(tensor: Tensor) -> Tensor:
    KEPT["answer"] = tensor * 1
    return KEPT["answer"]


def change_what_was_kept() -> None:
    KEPT.pop("answer").mul_(10)


def test_a_later_call_that_changes_an_answer_in_place_does_not_reach_what_was_sent(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the thread that answered is: all that belongs to a message is done before it leaves."""
    send = PythonLink.send

    def slow(self: Any, message: Any, *rest: Any, **options: Any) -> None:
        send(self, message, *rest, **options)
        if isinstance(message, messages.Reply):
            time.sleep(0.05)

    monkeypatch.setattr(PythonLink, "send", slow)
    with autograd.context() as context_id:
        answer = rpc.rpc_sync("b", keep, (WEIGHTS["a"].exp(),))
        rpc.rpc_sync("b", change_what_was_kept)
        autograd.backward(context_id, [answer.sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[WEIGHTS["a"]], WEIGHTS["a"].exp().detach())


def change_in_place(where: str, one: Tensor, other: Tensor) -> Tensor:
    one.mul_(3)
    other.add_(one).mul_(WEIGHTS[where])
    one[1:] = other[:-1]
    return one * other


def test_received_tensors_may_be_changed_in_place(trio: Cluster) -> None:
    def program(call: Call) -> Tensor:
        one, other = WEIGHTS["a"].exp(), WEIGHTS["a"].sin()
        if call is locally:
            one, other = one.clone(), other.clone()
        result = call("b", change_in_place, "b", one, other)
        result = result * 1 if call is locally else result
        result.mul_(2)
        result[0] = 7.0
        return (result.pow(2) + one).sum() if call is not locally else (result.pow(2) + WEIGHTS["a"].exp()).sum()

    check(trio, program)


def spoil(tensor: Tensor) -> Tensor:
    result = tensor.pow(2)
    tensor.add_(1)
    return result


def test_a_change_in_place_over_there_that_spoils_the_gradient_raises_here(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", spoil, (WEIGHTS["a"].exp(),)).sum()
        with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*on worker 'b'"):
            autograd.backward(context_id, [loss])


# --- other features of torch ------------------------------------------------------------------------------------


def mish_mash(tensor: Tensor) -> Tensor:
    return tensor.exp().sin() * WEIGHTS["b"]


def checkpointed(tensor: Tensor, use_reentrant: bool) -> Tensor:
    return checkpoint(mish_mash, tensor, use_reentrant=use_reentrant)


def test_checkpoint_over_there(trio: Cluster) -> None:
    check(trio, lambda call: call("b", checkpointed, WEIGHTS["a"].exp(), False).pow(2).sum())


@pytest.mark.parametrize("way", [by_sync, by_async, by_remote], ids=name)
def test_checkpoint_around_a_call(trio: Cluster, way: Call) -> None:
    """It calls again in the backward."""

    def program(call: Call) -> Tensor:
        shared = WEIGHTS["a"].exp()
        return checkpoint(lambda tensor: call("b", mish_mash, tensor.sin()).cos(), shared, use_reentrant=False).sum()

    check(trio, program, way)


@pytest.mark.parametrize("where", ["here", "over there"])
def test_checkpoint_with_use_reentrant_is_a_clear_error(trio: Cluster, where: str) -> None:
    with autograd.context() as context_id:
        if where == "here":
            loss = checkpointed(rpc.rpc_sync("b", mish_mash, (WEIGHTS["a"],)), True).sum()
        else:
            loss = rpc.rpc_sync("b", checkpointed, (WEIGHTS["a"].exp(), True)).sum()
        with pytest.raises(RuntimeError, match=r"(?s)use_reentrant=True.*use_reentrant=False"):
            autograd.backward(context_id, [loss])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        return gradient * 3 * tensor**2


def cube(where: str, tensor: Tensor) -> Tensor:
    return Cube.apply(tensor * WEIGHTS[where])


def test_custom_functions_on_either_side(trio: Cluster) -> None:
    check(trio, lambda call: Cube.apply(call("b", cube, "b", Cube.apply(WEIGHTS["a"]))).sum())


_compiled: dict[str, Any] = {}


def run_compiled(tensor: Tensor) -> Tensor:
    if "module" not in _compiled:
        _compiled["plain"] = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        _compiled["module"] = torch.compile(_compiled["plain"], backend="aot_eager")
    return _compiled["module"](tensor)


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_a_compiled_module(trio: Cluster) -> None:
    value = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", run_compiled, (value.exp(),)).pow(2).sum()])
        found = autograd.get_gradients(context_id)[value]
        with trio.on("b"):
            theirs = autograd.get_gradients(context_id)
        plain = _compiled["plain"]
        expected = torch.autograd.grad(plain(value.exp()).pow(2).sum(), [value, *plain.parameters()])
        torch.testing.assert_close([found, *(theirs[each] for each in plain.parameters())], list(expected))


def test_an_rnn_with_hidden_state_that_travels(trio: Cluster) -> None:
    cell = nn.GRUCell(3, 3).double()

    def steps(call: Call) -> Tensor:
        hidden = WEIGHTS["a"].unsqueeze(0)
        for _ in range(4):
            hidden = call("b", cell, WEIGHTS["b"].unsqueeze(0), hidden)
        return hidden.sum()

    expected = torch.autograd.grad(steps(locally), [WEIGHTS["a"], WEIGHTS["b"], *cell.parameters()])
    with autograd.context() as context_id:
        autograd.backward(context_id, [steps(by_sync)])
        found = autograd.get_gradients(context_id)
        leaves = [WEIGHTS["a"], WEIGHTS["b"], *cell.parameters()]  # all live here; the cell is sent each time
        torch.testing.assert_close([found[leaf] for leaf in leaves], list(expected))


# --- hooks ------------------------------------------------------------------------------------------------------

SEEN: list[Any] = []


def see(gradient: Tensor | None) -> None:
    SEEN.append(None if gradient is None else gradient.clone())


def seen() -> list[Any]:
    found = SEEN.copy()
    SEEN.clear()
    return found


def hooked_times(where: str, tensor: Tensor) -> Tensor:
    tensor.register_hook(see)
    one, other = tensor * WEIGHTS[where], tensor.exp()
    return one * other


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("where", ["sent", "received", "a leaf", "a result"])
def test_a_hook_is_called_once_with_the_whole_gradient(trio: Cluster, where: str, mode: Any) -> None:
    def program(call: Call) -> Tensor:
        leaf = WEIGHTS["a"].detach().clone().requires_grad_()
        shared = leaf.exp()
        if where == "sent":
            shared.register_hook(see)
        elif where == "a leaf":
            leaf.register_hook(see)
        function = hooked_times if where == "received" else times
        one, other = call("b", function, "b", shared * 1), call("c", times, "c", leaf)
        third = call("b", times, "b", shared, leaf)
        if where == "a result":
            one.register_hook(see)
        return (one * other * shared + call("c", times, "c", one) + leaf + third).sum()

    program(locally).backward()
    expected = seen()
    assert len(expected) == 1
    WEIGHTS["b"].grad = WEIGHTS["c"].grad = None
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)], mode=mode)
        torch.testing.assert_close(seen(), expected)


@pytest.mark.parametrize("where", ["sent", "received", "a leaf", "a result"])
def test_a_hook_changes_the_gradient(trio: Cluster, where: str) -> None:
    def program(call: Call) -> Tensor:
        leaf, weight = WEIGHTS["a"], torch.tensor([1.0, -2.0, 3.0]).double()
        shared = leaf.exp()
        handle = (leaf if where == "a leaf" else shared).register_hook(
            lambda gradient: gradient * weight if where in ("sent", "a leaf") else None
        )
        one = call("b", doubling_times if where == "received" else times, "b", shared)
        if where == "a result":
            one.register_hook(lambda gradient: gradient * weight)
        handles.append(handle)
        return (one * shared + call("c", times, "c", leaf)).sum()

    handles: list[Any] = []
    expected = local_gradients(program)
    handles.pop().remove()
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)])
        assert_same(gradients(trio, context_id), expected)


def doubling_times(where: str, tensor: Tensor) -> Tensor:
    tensor = tensor * 1
    tensor.register_hook(lambda gradient: gradient * 2)
    return tensor * WEIGHTS[where]


def with_node_hooks(where: str, tensor: Tensor) -> Tensor:
    """Hooks of the node that stands for a received tensor, which fire only when torch runs it."""
    node: Any = tensor.grad_fn
    assert node.name() == "RecvRpcBackward"
    node.register_prehook(lambda taken: see(taken[0]))
    node.register_hook(lambda given, taken: see(taken[0]))
    return tensor * WEIGHTS[where]


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_hooks_of_a_recv_itself_fire_once_with_the_whole_gradient(trio: Cluster, mode: Any) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", with_node_hooks, ("b", WEIGHTS["a"].exp())).sum()], mode=mode)
        torch.testing.assert_close(gradients(trio, context_id)["a"], WEIGHTS["a"].exp() * WEIGHTS["b"])
    torch.testing.assert_close(seen(), [WEIGHTS["b"].detach()] * 2)


def test_the_hook_of_a_tensor_that_gets_no_gradient_is_not_called(trio: Cluster) -> None:
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", several, ("b", WEIGHTS["a"].exp()))
        result["two"].register_hook(see)
        autograd.backward(context_id, [result["one"][0].sum()])
        assert seen() == []


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_hook_after_accumulation_sees_the_gradient_of_the_context_in_grad(trio: Cluster, mode: Any) -> None:
    leaf = WEIGHTS["a"]
    leaf.grad = kept = torch.full((3,), 5.0).double()
    leaf.register_post_accumulate_grad_hook(lambda tensor: see(tensor.grad))
    (expected,) = torch.autograd.grad(both_use(locally), leaf)
    with autograd.context() as context_id:
        autograd.backward(context_id, [both_use(by_sync)], mode=mode)
        torch.testing.assert_close(seen(), [expected])
        assert leaf.grad is kept
        assert kept.tolist() == [5.0] * 3
        torch.testing.assert_close(autograd.get_gradients(context_id)[leaf], expected)
        autograd.backward(context_id, [both_use(by_sync)])
        torch.testing.assert_close(seen(), [2 * expected])
    leaf.grad = None


def both_use(call: Call) -> Tensor:
    leaf = WEIGHTS["a"]
    return (call("b", times, "b", leaf) + call("c", times, "c", leaf)).sum() + leaf.pow(2).sum()


@pytest.mark.parametrize("change", ["in place", "replace", "remove"])
def test_a_hook_after_accumulation_may_change_the_gradient(trio: Cluster, change: str) -> None:
    leaf = WEIGHTS["a"]
    (expected,) = torch.autograd.grad(both_use(locally), leaf)

    def hook(tensor: Tensor) -> None:
        if change == "in place":
            tensor.grad.mul_(2)
        elif change == "replace":
            tensor.grad = tensor.grad * 2
        else:
            tensor.grad = None

    leaf.register_post_accumulate_grad_hook(hook)
    with autograd.context() as context_id:
        autograd.backward(context_id, [both_use(by_sync)])
        assert leaf.grad is None
        found = autograd.get_gradients(context_id)
        if change == "remove":
            assert leaf not in found
        else:
            torch.testing.assert_close(found[leaf], 2 * expected)


HOOKED = nn.Linear(3, 3).double()


def run_hooked(tensor: Tensor) -> Tensor:
    return HOOKED(tensor).tanh() + tensor


def test_full_backward_hooks_of_a_module(trio: Cluster) -> None:
    handles = [
        HOOKED.register_full_backward_hook(lambda module, given, taken: SEEN.append((given, taken))),
        HOOKED.register_full_backward_pre_hook(lambda module, taken: SEEN.append(taken)),
    ]
    try:
        run_hooked(WEIGHTS["a"].exp().unsqueeze(0)).sum().backward()
        expected = seen()
        assert len(expected) == 2
        WEIGHTS["a"].grad = None
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", run_hooked, (WEIGHTS["a"].exp().unsqueeze(0),)).sum()])
            torch.testing.assert_close(seen(), expected)
    finally:
        HOOKED.zero_grad()
        for handle in handles:
            handle.remove()


def test_retain_grad_works_on_tensors_that_are_no_leaves(trio: Cluster) -> None:
    def program(call: Call) -> list[Tensor]:
        shared = WEIGHTS["a"].exp()
        result = call("b", times, "b", shared)
        shared.retain_grad()
        result.retain_grad()
        return [(result * shared).sum(), shared, result]

    loss, *expected = program(locally)
    loss.backward()
    with autograd.context() as context_id:
        loss, *found = program(by_sync)
        autograd.backward(context_id, [loss])
        torch.testing.assert_close([each.grad for each in found], [each.grad for each in expected])
    WEIGHTS["a"].grad = WEIGHTS["b"].grad = None


def calling_hook(gradient: Tensor) -> Tensor:
    return rpc.rpc_sync("c", torch.mul, (gradient, 2))


def with_calling_hook(tensor: Tensor) -> Tensor:
    result = tensor * WEIGHTS["b"]
    result.register_hook(calling_hook)
    return result


def test_a_hook_may_call_other_workers(trio: Cluster) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", with_calling_hook, (WEIGHTS["a"] * 1,)).sum()])
        torch.testing.assert_close(gradients(trio, context_id)["a"], 2 * WEIGHTS["b"].detach())


# --- whose memory it is -----------------------------------------------------------------------------------------


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def storages(tensors: Sequence[Tensor]) -> set[int]:
    return {
        (tensor.coalesce().values() if tensor.is_sparse else tensor).untyped_storage().data_ptr() for tensor in tensors
    }


def test_gradients_of_several_leaves_do_not_share_memory(trio: Cluster) -> None:
    leaves = [torch.ones(3, requires_grad=True) for _ in range(4)]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", double, (leaves[0] + leaves[1] + leaves[2],)).sum()])
        autograd.backward(context_id, [(leaves[3] + leaves[0]).sum()])
        found = autograd.get_gradients(context_id)
        assert len(storages(list(found.values()))) == 4
        found[leaves[1]].zero_()
        assert [found[leaf].tolist() for leaf in leaves] == [[3.0] * 3, [0.0] * 3, [2.0] * 3, [1.0] * 3]


def add_up(*tensors: Tensor) -> Tensor:
    return sum(tensors)


def test_gradients_that_came_in_one_message_do_not_share_memory(trio: Cluster) -> None:
    leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", add_up, (*leaves,)).sum()])
        found = autograd.get_gradients(context_id)
        assert len(storages(list(found.values()))) == 3
        found[leaves[1]].zero_()
        assert [found[leaf].tolist() for leaf in leaves] == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


def test_sparse_gradients_do_not_share_memory(trio: Cluster) -> None:
    tables = [TABLE.detach().clone().requires_grad_() for _ in range(2)]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", embed, (tables[0] + tables[1], INDICES)).sum()])
        found = autograd.get_gradients(context_id)
        before = found[tables[1]].to_dense()
        found[tables[0]].mul_(0)
        torch.testing.assert_close(found[tables[1]].to_dense(), before)


def test_a_gradient_does_not_share_memory_with_what_the_user_gave_or_keeps(trio: Cluster) -> None:
    leaf, given = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    kept: list[Tensor] = []
    with autograd.context() as context_id:
        autograd.backward(context_id, [leaf], grad_tensors=[given])
        autograd.get_gradients(context_id)[leaf].zero_()
        assert given.tolist() == [2.0] * 3
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", double, (leaf * 1,))
        autograd.backward(context_id, [result], grad_tensors=[given])
        autograd.get_gradients(context_id)[leaf].zero_()
        assert given.tolist() == [2.0] * 3
    with autograd.context() as context_id:
        shared = leaf * 1
        shared.register_hook(kept.append)
        autograd.backward(context_id, [rpc.rpc_sync("b", double, (shared,)).sum()])
        assert autograd.get_gradients(context_id)[leaf].tolist() == kept[0].tolist()


class ConstantGradient(torch.autograd.Function):
    kept = torch.full((3,), 7.0)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ConstantGradient.kept


def test_a_gradient_does_not_share_memory_with_a_tensor_that_a_custom_function_keeps(trio: Cluster) -> None:
    """As locally, where ``.grad`` is a copy if anybody else holds the tensor."""
    leaf = torch.ones(3, requires_grad=True)
    ConstantGradient.apply(leaf).sum().backward()
    leaf.grad.zero_()
    assert ConstantGradient.kept.tolist() == [7.0] * 3
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", double, (ConstantGradient.apply(leaf),)).sum()])
        autograd.get_gradients(context_id)[leaf].zero_()
    assert ConstantGradient.kept.tolist() == [7.0] * 3


ALIVE: weakref.WeakSet[Tensor] = weakref.WeakSet()


def remembered(tensor: Tensor) -> Tensor:
    result = tensor.exp() * WEIGHTS["b"]
    ALIVE.update([tensor, result])
    return result


@pytest.mark.parametrize("create_graph", [False, True])
def test_when_a_context_has_ended_its_tensors_are_freed(trio: Cluster, create_graph: bool) -> None:
    with autograd.context() as context_id:
        shared = WEIGHTS["a"].exp()
        result = rpc.rpc_sync("b", remembered, (shared,))
        ALIVE.update([shared, result])
        loss = (result * shared).sum()
        autograd.backward(context_id, [loss], create_graph=create_graph)
        assert len(ALIVE) >= 2
    del shared, result, loss
    assert eventually(lambda: gc.collect() >= 0 and not ALIVE), list(ALIVE)


# --- many at once -----------------------------------------------------------------------------------------------


def scaled(where: str, factor: int, tensor: Tensor) -> Tensor:
    return (WEIGHTS[where] * tensor * factor).sum()


def test_many_contexts_at_once_share_parameters(trio: Cluster) -> None:
    barrier = threading.Barrier(8)

    def one(factor: int) -> None:
        with trio.on("a"):
            barrier.wait(PATIENCE)
            for _ in range(5):
                leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
                with autograd.context() as context_id:
                    shared = leaf * 1
                    loss = rpc.rpc_sync("b", scaled, ("b", factor, shared)) + rpc.rpc_sync(
                        "c", scaled, ("c", factor, shared)
                    )
                    autograd.backward(context_id, [loss + shared.sum()])
                    mine = autograd.get_gradients(context_id)
                    assert list(mine) == [leaf]
                    torch.testing.assert_close(
                        mine[leaf], factor * (WEIGHTS["b"] + WEIGHTS["c"]).detach() + torch.ones(3).double()
                    )
                    found = gradients(trio, context_id)
                    assert found["b"].tolist() == found["c"].tolist() == [float(factor)] * 3

    for join in [in_thread(lambda factor=factor: one(factor)) for factor in range(1, 9)]:
        join()


def test_many_hooks_after_accumulation_at_once_see_the_gradient_of_their_own_context(trio: Cluster) -> None:
    wrong: list[Any] = []
    WEIGHTS["b"].register_post_accumulate_grad_hook(lambda weight: wrong.append(weight.grad.tolist()))

    def one(factor: int) -> None:
        with trio.on("a"):
            for _ in range(3):
                with autograd.context() as context_id:
                    tensor = torch.ones(3, dtype=torch.float64)
                    autograd.backward(context_id, [rpc.rpc_sync("b", scaled, ("b", factor, tensor))])
                    assert gradients(trio, context_id)["b"].tolist() == [float(factor)] * 3

    for join in [in_thread(lambda factor=factor: one(factor)) for factor in range(1, 5)]:
        join()
    assert sorted(wrong) == [[float(factor)] * 3 for factor in range(1, 5) for _ in range(3)]
    assert WEIGHTS["b"].grad is None


@pytest.mark.parametrize("mode", ["smart", "smart, and they meet", "fast"])
def test_many_threads_run_a_backward_in_one_context_at_once(trio: Cluster, mode: str) -> None:
    shared = WEIGHTS["a"].exp()
    count = 1 if mode == "fast" else 6
    with autograd.context() as context_id:
        losses = []
        for factor in range(1, count + 1):
            tensor = shared * 1 if mode == "smart, and they meet" else WEIGHTS["a"] * 1
            result = rpc.rpc_sync("b", scaled, ("b", factor, tensor))
            losses.append(result + (tensor * 0).sum())
        barrier = threading.Barrier(count)

        def one(loss: Tensor) -> None:
            with trio.on("a"):
                barrier.wait(PATIENCE)
                autograd.backward(context_id, [loss], retain_graph=True, mode="fast" if mode == "fast" else "smart")

        for join in [in_thread(lambda loss=loss: one(loss)) for loss in losses]:
            join()
        total = sum(range(1, count + 1))
        inner = torch.ones(3).double() if mode != "smart, and they meet" else shared.detach()
        found = gradients(trio, context_id)
        torch.testing.assert_close(found["a"], total * WEIGHTS["b"].detach() * inner)
        other = WEIGHTS["a"].detach() if mode != "smart, and they meet" else shared.detach()
        torch.testing.assert_close(found["b"], total * other)


def test_calls_of_many_threads_in_one_context(trio: Cluster) -> None:
    """Futures that are done on any thread, in any order."""
    shared = WEIGHTS["a"].exp()

    def program(call: Call) -> Tensor:
        if call is locally:
            results = [scaled("bc"[number % 2], number, shared) for number in range(20)]
        else:
            futures = [
                rpc.rpc_async("bc"[number % 2], scaled, ("bc"[number % 2], number, shared)) for number in range(20)
            ]
            results = torch.futures.wait_all(futures)
        return (torch.stack(results) ** 2).sum()

    expected = local_gradients(program)
    shared = WEIGHTS["a"].exp()
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)])
        assert_same(gradients(trio, context_id), expected)


# --- seeing it --------------------------------------------------------------------------------------------------


def test_the_creator_stands_in_the_top_bits_of_a_context_id(trio: Cluster) -> None:
    for number, worker in enumerate("abc"):
        with trio.on(worker):
            ids = []
            for _ in range(3):
                with autograd.context() as context_id:
                    ids.append(context_id)
            assert [each >> 48 for each in ids] == [number] * 3
            assert len(set(ids)) == 3


def test_repr_of_a_context(trio: Cluster) -> None:
    with autograd.context() as context_id:
        loss = argument_and_result(by_sync)
        (context,) = trio["a"].autograd.registry
        assert repr(context) == (
            f"<Context {context_id} of worker 0: 1 sends, 1 recvs, 0 gradients, 0 passes, told [1]>"
        )
        autograd.backward(context_id, [loss])
        assert "1 gradients" in repr(context)
        assert known_on(trio, "a")["contexts"] == [repr(context)]
    assert eventually(lambda: "ended" in repr(context))


def test_debug_info_shows_a_pass_that_runs(trio: Cluster) -> None:
    texts: dict[str, Any] = {}
    with autograd.context() as context_id:
        shared = WEIGHTS["a"].exp()
        result = rpc.rpc_sync("b", times, ("b", shared))
        loss = (result * shared).sum()

        def hook(_: Tensor) -> None:
            assert eventually(lambda: "blocked" in known_on(trio, "a")["passes"][0])
            texts.update({name: known_on(trio, name)["passes"] for name in "abc"})

        WEIGHTS["b"].register_hook(hook)
        autograd.backward(context_id, [loss])
    assert texts["c"] == []
    (root,), (other,) = texts["a"], texts["b"]
    for text in (root, other):
        assert re.match(rf"<Pass 0:\d+ in context {context_id}: ", text)
    assert re.search(r"""missing: \["message \d+ to worker 'b' \(float64\[3\] of ExpBackward0\)"\]""", root)
    assert re.search(r"""came: \["message \d+ to worker 'a' """, other)


# --- the end of a context ---------------------------------------------------------------------------------------


def hold(gate: Gate, tensor: Tensor) -> Tensor:
    gate.pass_through()
    return rpc.rpc_sync("c", times, ("c", tensor))


def relay_to_c(tensor: Tensor) -> Tensor:
    return rpc.rpc_sync("c", times, ("c", tensor))


def contexts(workers: Cluster) -> dict[str, int]:
    return {worker.name: len(worker.autograd.registry) for worker in workers}


def test_leaving_a_context_drops_it_on_every_worker_that_it_reached(trio: Cluster) -> None:
    with autograd.context():
        assert contexts(trio) == {"a": 1, "b": 0, "c": 0}
        rpc.rpc_sync("b", times, ("b", WEIGHTS["a"]))
        assert contexts(trio) == {"a": 1, "b": 1, "c": 0}
        rpc.rpc_sync("b", relay_to_c, (WEIGHTS["a"],))
        assert contexts(trio) == {"a": 1, "b": 1, "c": 1}
    assert contexts(trio)["a"] == 0
    assert_nothing_left(trio)


def test_leaving_a_context_by_an_exception_drops_it_too(trio: Cluster) -> None:
    def program() -> None:
        with autograd.context():
            rpc.rpc_sync("b", relay_to_c, (WEIGHTS["a"],))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert_nothing_left(trio)


def test_leaving_a_context_while_calls_are_in_flight(trio: Cluster) -> None:
    gate = Gate()
    with autograd.context():
        future = rpc.rpc_async("b", hold, (gate, WEIGHTS["a"].exp()))
        rref = rpc.remote("b", hold, (gate, WEIGHTS["a"].exp()))
        gate.wait_entered()
        assert contexts(trio)["b"] == 1
    assert_no_contexts(trio)
    gate.open()
    assert future.wait().shape == rref.to_here().shape == (3,)
    assert known_on(trio, "b") == known_on(trio, "c") == NOTHING


def test_a_late_call_of_a_context_that_was_dropped_leaves_nothing(trio: Cluster) -> None:
    with autograd.context():
        rpc.rpc_sync("b", double, (WEIGHTS["a"],))
        fault = trio.fault("delay", messages.Call, receiver="b", count=1, seconds=0.1)
        future = rpc.rpc_async("b", double, (WEIGHTS["a"],))
    assert fault.hits == 1
    future.wait()
    assert_nothing_left(trio)


def test_contexts_of_a_lost_creator_are_dropped(trio: Cluster) -> None:
    gate = Gate()

    def one() -> None:
        with trio.on("a"), autograd.context():
            rpc.rpc_sync("b", relay_to_c, (WEIGHTS["a"],))
            pass_through(gate)

    join = in_thread(one)
    gate.wait_entered()
    assert contexts(trio) == {"a": 1, "b": 1, "c": 1}
    trio.kill("a")
    assert_nothing_left(trio)
    gate.open()
    join()
    with trio.on("b"), autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("c", times, ("c", WEIGHTS["b"])).sum()])
        assert WEIGHTS["b"] in autograd.get_gradients(context_id)


# --- derivatives of derivatives ---------------------------------------------------------------------------------


def penalty(where: str, context_id: int) -> Tensor:
    """Of the gradient that a worker's weight got, on that worker."""
    return autograd.get_gradients(context_id)[WEIGHTS[where]].pow(2).sum()


SMOOTH = [
    argument_and_result,
    only_weights_over_there,
    nested,
    a_call_back_to_the_caller,
    a_call_to_oneself,
    to_and_fro,
    sources_that_meet,
    round_and_round,
    views,
    a_result_that_is_a_view,
    parts_of_a_result_that_are_not_used,
    a_branch_that_ended,
]


def local_second(program: Callable[[Call], Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradients, and those with the second derivatives added: of the squares of all gradients."""
    leaves = list(WEIGHTS.values())
    first = torch.autograd.grad(program(locally), leaves, create_graph=True, allow_unused=True)
    square = sum(gradient.pow(2).sum() for gradient in first if gradient is not None)
    second = torch.autograd.grad(square, leaves, allow_unused=True)
    both = [
        one if other is None else other if one is None else one + other
        for one, other in zip(first, second, strict=True)
    ]
    return dict(zip(WEIGHTS, first, strict=True)), dict(zip(WEIGHTS, both, strict=True))


@pytest.mark.parametrize(
    ("program", "mode"),
    [(each, "smart") for each in SMOOTH] + [(each, "fast") for each in SMOOTH if each in EASY],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_second_derivatives_equal_local_ones(trio: Cluster, program: Callable[[Call], Tensor], mode: Any) -> None:
    first, both = local_second(program)
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)], create_graph=True, mode=mode)
        assert_same(gradients(trio, context_id), first)
        squares = [rpc.rpc_sync(each, penalty, (each, context_id)) for each, g in first.items() if g is not None]
        autograd.backward(context_id, [sum(squares)])
        assert_same(gradients(trio, context_id), both)


def test_second_derivatives_inside_no_grad(trio: Cluster) -> None:
    """Where backward is called says nothing, as in torch."""
    program = SMOOTH[0]
    first, both = local_second(program)
    with autograd.context() as context_id:
        loss = program(by_sync)
        with torch.no_grad():
            autograd.backward(context_id, [loss], create_graph=True)
        squares = [rpc.rpc_sync(each, penalty, (each, context_id)) for each, g in first.items() if g is not None]
        autograd.backward(context_id, [sum(squares)])
        assert_same(gradients(trio, context_id), both)


def test_third_derivatives(trio: Cluster) -> None:
    leaf = WEIGHTS["a"]

    def program(call: Call) -> Tensor:
        return (call("b", times, "b", leaf.exp()) * leaf.sin()).prod()

    one = torch.autograd.grad(program(locally), leaf, create_graph=True)[0]
    two = torch.autograd.grad(one.prod(), leaf, create_graph=True)[0]
    three = torch.autograd.grad(two.prod(), leaf)[0]
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(by_sync)], create_graph=True)
        first = autograd.get_gradients(context_id)[leaf]
        autograd.backward(context_id, [first.prod()], create_graph=True)
        second = autograd.get_gradients(context_id)[leaf] - first
        torch.testing.assert_close(second, two)
        before = autograd.get_gradients(context_id)[leaf]
        autograd.backward(context_id, [second.prod()])
        # ``second`` is a difference of sums; the derivative of ``first`` in it cancels out.
        torch.testing.assert_close(autograd.get_gradients(context_id)[leaf] - before, three)


def test_second_derivatives_equal_finite_differences(trio: Cluster) -> None:
    """No other autograd as the oracle: the gradient a little further on."""
    leaf, direction, little = WEIGHTS["a"], torch.tensor([1.0, -2.0, 0.5]).double(), 1e-5

    def gradient() -> Tensor:
        with autograd.context() as context_id:
            autograd.backward(context_id, [sources_that_meet(by_sync)])
            return autograd.get_gradients(context_id)[leaf]

    with torch.no_grad():
        leaf += little * direction
    above = gradient()
    with torch.no_grad():
        leaf -= 2 * little * direction
    below = gradient()
    with torch.no_grad():
        leaf += little * direction
    with autograd.context() as context_id:
        autograd.backward(context_id, [sources_that_meet(by_sync)], create_graph=True)
        first = autograd.get_gradients(context_id)[leaf]
        autograd.backward(context_id, [first @ direction])
        product = autograd.get_gradients(context_id)[leaf] - first
        torch.testing.assert_close(product.detach(), (above - below) / (2 * little), rtol=1e-6, atol=1e-8)


def test_without_create_graph_gradients_have_no_history(trio: Cluster) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [nested(by_sync)], retain_graph=True)
        assert not any(gradient.requires_grad for gradient in gradients(trio, context_id).values())
        assert known_on(trio, "a")["sends"] == 1
    with autograd.context() as context_id:
        autograd.backward(context_id, [nested(by_sync)], create_graph=True)
        assert all(gradient.requires_grad for gradient in gradients(trio, context_id).values())


# --- a leaf that is itself a root, or was sent itself ---------------------------------------------------------------


def test_a_leaf_gets_a_gradient_of_its_own_type(trio: Cluster) -> None:
    leaf = WEIGHTS["a"]
    with autograd.context() as context_id:
        autograd.backward(context_id, [leaf], grad_tensors=[torch.ones(3, dtype=torch.float32)])
        assert autograd.get_gradients(context_id)[leaf].dtype is torch.float64
    with autograd.context() as context_id, pytest.raises(RuntimeError, match=r"[Cc]omplex"):
        autograd.backward(context_id, [leaf], grad_tensors=[torch.ones(3, dtype=torch.complex128)])


@pytest.mark.parametrize("sent", [False, True])
def test_a_gradient_in_a_context_needs_none_itself(trio: Cluster, sent: bool) -> None:
    leaf, given = WEIGHTS["a"], torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        root = rpc.rpc_sync("b", torch.Tensor.clone, (leaf,)) if sent else leaf
        autograd.backward(context_id, [root], grad_tensors=[given])
        found = autograd.get_gradients(context_id)[leaf]
    assert not found.requires_grad
    assert found.data_ptr() != given.data_ptr()


def turned(tensor: Tensor) -> Tensor:
    return (tensor + KEPT["weight"]).t() * 3


def test_a_leaf_does_not_take_over_memory_that_is_being_sent(trio: Cluster) -> None:
    KEPT["weight"] = torch.ones(100, 100, dtype=torch.float64, requires_grad=True)
    KEPT["weight"].register_post_accumulate_grad_hook(lambda weight: weight.grad.zero_())  # type: ignore[union-attr]
    fault = trio.fault("delay", messages.Gradients, sender="b", count=1, seconds=0.05)
    leaf = torch.ones(100, 100, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(rpc.rpc_sync("b", turned, (leaf,)) * 1).sum()])
        assert autograd.get_gradients(context_id)[leaf].unique().tolist() == [3.0]
    assert fault.hits == 1
    del KEPT["weight"]


# --- the memory of a gradient -----------------------------------------------------------------------------------------


def sparse(rows: int = 4) -> Tensor:
    values = torch.full((2, 2), 2.0)
    return torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values, (rows, 2), check_invariants=False)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_a_gradient_that_was_given_is_not_the_one_that_is_kept(
    trio: Cluster, layout: str, needs_gradient: bool
) -> None:
    given = sparse() if layout == "sparse" else sparse().to_dense()
    given.requires_grad_(needs_gradient)
    one, other = torch.ones(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [one, other], grad_tensors=[given, given])
        found = autograd.get_gradients(context_id)
    found[one].neg_()
    for tensor in (given.detach(), found[other]):
        assert tensor.to_dense()[1].tolist() == [2.0, 2.0]


class Give(torch.autograd.Function):
    """Hands its leaf the gradient that it is told to."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return leaf * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.make(), None


def sparse_kept() -> Tensor:
    made = KEPT["gradient"] = sparse()
    return made


def view_kept() -> Tensor:
    made = sparse().to_dense()
    KEPT["gradient"] = made[1]
    return made


def dlpack_kept() -> Tensor:
    made = sparse().to_dense()
    KEPT["gradient"] = torch.utils.dlpack.to_dlpack(made)
    return made


@pytest.mark.parametrize("make", [sparse_kept, view_kept, dlpack_kept])
def test_what_a_function_kept_of_a_gradient_does_not_change_with_it(trio: Cluster, make: Any) -> None:
    leaf = torch.ones(4, 2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [Give.apply(leaf, make).sum()])
        autograd.get_gradients(context_id)[leaf].neg_()
    kept = KEPT.pop("gradient")
    tensor = kept if isinstance(kept, Tensor) else torch.utils.dlpack.from_dlpack(kept)
    assert set(tensor.to_dense().unique().tolist()) <= {0.0, 2.0}


def values_kept() -> Tensor:
    made = sparse()
    KEPT["gradient"] = made._values()
    return made


def address_kept() -> Tensor:
    made = sparse().to_dense()
    KEPT["address"] = made.data_ptr()
    return made


@pytest.mark.parametrize("make", [values_kept, address_kept])
def test_a_gradient_that_nothing_else_holds_is_taken_over_as_it_is_locally(trio: Cluster, make: Any) -> None:
    def address(gradient: Tensor) -> int:
        return (gradient._values() if gradient.is_sparse else gradient).data_ptr()

    def made_at() -> int:
        return KEPT.pop("address") if "address" in KEPT else KEPT.pop("gradient").data_ptr()

    leaf = torch.ones(4, 2, requires_grad=True)
    Give.apply(leaf, make).sum().backward()
    assert leaf.grad is not None
    assert address(leaf.grad) == made_at()
    with autograd.context() as context_id:
        autograd.backward(context_id, [Give.apply(leaf, make).sum()])
        assert address(autograd.get_gradients(context_id)[leaf]) == made_at()


def made_by_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4, 2)


@pytest.mark.parametrize(
    "make", [made_by_inference, lambda: torch.ones(1, 1).expand(4, 2), lambda: torch.ones(9, 2)[:4]]
)
def test_any_gradient_may_be_changed_in_place_and_keeps_no_more_than_it_needs(trio: Cluster, make: Any) -> None:
    leaf = torch.ones(4, 2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [Give.apply(leaf, make).sum()])
        found = autograd.get_gradients(context_id)[leaf]
    assert found.add_(1).eq(2).all()
    assert found.untyped_storage().nbytes() == found.nbytes


def test_a_gradient_on_another_device_is_refused_as_it_is_locally(trio: Cluster) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id, pytest.raises(RuntimeError, match="expected device cpu"):
        autograd.backward(context_id, [leaf], grad_tensors=[torch.ones(3, device="meta")])


# --- autocast -------------------------------------------------------------------------------------------------------

#: Both calls have cast the weight before either leaves autocast, which clears torch's cache.
BOTH_HAVE_CAST = threading.Barrier(2)


def in_bfloat16(tensor: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = tensor @ KEPT["weight"]
        BOTH_HAVE_CAST.wait(PATIENCE)
    return result.float()


def test_calls_at_the_same_time_do_not_share_the_weights_that_autocast_has_cast(trio: Cluster) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = KEPT["weight"] = torch.randn(16, 16, generator=generator).requires_grad_()
    batches = [torch.randn(8, 16, generator=generator) for _ in range(2)]
    expected = torch.zeros(16, 16)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = batch @ weight
        expected += torch.autograd.grad(result.float().sum(), weight)[0]
    for _ in range(3):
        with autograd.context() as context_id:
            calls = [rpc.rpc_async("b", in_bfloat16, (batch,)) for batch in batches]
            autograd.backward(context_id, [torch.stack([call.wait() for call in calls]).sum()])
            with trio.on("b"):
                found = autograd.get_gradients(context_id)[weight]
        assert torch.equal(found, expected), (found - expected).abs().max()
    assert torch.is_autocast_cache_enabled(), "the caller's thread is its own"
    del KEPT["weight"]


def autocast_caches() -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        return torch.is_autocast_cache_enabled()


def test_a_function_may_ask_for_the_cache_of_autocast(trio: Cluster) -> None:
    assert rpc.rpc_sync("b", autocast_caches)
    assert not rpc.rpc_sync("b", torch.is_autocast_cache_enabled)
