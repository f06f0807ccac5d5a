"""Trains a model of which a part is on a server and a part under DDP, in many ways, and compares with one process.

Three workers: two trainers, in a gloo group of their own, and the server.  ``python ddp.py PORT``, by ``telegrad run``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

TRAINERS = 2
STEPS = 10
RATE = 0.1
HOOKED: list[Tensor] = []


class Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, tensor: Tensor) -> Tensor:
        return torch.tanh(self.layer(tensor))


class Model(nn.Module):
    """A table or a layer, what the server does, and another layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor], sparse: bool, spare: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.EmbeddingBag(10, 4, mode="sum", sparse=True).double() if sparse else nn.Linear(3, 4).double()
        self.last = nn.Linear(4, 1).double()
        self.spare = nn.Linear(2, 2).double() if spare else None
        self.middle = [middle]

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.middle[0](torch.tanh(self.first(batch))))


SERVERS: list[Server] = []


def renew() -> None:
    SERVERS[:] = [Server()]


def serve(tensor: Tensor) -> Tensor:
    return SERVERS[0](tensor)


def server_parameters() -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(parameter) for parameter in SERVERS[0].parameters()]


def server_values() -> list[Tensor]:
    return [parameter.detach() for parameter in SERVERS[0].parameters()]


def remotely(tensor: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", serve, (tensor,))


def batch(trainer: int, step: int, sparse: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * trainer + step)
    if sparse:
        return torch.randint(0, 10, (4, 3), generator=generator)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


CASES: dict[str, dict[str, Any]] = {
    "outside": {"where": "outside"},
    "inside": {"where": "inside"},
    "none": {"where": "none"},
    "outside sparse": {"where": "outside", "sparse": True},
    "inside sparse": {"where": "inside", "sparse": True},
    "outside unused": {"where": "outside", "spare": True, "options": {"find_unused_parameters": True}},
    "inside unused": {"where": "inside", "options": {"find_unused_parameters": True}},
    "outside static": {"where": "outside", "options": {"static_graph": True}},
    "inside static": {"where": "inside", "options": {"static_graph": True}},
    "outside bucket views": {"where": "outside", "options": {"gradient_as_bucket_view": True}},
    "outside small buckets": {"where": "outside", "options": {"bucket_cap_mb": 1e-5}},
    "outside fp16": {"where": "outside", "compress": True},
    "outside no_sync": {"where": "outside", "no_sync": True},
    "outside fast": {"where": "outside", "mode": "fast"},
    "outside uneven": {"where": "outside", "uneven": True},
    "inside uneven": {"where": "inside", "uneven": True},
}


def steps_of(trainer: int, uneven: bool) -> int:
    return STEPS - 4 if uneven and trainer == 1 else STEPS


def train(
    trainer: int,
    where: str,
    sparse: bool = False,
    spare: bool = False,
    options: dict[str, Any] | None = None,
    compress: bool = False,
    no_sync: bool = False,
    uneven: bool = False,
    mode: Any = "smart",
) -> None:
    if trainer == 0:
        rpc.rpc_sync("worker2", renew)
    dist.barrier()
    model = Model(remotely, sparse, spare)
    parameters = list(model.parameters())
    hooked: list[Tensor] = []
    model.last.weight.register_hook(lambda gradient: hooked.append(gradient))
    run: Any = model
    wrapped: Any = None
    if where == "outside":
        run = wrapped = DistributedDataParallel(model, **options or {})
    elif where == "inside":
        model.last = wrapped = DistributedDataParallel(model.last, **options or {})
    if compress:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    mine = DistributedOptimizer(optim.SGD, [rpc.RRef(each) for each in parameters], lr=RATE)
    there = DistributedOptimizer(optim.SGD, rpc.rpc_sync("worker2", server_parameters), lr=RATE)
    joining = wrapped.join() if uneven else contextlib.nullcontext()
    with joining:
        for step in range(steps_of(trainer, uneven)):
            with autograd.context() as context_id:
                with wrapped.no_sync() if no_sync else contextlib.nullcontext():
                    loss = run(batch(trainer, step, sparse)).square().mean()
                    autograd.backward(context_id, [loss], mode=mode)
                assert all(each.grad is None for each in parameters), ".grad is left as it was"
                if not uneven:
                    dist.barrier()  # nobody changes the server while another computes with it
                mine.step(context_id)
                if not uneven:
                    there.step(context_id)
                    dist.barrier()
    assert len(hooked) == steps_of(trainer, uneven), "a hook fires once in each step"
    expected, server = in_one_process(trainer, where, sparse, spare, no_sync, uneven)
    rough = {"rtol": 1e-3, "atol": 1e-4} if compress else {}
    for index, (one, other) in enumerate(zip(parameters, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=lambda text, index=index: f"parameter {index}: {text}", **rough)
    if not uneven:
        torch.testing.assert_close(rpc.rpc_sync("worker2", server_values), server, **rough)
    dist.barrier()


def in_one_process(
    trainer: int, where: str, sparse: bool, spare: bool, no_sync: bool, uneven: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What the parameters of that trainer, and of the server, should be in the end."""
    server = Server()
    models = [Model(server, sparse, spare) for _ in range(TRAINERS)]
    for step in range(STEPS):
        active = [number for number in range(TRAINERS) if step < steps_of(number, uneven)]
        for number in active:
            models[number](batch(number, step, sparse)).square().mean().backward()
        names = [name for name, _ in models[0].named_parameters()]
        for name in names:
            shares = [models[number].get_parameter(name) for number in active]
            reduced = not no_sync and (where == "outside" or (where == "inside" and name.startswith("last.")))
            total: Any = sum((each.grad.to_dense() for each in shares if each.grad is not None), 0)
            for model in models:
                parameter = model.get_parameter(name)
                own = parameter.grad.to_dense() if parameter.grad is not None else None
                gradient = total / TRAINERS if reduced else own
                if isinstance(gradient, Tensor):
                    parameter.data.add_(gradient, alpha=-RATE)
        for model in models:
            model.zero_grad()
        for parameter in server.parameters():
            if not uneven:
                parameter.data.sub_(RATE * parameter.grad)  # type: ignore[operator]
            parameter.grad = None
    return list(models[trainer].parameters()), list(server.parameters())


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
        os._exit(1)  # the other trainer may wait for this one for ever
    print(f"{name}: ok", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=TRAINERS + 1)
    if rank < TRAINERS:
        group = f"tcp://127.0.0.1:{sys.argv[1]}"
        dist.init_process_group("gloo", init_method=group, rank=rank, world_size=TRAINERS)
        for name, case in CASES.items():
            with told(name):
                train(rank, **case)
        dist.destroy_process_group()
    rpc.shutdown()


if __name__ == "__main__":
    main()
