"""Calls between workers: what may be called, how it answers, and how it fails."""

from __future__ import annotations

import asyncio
import errno
import functools
import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from support import AT_ONCE, PATIENCE, Gate, assert_no_references, eventually, in_thread, pass_through
from telegrad import rpc
from telegrad._wire.messages import Reply
from telegrad.errors import (
    NotInitializedError,
    RemoteError,
    RpcTimeoutError,
    SerializationError,
    UnknownWorkerError,
    UsageError,
)
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("no_threads_left")


# --- what may be called -----------------------------------------------------------------------------------------


def here() -> str:
    return rpc.get_worker_info().name


def gather(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


@dataclass(frozen=True)
class Scale:
    factor: int

    def __call__(self, value: int) -> int:
        return self.factor * value

    def times(self, value: int) -> int:
        return self.factor * value

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def name_and(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value


def test_a_function_runs_over_there(pair: Cluster) -> None:
    assert rpc.rpc_sync("b", here) == "b"
    assert rpc.rpc_async("b", here).wait() == "b"
    assert rpc.remote("b", here).to_here() == "b"


@pytest.mark.parametrize(
    ("func", "args", "result"),
    [
        (gather, (), ((), {})),
        (operator.add, (2, 3), 5),
        (len, ([1, 2],), 2),
        (Scale, (3,), Scale(3)),
        (Scale(3), (5,), 15),
        (Scale(3).times, (5,), 15),
        (Scale.times, (Scale(3), 5), 15),
        (Scale.double, (5,), 10),
        (Scale.name_and, (5,), ("Scale", 5)),
        (functools.partial(operator.mul, 4), (5,), 20),
        (lambda x: x + 1, (5,), 6),
        ([3, 1, 2].index, (1,), 1),
        (str.upper, ("a",), "A"),
        ("operator:add", (2, 3), 5),
    ],
    ids=lambda value: getattr(value, "__qualname__", None) or type(value).__name__,
)
def test_any_callable(pair: Cluster, func: Any, args: tuple[Any, ...], result: Any) -> None:
    assert rpc.rpc_sync("b", func, args) == result


@pytest.mark.parametrize(
    ("func", "args", "result"),
    [
        (torch.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
        (torch.Tensor.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
        (torch.nn.functional.relu, (torch.tensor([-1.0, 1.0]),), torch.tensor([0.0, 1.0])),
        (torch.ones, (2, 2), torch.ones(2, 2)),
        (torch.matmul, (torch.eye(2), torch.ones(2)), torch.ones(2)),
    ],
    ids=["add", "Tensor.add", "relu", "ones", "matmul"],
)
def test_operators_of_torch(pair: Cluster, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
    assert torch.equal(rpc.rpc_sync("b", func, args), result)


def test_a_module_and_a_closure(pair: Cluster) -> None:
    module = torch.nn.Linear(3, 2)
    value = torch.randn(3)
    expected = module(value)
    assert torch.equal(rpc.rpc_sync("b", module, (value,)), expected)
    assert torch.equal(rpc.rpc_sync("b", module.forward, (value,)), expected)
    assert torch.equal(rpc.rpc_sync("b", lambda: module(value)), expected)


def test_arguments_and_keyword_arguments(pair: Cluster) -> None:
    assert rpc.rpc_sync("b", gather, (1, "two"), {"three": [3]}) == ((1, "two"), {"three": [3]})
    assert rpc.rpc_sync("b", gather, [1], None) == ((1,), {})
    assert rpc.rpc_sync("b", gather, kwargs={"x": None}) == ((), {"x": None})


def test_a_worker_is_named_by_name_id_or_info(pair: Cluster) -> None:
    info = rpc.get_worker_info("b")
    assert (info.name, info.id) == ("b", 1)
    assert [rpc.rpc_sync(to, here) for to in ("b", 1, info)] == ["b"] * 3
    with pytest.raises(UnknownWorkerError, match="no worker 'c' in this job; it has a, b"):
        rpc.rpc_sync("c", here)
    with pytest.raises(UnknownWorkerError, match="no worker 7"):
        rpc.rpc_async(7, here)
    with pytest.raises(UsageError, match=r"its name, its id or its WorkerInfo, not by 1\.5"):
        rpc.rpc_sync(1.5, here)  # type: ignore[arg-type]


def test_a_worker_calls_itself(pair: Cluster) -> None:
    original = [1, 2]
    assert rpc.rpc_sync("a", here) == "a"
    assert rpc.rpc_sync("a", gather, (original,)) == (([1, 2],), {})
    assert rpc.rpc_sync("a", rpc.rpc_sync, ("a", rpc.rpc_sync, ("a", here))) == "a"


def test_arguments_that_make_no_call(pair: Cluster) -> None:
    with pytest.raises(UsageError, match="args must be a tuple"):
        rpc.rpc_sync("b", here, 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="kwargs must be a dict"):
        rpc.rpc_sync("b", here, (), [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is not callable"):
        rpc.rpc_sync("b", 5)
    with pytest.raises(UsageError, match="a timeout is a number of seconds"):
        rpc.rpc_sync("b", here, timeout=-3.0)


# --- calls inside calls -----------------------------------------------------------------------------------------


def _sync(to: str, args: tuple[Any, ...]) -> Any:
    return rpc.rpc_sync(to, descend, args)


def _wait(to: str, args: tuple[Any, ...]) -> Any:
    return rpc.rpc_async(to, descend, args).wait()


def _wait_all(to: str, args: tuple[Any, ...]) -> Any:
    return torch.futures.wait_all([rpc.rpc_async(to, descend, args)])[0]


def _to_here(to: str, args: tuple[Any, ...]) -> Any:
    return rpc.remote(to, descend, args).to_here()


WAYS: dict[str, Callable[[str, tuple[Any, ...]], Any]] = {
    "rpc_sync": _sync,
    "wait": _wait,
    "wait_all": _wait_all,
    "to_here": _to_here,
}


def descend(depth: int, way: str) -> list[str]:
    """Calls back and forth between the two workers."""
    name = here()
    if depth == 0:
        return [name]
    return [name, *WAYS[way]("b" if name == "a" else "a", (depth - 1, way))]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("way", ["rpc_sync", "wait", "to_here"])
def test_circular_calls_do_not_run_out_of_threads(way: str, threads: int) -> None:
    """Waits that the pool can see: each makes room for another thread at once."""
    with cluster("a", "b", threads=threads, timeout=PATIENCE) as workers, workers.on("a"):
        start = time.monotonic()
        assert descend(64, way) == ["a", "b"] * 32 + ["a"]
        assert time.monotonic() - start < AT_ONCE
        assert_no_references(workers)


@pytest.mark.parametrize("threads", [1, 16])
def test_circular_calls_through_a_wait_that_nobody_sees(threads: int) -> None:
    """``wait_all`` waits inside torch: the pool finds out that it is stuck, and gives way."""
    depth = 8 if threads == 1 else 64
    with cluster("a", "b", threads=threads, timeout=PATIENCE) as workers, workers.on("a"):
        assert len(descend(depth, "wait_all")) == depth + 1


def fan_out(depth: int) -> int:
    """A tree of calls, three from each."""
    if depth == 0:
        return 1
    to = "b" if here() == "a" else "a"
    futures = [rpc.rpc_async(to, fan_out, (depth - 1,)) for _ in range(3)]
    return sum(future.wait() for future in futures)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_a_tree_of_calls(threads: int) -> None:
    with cluster("a", "b", threads=threads, timeout=PATIENCE) as workers, workers.on("a"):
        assert fan_out(4) == 3**4


# --- futures ----------------------------------------------------------------------------------------------------


def fail(error: Exception) -> None:
    raise error


def test_a_future_is_torchs_own(pair: Cluster) -> None:
    future = rpc.rpc_async("b", operator.add, (2, 3))
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 5
    assert future.wait() == 5  # again
    assert future.done()
    assert future.value() == 5
    assert future.then(lambda done: done.wait() + 1).wait() == 6
    futures = [rpc.rpc_async("b", operator.add, (number, 1)) for number in range(10)]
    assert torch.futures.wait_all(futures) == list(range(1, 11))
    assert [done.wait() for done in torch.futures.collect_all(futures).wait()] == list(range(1, 11))


def test_callbacks_run_when_the_answer_comes(pair: Cluster) -> None:
    gate, called = Gate(), threading.Event()
    future = rpc.rpc_async("b", pass_through, (gate, 7))
    future.add_done_callback(lambda _: called.set())
    after = future.then(lambda done: 2 * done.wait())
    gate.wait_entered()
    assert not future.done()
    assert not called.is_set()
    gate.open()
    assert after.wait() == 14
    assert called.wait(PATIENCE)


def stop_gradients() -> bool:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return before


def test_a_function_that_turns_gradients_off_does_so_for_itself(pair: Cluster) -> None:
    assert [rpc.rpc_sync("b", stop_gradients) for _ in range(20)] == [True] * 20


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_would_end_the_program_ends_its_future(pair: Cluster, error: BaseException) -> None:
    def callback(_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        rpc.rpc_async("b", operator.add, (2, 3)).then(callback).wait()


def a_future() -> torch.futures.Future[int]:
    return torch.futures.Future()


def test_a_future_cannot_be_sent_and_the_error_says_what_to_do(pair: Cluster) -> None:
    with pytest.raises(SerializationError, match=r"wait for the future on the callee, or let an async_execution"):
        rpc.rpc_sync("b", a_future)


def test_a_failed_future_raises_in_wait_and_in_callbacks(pair: Cluster) -> None:
    future = rpc.rpc_async("b", fail, (KeyError("k"),))
    with pytest.raises(KeyError):
        future.wait()
    with pytest.raises(KeyError):
        future.wait()
    with pytest.raises(Exception, match="KeyError"):
        future.then(lambda done: done.wait()).wait()
    with pytest.raises(KeyError):
        torch.futures.wait_all([future])


def test_a_callback_may_call_again(pair: Cluster) -> None:
    future = rpc.rpc_async("b", here).then(lambda done: rpc.rpc_sync("b", gather, (done.wait(),)))
    assert future.wait() == (("b",), {})


def test_a_future_can_be_awaited(pair: Cluster) -> None:
    async def many() -> list[int]:
        async def one(number: int) -> int:
            result: int = await rpc.rpc_async("b", operator.mul, (number, number))
            return result

        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(many()) == [number**2 for number in range(20)]

    async def failing() -> None:
        await rpc.rpc_async("b", fail, (ValueError("awaited"),))

    with pytest.raises(ValueError, match="awaited"):
        asyncio.run(failing())


def test_an_await_may_be_cancelled(pair: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()

    async def impatient() -> None:
        await asyncio.wait_for(rpc.rpc_async("b", pass_through, (gate,)), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    gate.open()  # the answer comes when the loop is closed
    assert eventually(lambda: not len(pair["a"].agent.calls))
    assert rpc.rpc_sync("b", here) == "b"
    assert capfd.readouterr().err == ""


def test_several_loops_await_one_future(pair: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("b", pass_through, (gate, "once"))

    async def wait() -> Any:
        return await future

    joins = [in_thread(lambda: asyncio.run(wait())) for _ in range(3)]
    gate.wait_entered()
    gate.open()
    assert [join() for join in joins] == ["once"] * 3


# --- timeouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_timeout_says_what_of_whom_and_how_long(pair: Cluster, way: str) -> None:
    gate = Gate()
    call = rpc.rpc_sync if way == "sync" else lambda *args, timeout: rpc.rpc_async(*args, timeout=timeout).wait()
    with pytest.raises(RpcTimeoutError, match=r"support:pass_through on worker 'b' got no answer within 0\.05 s"):
        call("b", pass_through, (gate,), timeout=0.05)
    gate.open()


def test_the_default_timeout(pair: Cluster) -> None:
    gate = Gate()
    pair["a"].default_timeout = 0.05
    assert rpc.get_rpc_timeout() == 0.05
    with pytest.raises(RpcTimeoutError, match=r"within 0\.05 s"):
        rpc.rpc_sync("b", pass_through, (gate,))
    with pytest.raises(TimeoutError):
        rpc.rpc_async("b", pass_through, (gate,)).wait()
    gate.open()


def test_a_timeout_of_zero_is_none(pair: Cluster) -> None:
    pair["a"].default_timeout = 0.05
    gate = Gate()
    future = rpc.rpc_async("b", pass_through, (gate, 1), timeout=0)
    join = in_thread(lambda: pair["a"].rpc_sync("b", pass_through, (gate, 2), timeout=0))
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", pass_through, (Gate(),), timeout=0.1)
    assert not future.done()
    gate.open()
    assert (future.wait(), join()) == (1, 2)
    for each in Gate._all.values():
        each.open()


def test_a_late_reply_is_dropped_with_all_that_it_holds(pair: Cluster) -> None:
    gate = Gate()

    def late() -> Any:
        gate.pass_through()
        return [rpc.RRef("value"), torch.ones(100_000)]

    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", late, timeout=0.05)
    assert not len(pair["a"].agent.calls)
    gate.open()
    assert_no_references(pair)


def test_a_reply_that_does_not_come_is_a_timeout(pair: Cluster) -> None:
    pair.fault("stall", Reply, receiver="a")
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", here, timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_async("b", here, timeout=0.05).wait()
    pair.faults.clear()
    assert rpc.rpc_sync("b", here) == "b"


# --- async_execution --------------------------------------------------------------------------------------------


@rpc.functions.async_execution
def relay(to: str, value: int) -> Any:
    return rpc.rpc_async(to, operator.add, (value, 1)).then(lambda done: done.wait() + 10)


@rpc.functions.async_execution
def not_a_future() -> int:
    return 5


@rpc.functions.async_execution
def raises_at_once() -> Any:
    raise ValueError("at once")


@rpc.functions.async_execution
def raises_later(to: str) -> Any:
    return rpc.rpc_async(to, fail, (OSError(errno.EPERM, "later"),))


class Relay:
    @rpc.functions.async_execution
    def method(self, to: str, value: int) -> Any:
        return rpc.rpc_async(to, operator.add, (value, 1))

    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, value: int) -> Any:
        return rpc.rpc_async(to, operator.add, (value, 2))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: str, value: int) -> Any:
        return rpc.rpc_async(to, operator.add, (value, 3))


def test_async_execution_answers_when_its_future_is_done(pair: Cluster) -> None:
    assert rpc.rpc_sync("b", relay, ("a", 1)) == 12
    assert rpc.rpc_async("b", relay, ("b", 1)).wait() == 12
    assert rpc.remote("b", relay, ("a", 1)).to_here() == 12
    assert rpc.rpc_sync("b", Relay.static, ("a", 1)) == 3
    assert rpc.rpc_sync("b", Relay.of_class, ("a", 1)) == 4
    rref = rpc.remote("b", Relay)
    assert rref.rpc_sync().method("a", 1) == 2
    assert rref.rpc_async().static("a", 1).wait() == 3
    assert rref.remote().of_class("a", 1).to_here() == 4


def test_async_execution_blocks_no_thread() -> None:
    with cluster("a", "b", threads=1, timeout=PATIENCE) as workers, workers.on("a"):
        future = torch.futures.Future()
        _waiting["future"] = future
        waiting = rpc.rpc_async("b", later)
        assert eventually(lambda: not workers["b"].agent.plane.unfinished)
        assert rpc.rpc_sync("b", here) == "b"
        assert not waiting.done()
        future.set_result("done")
        assert waiting.wait() == "done"


_waiting: dict[str, Any] = {}


@rpc.functions.async_execution
def later() -> Any:
    return _waiting["future"]


def test_async_execution_fails_as_others_do(pair: Cluster) -> None:
    with pytest.raises(UsageError, match=r"not_a_future is decorated with async_execution.*it returned int"):
        rpc.rpc_sync("b", not_a_future)
    with pytest.raises(ValueError, match="at once"):
        rpc.rpc_sync("b", raises_at_once)
    with pytest.raises(PermissionError, match="later"):
        rpc.rpc_sync("b", raises_later, ("a",))
    with pytest.raises(UsageError, match="returned int"):
        rpc.remote("b", not_a_future).to_here()


# --- exceptions -------------------------------------------------------------------------------------------------


class Refused(Exception):
    """With a constructor and attributes of its own."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"refused with {code}")
        self.code = code
        self.detail = detail


def refuse() -> None:
    raise Refused(7, detail="no room")


def refuse_unpicklably() -> None:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def refuse_with_an_unknown_class() -> None:
    class Hidden(Exception):
        pass

    raise Hidden("cannot be imported")


def leave() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_an_exception_comes_back_as_its_own_type(pair: Cluster, how: str) -> None:
    def call(func: Any, *args: Any) -> None:
        if how == "rpc_sync":
            rpc.rpc_sync("b", func, args)
        elif how == "rpc_async":
            rpc.rpc_async("b", func, args).wait()
        else:
            rpc.remote("b", func, args).to_here()

    with pytest.raises(ZeroDivisionError, match=r"(?s)raised on worker 'b':.*Traceback.*ZeroDivisionError"):
        call(operator.truediv, 1, 0)
    with pytest.raises(KeyError, match="missing"):
        call(operator.getitem, {}, "missing")
    with pytest.raises(FileNotFoundError) as not_found:
        call(open, "/nonexistent/file")
    assert not_found.value.errno == errno.ENOENT
    with pytest.raises(Refused, match=r"(?s)refused with 7.*in refuse") as refused:
        call(refuse)
    assert (refused.value.code, refused.value.detail) == (7, "no room")
    with pytest.raises(ValueError, match="holds a lock"):
        call(refuse_unpicklably)
    with pytest.raises(RemoteError, match=r"(?s)Hidden: cannot be imported.*raised on worker 'b'"):
        call(refuse_with_an_unknown_class)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        call(leave)
    assert rpc.rpc_sync("b", here) == "b"


def test_an_exception_passes_through_several_workers(pair: Cluster) -> None:
    with pytest.raises(Refused, match=r"(?s)raised on worker 'b'.*raised on worker 'a'"):
        rpc.rpc_sync("b", rpc.rpc_sync, ("a", rpc.rpc_sync, ("b", refuse)))


def test_a_name_that_is_not_there(pair: Cluster) -> None:
    with pytest.raises(SerializationError, match="has no 'nothing'"):
        rpc.rpc_sync("b", "operator:nothing")
    with pytest.raises(SerializationError, match="cannot import module 'no_such_module'"):
        rpc.rpc_sync("b", "no_such_module:f")


# --- values that cannot go --------------------------------------------------------------------------------------


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


class OneWay:
    """Can be written, but not read."""

    def __reduce__(self) -> Any:
        return fail, (RuntimeError("cannot be read"),)


@pytest.mark.parametrize("value", [threading.Lock(), Stubborn()], ids=["lock", "stubborn"])
def test_an_argument_that_cannot_be_sent_is_an_error_here(pair: Cluster, value: Any) -> None:
    rref = rpc.remote("b", here)
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(SerializationError, match="cannot send a value"):
            call("b", gather, (rref, value))
    assert rref.to_here() == "b"
    assert not len(pair["a"].agent.calls)


@pytest.mark.parametrize(
    "call",
    [rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait(), lambda *call: rpc.remote(*call).to_here()],
    ids=["rpc_sync", "rpc_async", "remote"],
)
def test_an_argument_that_cannot_be_read_is_an_error_too(pair: Cluster, call: Any) -> None:
    rref = rpc.remote("b", here)
    with pytest.raises(SerializationError, match="cannot be read"):
        call("b", gather, (rref, OneWay()))


def make_lock() -> Any:
    return threading.Lock()


def make_one_way() -> Any:
    return [rpc.RRef(1), OneWay()]


def make_stubborn() -> Any:
    return [rpc.RRef(1), Stubborn()]


def test_a_result_that_cannot_be_sent_is_an_error_and_no_hang(pair: Cluster) -> None:
    with pytest.raises(SerializationError, match="cannot send a value of type lock"):
        rpc.rpc_sync("b", make_lock)
    with pytest.raises(SerializationError, match="I stay here"):
        rpc.rpc_async("b", make_stubborn).wait()
    with pytest.raises(SerializationError, match="cannot be read"):
        rpc.rpc_sync("b", make_one_way)
    with pytest.raises(SerializationError, match="cannot be read"):
        rpc.rpc_async("b", make_one_way).wait()
    rref = rpc.remote("b", make_lock)
    with pytest.raises(SerializationError, match="lock"):
        rref.to_here()
    assert rref.rpc_sync().acquire() is True


# --- many at once -----------------------------------------------------------------------------------------------


def test_many_threads_call_at_once(pair: Cluster) -> None:
    def caller(thread: int) -> list[int]:
        with pair.on("a" if thread % 2 else "b"):
            to = "b" if thread % 2 else "a"
            return [rpc.rpc_sync(to, operator.add, (thread, number)) for number in range(50)]

    joins = [in_thread(lambda thread=thread: caller(thread)) for thread in range(16)]
    for thread, join in enumerate(joins):
        assert join() == [thread + number for number in range(50)]


def test_many_calls_in_flight(pair: Cluster) -> None:
    futures = [rpc.rpc_async("b", operator.add, (number, torch.ones(3))) for number in range(500)]
    for number, result in enumerate(torch.futures.wait_all(futures)):
        assert torch.equal(result, torch.full((3,), number + 1.0))


def test_a_thread_of_the_user_belongs_to_no_worker_of_a_cluster(pair: Cluster) -> None:
    with pytest.raises(NotInitializedError):
        in_thread(here)()


# --- before and after -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        here,
        lambda: rpc.rpc_sync("a", here),
        lambda: rpc.rpc_async("a", here),
        lambda: rpc.remote("a", here),
        lambda: rpc.RRef(1),
        rpc.shutdown,
        rpc.get_rpc_timeout,
        rpc.debug_info,
    ],
)
def test_use_before_init(use: Callable[[], Any]) -> None:
    with pytest.raises(NotInitializedError, match="call init_rpc first"):
        use()


def test_use_after_shutdown() -> None:
    with cluster("a", "b") as workers, workers.on("a"):
        rref = rpc.remote("b", here)
        assert rref.to_here() == "b"
    with workers.on("a"):
        for use in (
            lambda: rpc.rpc_sync("b", here),
            lambda: rpc.rpc_async("b", here),
            lambda: rpc.remote("b", here),
            rref.to_here,
            rref.rpc_sync().upper,
        ):
            with pytest.raises(NotInitializedError, match="worker 'a' has shut down"):
                use()


def test_debug_info_shows_what_is_going_on(pair: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("b", pass_through, (gate,))
    gate.wait_entered()
    info = rpc.debug_info()
    assert info["worker"] == "<Worker 'a' (0) of 2>"
    assert "support:pass_through of 1" in info["calls"]
    assert info["peers"][1] == "<Peer 'b' (1), known>"
    gate.open()
    future.wait()
