"""Uses of the public functions that mypy accepts, with the types that it finds, and wrong ones that it must report.

It is checked and never run (``tests/test_types.py``).  An error that is ignored here and that mypy does not find is an
error itself (``warn_unused_ignores``).
"""

from __future__ import annotations

from typing import Any, TypeVar, assert_type

import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad._agent.futures import Future
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef

S = TypeVar("S")


def count(tensor: Tensor) -> int:
    return tensor.numel()


async def count_later(tensor: Tensor) -> int:
    return await rpc.rpc_async("worker2", count, (tensor,))


@rpc.functions.async_execution
def count_elsewhere(tensor: Tensor) -> torch.futures.Future[int]:
    return rpc.rpc_async("worker2", count, (tensor,))


@rpc.export
def exported(tensor: Tensor) -> int:
    return tensor.numel()


@rpc.export(name="named")
def exported_by_name(tensor: Tensor) -> int:
    return tensor.numel()


def same(value: S) -> S:
    return value


def pair(value: S) -> tuple[S, int]:
    return value, 0


class Server:
    weight: Tensor

    def pull(self) -> Tensor:
        return self.weight

    @staticmethod
    def version() -> str:
        return "1"


def calls(x: Tensor, anything: Any) -> None:
    assert_type(rpc.rpc_sync("worker1", count, (x,)), int)
    assert_type(rpc.rpc_sync("worker1", count_later, args=(x,)), int)
    assert_type(rpc.rpc_sync("worker1", count_elsewhere, args=[x], timeout=3), int)
    assert_type(rpc.rpc_sync("worker1", exported, (x,)), int)
    assert_type(rpc.rpc_sync("worker1", exported_by_name, (x,)), int)
    assert_type(rpc.rpc_sync(rpc.WorkerInfo("worker1", 1), Server.version), str)
    assert_type(rpc.rpc_sync(1, torch.add, (x, 1)), Tensor)
    assert_type(rpc.rpc_sync("worker1", "worker:count", (x,)), Any)
    assert_type(rpc.rpc_sync("worker1", anything), Any)
    assert_type(rpc.rpc_sync("worker1", same, (x,)), Any)  # which S it is, only the arguments say
    assert_type(rpc.rpc_sync("worker1", pair, (x,)), tuple[Any, int])

    future = rpc.rpc_async("worker1", count, (x,))
    assert_type(future, Future[int])
    assert_type(future.wait(), int)
    assert_type(future.then(lambda done: str(done.wait())), Future[str])
    assert_type(rpc.rpc_async("worker1", count_later, (x,)), Future[int])
    assert_type(rpc.rpc_async("worker1", count_elsewhere, (x,)), Future[int])
    assert_type(rpc.rpc_async("worker1", "worker:count"), Future[Any])

    server = rpc.remote("worker1", Server)
    assert_type(server, RRef[Server])
    assert_type(server.to_here(), Server)
    assert_type(server.local_value().pull(), Tensor)
    assert_type(rpc.remote("worker1", count_later, (x,)), RRef[int])
    assert_type(rpc.remote("worker1", count_elsewhere, (x,)).to_here(), int)
    assert_type(rpc.remote("worker1", "worker:count"), RRef[Any])
    assert_type(RRef(x).to_here(timeout=1.0), Tensor)
    assert_type(rpc.rpc_sync("worker1", Server.pull, (server,)), Tensor)

    remote_module = RemoteModule("worker1", torch.nn.Linear, (2, 3))
    assert_type(remote_module.remote_parameters(), list[RRef[Tensor]])
    with autograd.context() as context_id:
        assert_type(context_id, int)
        autograd.backward(context_id, [x.sum(), RRef(x)])
        assert_type(autograd.get_gradients(context_id), dict[Tensor, Tensor])


async def awaited(x: Tensor) -> None:
    assert_type(await rpc.rpc_async("worker1", count, (x,)), int)


def wrong_uses(x: Tensor) -> None:
    text: str = rpc.rpc_sync("worker1", count, (x,))  # type: ignore[assignment]
    text = rpc.rpc_async("worker1", count, (x,))  # type: ignore[assignment]
    rpc.rpc_async("worker1", count, (x,)).wait().upper()  # type: ignore[attr-defined]
    rpc.rpc_sync("worker1", count_later, (x,)).upper()  # type: ignore[attr-defined]
    rpc.rpc_sync("worker1", count_elsewhere, (x,)).wait()  # type: ignore[attr-defined]
    rpc.remote("worker1", Server).pull()  # type: ignore[attr-defined]
    rpc.remote("worker1", Server).to_here().push()  # type: ignore[attr-defined]
    rpc.rpc_sync("worker1", 3)  # type: ignore[call-overload]
    rpc.rpc_sync("worker1", count, x=x)  # type: ignore[call-overload]
    rpc.rpc_sync("worker1", count, x.numel())  # type: ignore[call-overload]
    rpc.rpc_sync(1.5, count, (x,))  # type: ignore[call-overload]
    autograd.backward("context", [x])  # type: ignore[arg-type]
    print(text)
