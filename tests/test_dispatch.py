"""What a callee does with a call: the function comes first, coroutines are awaited, functions by value are kept."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import operator
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support import PATIENCE, Gate, eventually, in_thread
from telegrad import autograd, rpc
from telegrad._agent.marshal import Marshal
from telegrad._wire import by_value, callables
from telegrad._wire.by_value import pickle_of
from telegrad._wire.messages import Call
from telegrad.errors import RpcTimeoutError, SerializationError, TelegradError, UsageError
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("no_threads_left")


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)


# --- the function before its arguments ----------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bodies of requests that were opened."""
    bodies: list[Any] = []
    real = Marshal.open

    def record(self: Marshal, link: Any, body: Any, streamed: Any) -> Any:
        bodies.append(body)
        return real(self, link, body, streamed)

    monkeypatch.setattr(Marshal, "open", record)
    return bodies


@pytest.mark.parametrize("name", ["no_such_module:f", "operator:no_such_function", "not_exported"])
def test_the_arguments_of_an_unknown_function_are_not_opened(trio: Cluster, opened: list[Any], name: str) -> None:
    mine = rpc.RRef("value")
    arguments = (torch.ones(3), torch.ones(100_000), mine)
    with pytest.raises(SerializationError):
        rpc.rpc_sync("b", name, arguments)
    made = rpc.remote("b", name, arguments)
    with pytest.raises(SerializationError):
        made.to_here()
    assert not [body for body in opened if body.tensors or body.rrefs]
    del arguments, mine, made  # the fixture looks for what was left behind


def test_without_pickle_a_function_by_value_is_refused_unopened(opened: list[Any]) -> None:
    pickled = pickle_of(lambda: 1, True, True)
    assert pickled is not None
    with cluster("a", "b", allow_pickle=False) as workers:
        agent = workers["a"].agent
        for function in (b"", pickled):
            call = agent.start_call(
                agent.peer("b"),
                "f",
                PATIENCE,
                lambda call_id, body, function=function: Call(call_id, "", body, function),
                (torch.ones(2), None),
            )
            with pytest.raises(SerializationError, match=r"a function by value.*allow_pickle=False"):
                agent.wait(call)
    assert not [body for body in opened if body.tensors]


# --- methods of proxies as functions -------------------------------------------------------------------------------


def test_a_method_of_a_proxy_is_called_by_another_worker(trio: Cluster) -> None:
    counter = rpc.remote("b", Counter, (5,))
    before = trio["c"].agent.calls.started
    assert rpc.rpc_sync("c", counter.rpc_sync().add, (2,)) == 7
    assert rpc.rpc_async("c", counter.rpc_sync(timeout=PATIENCE).add, kwargs={"number": 3}).wait() == 10
    assert rpc.remote("c", counter.rpc_sync().add).to_here() == 11
    assert trio["c"].agent.calls.started == before + 3
    assert rpc.rpc_sync("c", counter.remote().add).to_here() == 12  # a reference to a value of b, made by c
    assert rpc.rpc_sync("c", operator.call, (counter.rpc_sync().add,)) == 13
    assert rpc.rpc_sync("b", counter.rpc_sync().add) == 14  # the owner itself
    assert rpc.rpc_sync("a", counter.rpc_sync().add) == 15
    assert "rpc_sync of method 'add' of RRef(" in repr(counter.rpc_sync().add)


# --- coroutines ---------------------------------------------------------------------------------------------------


async def relay(to: str, value: int) -> tuple[str, int]:
    doubled: int = await rpc.rpc_async(to, operator.mul, (value, 2))
    return rpc.get_worker_info().name, doubled


async def fail(text: str) -> None:
    await asyncio.sleep(0)
    raise KeyError(text)


async def leave() -> None:
    raise SystemExit(3)


async def wait_for(gate: Gate, result: Any) -> Any:
    gate.entered.set()
    while not gate.opened.is_set():
        await asyncio.sleep(0.001)
    return result


def test_an_async_function_is_awaited_over_there(trio: Cluster) -> None:
    assert rpc.rpc_sync("b", relay, ("c", 4)) == ("b", 8)
    assert rpc.rpc_async("b", relay, ("a", 5)).wait() == ("b", 10)
    assert rpc.remote("b", relay, ("b", 6)).to_here() == ("b", 12)
    assert rpc.rpc_sync("a", relay, ("b", 7)) == ("a", 14)
    assert rpc.remote("a", relay, ("b", 7)).to_here() == ("a", 14)


def test_an_async_method_of_a_reference(trio: Cluster) -> None:
    counter = rpc.remote("b", Counter, (1,))
    assert counter.rpc_sync().add_later(2) == 3
    assert counter.rpc_async().add_later(2).wait() == 5
    assert counter.remote().add_later(2).to_here() == 7


def test_what_an_async_function_raises_comes_back(trio: Cluster) -> None:
    with pytest.raises(KeyError, match="lost key") as caught:
        rpc.rpc_sync("b", fail, ("lost key",))
    assert "in fail" in str(caught.value)
    assert "This was raised on worker 'b'" in str(caught.value)
    broken = rpc.remote("b", fail, ("lost key",))
    with pytest.raises(KeyError, match="lost key"):
        broken.to_here()
    with pytest.raises(TelegradError, match="SystemExit"):
        rpc.rpc_sync("b", leave)
    assert rpc.rpc_sync("b", relay, ("c", 4)) == ("b", 8)  # the loop goes on


def test_coroutines_that_wait_occupy_no_thread() -> None:
    with cluster("a", "b", timeout=PATIENCE, threads=1) as workers, workers.on("a"):
        gates = [Gate() for _ in range(50)]
        futures = [rpc.rpc_async("b", wait_for, (gate, number)) for number, gate in enumerate(gates)]
        for gate in gates:
            gate.wait_entered()
        assert workers["b"].agent.coroutines.running == 50
        assert eventually(lambda: workers["b"].agent.plane.unfinished == 0)
        for gate in reversed(gates):
            gate.open()
        assert [future.wait() for future in futures] == list(range(50))
        assert eventually(lambda: workers["b"].agent.coroutines.running == 0)


WEIGHT = torch.ones(3, requires_grad=True)


async def scale(to: str, value: Tensor) -> Tensor:
    there: Tensor = await rpc.rpc_async(to, torch.mul, (value, WEIGHT))
    return there * WEIGHT


async def without_gradients(gate: Gate) -> bool:
    with torch.no_grad():
        await wait_for(gate, None)
        return torch.is_grad_enabled()


async def gradients_are_on() -> bool:
    return torch.is_grad_enabled()


def test_an_async_function_is_in_the_callers_autograd_context(trio: Cluster) -> None:
    with autograd.context() as context:
        value = torch.full((3,), 2.0, requires_grad=True)
        loss = rpc.rpc_sync("b", scale, ("c", value)).sum()
        autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[value].tolist() == [1, 1, 1]
        (weight,) = rpc.rpc_sync("b", gradient_of_weight, (context,))
        assert weight == [4, 4, 4]


def gradient_of_weight(context: int) -> list[list[float]]:
    return [autograd.get_gradients(context)[WEIGHT].tolist()]


def test_a_coroutine_has_its_own_gradient_mode(trio: Cluster) -> None:
    gate = Gate()
    waiting = rpc.rpc_async("b", without_gradients, (gate,))
    gate.wait_entered()
    assert rpc.rpc_sync("b", gradients_are_on) is True
    gate.open()
    assert waiting.wait() is False


def test_a_graceful_shutdown_waits_for_a_coroutine_that_its_caller_gave_up() -> None:
    gate = Gate()
    with cluster("a", "b") as workers:
        with workers.on("a"), pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("b", wait_for, (gate, 1), timeout=0.05)
        gate.wait_entered()
        ends = [in_thread(worker.shutdown) for worker in workers]
        assert not threading.Event().wait(0.1)
        assert not any(worker.closed for worker in workers)
        gate.open()
        for end in ends:
            end()


_cancelled = threading.Event()


async def wait_for_ever(gate: Gate) -> None:
    gate.entered.set()
    try:
        await asyncio.Event().wait()
    finally:
        _cancelled.set()


def test_a_hurried_shutdown_cancels_coroutines() -> None:
    _cancelled.clear()
    gate = Gate()
    with cluster("a", "b", graceful=False) as workers:
        with workers.on("a"):
            call = rpc.rpc_async("b", wait_for_ever, (gate,))
        gate.wait_entered()
        workers["b"].shutdown(graceful=False)
        assert _cancelled.wait(PATIENCE)
        with pytest.raises(TelegradError):
            call.wait()


async def shut_down() -> None:
    rpc.shutdown()


def test_a_coroutine_cannot_wait_for_its_own_end(trio: Cluster) -> None:
    with pytest.raises(UsageError, match="cannot call shutdown"):
        rpc.rpc_sync("b", shut_down)


def generate() -> Iterator[int]:
    yield 1


async def generate_async() -> AsyncIterator[int]:
    yield 1


_loose: list[Any] = []


def awaitable() -> Any:
    _loose.append(relay("b", 1))
    return {"result": _loose[0]}


@pytest.mark.parametrize("allow_pickle", [True, False])
@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (
            generate,
            r"^the result of generate cannot be sent back: .*type generator.*return a list, or an RRef to an object",
        ),
        (generate_async, r"type async_generator.*return a list, or an RRef to an object"),
        (
            awaitable,
            r"the result\['result'\] of awaitable cannot be sent back.*type coroutine.*make the function `async def`",
        ),
    ],
)
def test_what_cannot_be_a_result(
    function: Callable[[], Any], advice: str, allow_pickle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(callables._exported, f"{function.__module__}:{function.__qualname__}", function)
    with cluster("a", "b", allow_pickle=allow_pickle) as workers, workers.on("a"):
        with pytest.raises(SerializationError, match=advice):
            rpc.rpc_sync("b", function)
    while _loose:
        _loose.pop().close()


# --- functions by value --------------------------------------------------------------------------------------------


def pickles_of(function: Any) -> tuple[bytes | None, bytes | None]:
    return pickle_of(function, False, True), pickle_of(function, False, True)


def test_a_function_by_value_is_pickled_once_and_rebuilt_once(trio: Cluster) -> None:
    loads: list[int] = []
    real = by_value.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_value, "load", lambda *args: loads.append(1) or real(*args))
        for to in ("b", "b", "c", "b", "c"):
            assert rpc.rpc_sync(to, ADD_THREE, (4,)) == 7
    assert len(loads) == 2  # one for each callee


ADD_THREE = eval("lambda x: x + three", {"three": 3})


def test_a_function_keeps_its_pickle_until_what_it_uses_is_another() -> None:
    names = {"factor": 3, "math": math}
    function = eval("lambda x, y=2: math.floor(x * factor) + y", names)
    one, same = pickles_of(function)
    assert one is not None
    assert one is same
    names["factor"] = 4
    other, _ = pickles_of(function)
    assert other != one
    function.__defaults__ = (5,)
    assert pickles_of(function)[0] not in (one, other)
    function.__code__ = eval("lambda x, y=2: x", names).__code__
    assert pickles_of(function)[0] not in (one, other)


def test_a_value_that_moves_from_one_name_to_another_is_seen() -> None:
    one, two = "one", "two"
    names = {"a": one, "b": two, "c": one}
    function = eval("lambda: (a, b, c)", names)
    before = pickles_of(function)[0]
    names["c"] = two
    assert pickles_of(function)[0] != before


def test_a_changed_closure_is_seen(trio: Cluster) -> None:
    factor = 2

    def times(x: int) -> int:
        return x * factor

    assert rpc.rpc_sync("b", times, (4,)) == 8
    factor = 3
    assert rpc.rpc_sync("b", times, (4,)) == 12


def test_each_call_gets_the_value_that_its_caller_has(trio: Cluster) -> None:
    """A list, or a counter, would remember earlier calls if the callee kept the function."""
    seen: list[int] = []
    count = 0

    def append(x: int) -> list[int]:
        seen.append(x)
        return seen

    def increase() -> int:
        nonlocal count
        count += 1
        return count

    assert [rpc.rpc_sync("b", append, (number,)) for number in range(3)] == [[0], [1], [2]]
    assert [rpc.rpc_sync("b", increase) for _ in range(3)] == [1, 1, 1]


def make_functions() -> dict[str, Any]:
    names: dict[str, Any] = {"values": [1], "tensor": torch.ones(1), "text": ("a", 1.5)}
    exec(
        "def uses_list(): return values\n"
        "def uses_tensor(): return tensor\n"
        "def assigns_global():\n    global text\n    text = 1\n"
        "def assigns_within():\n    def inner():\n        global text\n        text = 1\n"
        "def list_default(x=[]): return x\n"
        "def uses_other(): return uses_list()\n"
        "def uses_tuple(): return text\n"
        "def uses_itself(n): return n and uses_itself(n - 1)\n"
        "def uses_good(): return uses_tuple()\n",
        names,
    )
    return names


@pytest.mark.parametrize(
    "name", ["uses_list", "uses_tensor", "assigns_global", "assigns_within", "list_default", "uses_other"]
)
def test_a_function_that_uses_what_can_change_is_not_kept(name: str) -> None:
    assert pickles_of(make_functions()[name]) == (None, None)


@pytest.mark.parametrize("name", ["uses_tuple", "uses_itself", "uses_good"])
def test_a_function_that_uses_constants_is_kept(name: str) -> None:
    function = make_functions()[name]
    one, same = pickles_of(function)
    assert one is not None
    assert one is same


def test_a_marked_function_by_value_keeps_its_mark(trio: Cluster) -> None:
    @rpc.functions.async_execution
    def forward(to: str) -> Any:
        return rpc.rpc_async(to, operator.add, (1, 2))

    assert [rpc.rpc_sync("b", forward, ("c",)) for _ in range(2)] == [3, 3]


def test_a_function_that_was_evicted_comes_again(trio: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "_MOST", 1)
    for _ in range(3):
        assert rpc.rpc_sync("b", lambda: 1) == 1
        assert rpc.rpc_sync("b", lambda: 2) == 2
    assert len(trio["b"].agent.marshal._functions) == 1


def test_peers_do_not_share_a_function() -> None:
    received = by_value.ReceivedFunctions()
    pickled = pickle_of(ADD_THREE, False, True)
    assert pickled is not None
    assert received.load(1, pickled) is received.load(1, pickled)
    assert received.load(1, pickled) is not received.load(2, pickled)


# --- which result cannot be sent --------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Locked:
    def lock(self) -> Any:
        return [LOCK]

    async def lock_later(self) -> Any:
        return [LOCK]


class Nameless:
    def __call__(self) -> Any:
        return LOCK

    def __repr__(self) -> str:
        raise ValueError("no repr")


@rpc.functions.async_execution
def future_of_lock() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(LOCK)
    return future


async def lock_later() -> Any:
    return {"lock": LOCK}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: rpc.rpc_sync("b", lock_later), "the result['lock'] of lock_later"),
        (lambda: rpc.rpc_sync("b", future_of_lock), "the result of future_of_lock"),
        (lambda: rpc.rpc_sync("b", "nameless"), "the result of Nameless"),
        (lambda: rpc.rpc_sync("b", lambda: threading.Lock()), "the result of <lambda>.<locals>.<lambda>"),
        (lambda: rpc.remote("b", Locked).rpc_sync().lock(), "the result[0] of method 'lock'"),
        (lambda: rpc.remote("b", Locked).rpc_sync().lock_later(), "the result[0] of method 'lock_later'"),
        (lambda: rpc.remote("a", Locked).rpc_sync().lock(), "the result[0] of method 'lock'"),
    ],
)
def test_the_function_whose_result_cannot_be_sent_is_named_once(
    trio: Cluster, call: Callable[[], Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(callables._exported, "nameless", Nameless())
    error = error_of(call)
    assert error.startswith(f"{what} cannot be sent back: cannot send a value of type lock: ")
    assert error.count("cannot be sent back") == error.count("type lock") == 1
    assert "This was raised on worker" in error


def test_a_value_that_cannot_be_fetched_is_named_once(trio: Cluster) -> None:
    rref = rpc.remote("b", lock_later)
    error = error_of(rref.to_here)
    assert error.startswith("the value['lock'] of reference 0:0 cannot be sent: cannot send a value of type lock: ")
    assert error.endswith("\n\nThis was raised on worker 'b'.")
    assert error.count("type lock") == 1


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(SerializationError) as caught:
        call()
    return str(caught.value)


# --- which argument cannot be sent ---------------------------------------------------------------------------------


def train_step(model: Any, lock: Any = None, *rest: Any, **options: Any) -> None:
    """Takes what cannot be sent."""


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((1, LOCK), None, r"argument 2 \('lock'\) of train_step for worker 'b' cannot be sent: .*type lock"),
        (({"a": [LOCK]},), None, r"argument 1 \('model'\)\['a'\]\[0\] of train_step for worker 'b'"),
        ((1, 2, 3, LOCK), None, r"argument 4 of train_step for worker 'b'"),
        ((1,), {"lock": LOCK}, r"argument 'lock' of train_step for worker 'b'"),
        ((1,), {"depth": {"x": (LOCK,)}}, r"argument 'depth'\['x'\]\[0\] of train_step for worker 'b'"),
        ((Counter(LOCK),), None, r"argument 1 \('model'\)\.count of train_step for worker 'b'"),
    ],
)
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_the_argument_that_cannot_be_sent_is_named(
    trio: Cluster, call: Callable[..., Any], args: Any, kwargs: Any, what: str
) -> None:
    with pytest.raises(SerializationError, match=what):
        call("b", train_step, args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((LOCK,), {}, r"^argument 1 of method 'set' for worker '[ab]' cannot be sent: .*type lock"),
        ((1, {"x": (LOCK,)}), {}, r"^argument 2\['x'\]\[0\] of method 'set' for worker '[ab]' cannot be sent"),
        ((1,), {"count": LOCK}, r"^argument 'count' of method 'set' for worker '[ab]' cannot be sent"),
        ((), {"count": [LOCK]}, r"^argument 'count'\[0\] of method 'set' for worker '[ab]' cannot be sent"),
    ],
)
@pytest.mark.parametrize("call", [rpc.RRef.rpc_sync, rpc.RRef.rpc_async, rpc.RRef.remote])
@pytest.mark.parametrize("owner", ["a", "b"])
def test_the_argument_of_a_proxy_that_cannot_be_sent_is_named(
    trio: Cluster, owner: str, call: Callable[..., Any], args: Any, kwargs: Any, what: str
) -> None:
    rref = rpc.remote(owner, Counter, (0,))
    with pytest.raises(SerializationError, match=what):
        call(rref).set(*args, **kwargs)


def generated() -> Any:
    return (number for number in range(3))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (generated, "type generator.*; send a list, or an RRef to an object whose method gives the next item$"),
        (generate_async, "type async_generator.*; send a list, or an RRef to an object"),
        (torch.futures.Future, "type Future.*; wait for the future first, and send its value$"),
        (lambda: relay("b", 1), "type coroutine.*; await it first, and send its result$"),
    ],
)
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_what_cannot_be_an_argument(make: Callable[[], Any], advice: str, allow_pickle: bool) -> None:
    argument = make()
    with cluster("a", "b", allow_pickle=allow_pickle) as workers, workers.on("a"):
        with pytest.raises(SerializationError, match=advice):
            rpc.rpc_sync("b", train_step, ([argument],))
    if inspect.iscoroutine(argument):
        argument.close()


def test_the_argument_of_a_function_by_value_is_named(trio: Cluster) -> None:
    with pytest.raises(SerializationError, match=r"argument 1 \('x'\) of .*<lambda> for worker 'b' cannot be sent"):
        rpc.rpc_sync("b", lambda x: x, (LOCK,))
    with pytest.raises(SerializationError, match=r"argument 1 \('x'\) of .*<lambda> for worker 'b' cannot be sent"):
        rpc.rpc_sync("b", lambda x, y=[1]: x, (LOCK,))
    with pytest.raises(SerializationError, match=r"the function of .*<lambda> for worker 'b' cannot be sent"):
        rpc.rpc_sync("b", lambda x, y=LOCK: x, (1,))
    with pytest.raises(SerializationError, match=r"argument 1 of torch:add for worker 'b' cannot be sent"):
        rpc.rpc_sync("b", "torch:add", (LOCK, 1))


def test_functions_that_were_sent_are_kept_in_bounds(trio: Cluster) -> None:
    """Also such as refer to themselves."""

    def send_one(number: int) -> weakref.ref[Any]:
        def again(depth: int) -> int:
            return again(depth - 1) if depth else number

        assert pickle_of(again, False, True) is not None
        return weakref.ref(again)

    alive = [send_one(number) for number in range(by_value._MOST + 50)]
    gc.collect()
    assert len(by_value._sent) <= by_value._MOST
    assert sum(each() is not None for each in alive) <= by_value._MOST


def test_a_function_that_sets_attributes_keeps_no_state_over_there(trio: Cluster) -> None:
    def counter() -> int:
        counter.n = getattr(counter, "n", 0) + 1  # type: ignore[attr-defined]
        return counter.n  # type: ignore[attr-defined,no-any-return]

    with trio.on("a"):
        assert [rpc.rpc_sync("b", counter) for _ in range(3)] == [1, 1, 1]
