"""A step of the hybrid model: two trainers with a dense net under DDP, two parameter servers, and a remote top net."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.library import LIBRARIES, Library
from bench.row import CALLEES, CALLER, Case, Near, Plan, Row, WrongReplyError
from bench.rows.hybrid_parts import RATE, TABLES, TRAINERS, Dense, OneProcess, Table, Top, batches, loss_of

__all__ = ["HYBRID_STEP"]

_TRAINERS = (CALLER, CALLEES[0])
_SERVERS, _TOP = CALLEES[1:3], CALLEES[3]


class _Sgd(torch.optim.SGD):
    """Plain SGD by another name: torch runs the steps of its own in TorchScript, and two at once on one server then
    lose each other's updates, so that its parameters come out wrong."""


class _Trainer:
    """Lives on both trainers."""

    def __init__(self, library: Library, rank: int, port: int, tables: list[Any], top: Any) -> None:
        self._library = library
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)
        self._look_up = [lambda ids, table=table: table.forward_async(ids).wait for table in tables]
        self._top = top
        self.dense = Dense()
        self._ddp = DistributedDataParallel(self.dense)
        self._batches = batches(rank)
        references = [library.rpc.RRef(parameter) for parameter in self.dense.parameters()]
        for remote in (*tables, top):
            references += remote.remote_parameters()
        self._optimizer = library.optim.DistributedOptimizer(_Sgd, references, lr=RATE)

    def step(self, index: int) -> None:
        with self._library.autograd.context() as context_id:
            batch = self._batches[index % len(self._batches)]
            loss = loss_of(batch, self._look_up, self._ddp, self._top.forward)
            self._library.autograd.backward(context_id, [loss])
            dist.barrier()  # no trainer changes weights with which the other one still computes
            self._optimizer.step(context_id)


_trainer: list[_Trainer] = []


def _start(library: str, rank: int, port: int, tables: list[Any], top: Any) -> None:
    _trainer[:] = [_Trainer(LIBRARIES[library], rank, port, tables, top)]


def _step(index: int) -> None:
    _trainer[0].step(index)


def _leave() -> list[Tensor]:
    """The trainer's copy of the dense net."""
    dist.destroy_process_group()
    return [parameter.detach() for parameter in _trainer.pop().dense.parameters()]


def _values(module: Any) -> list[Tensor]:
    return [parameter.detach() for parameter in module.local_value().parameters()]


class _Step(Case[None]):
    def __init__(self, library: Library, peer: str) -> None:
        self._library = library
        module = library.nn.RemoteModule
        self._tables = [module(f"{server}/cpu", Table, args=(seed,)) for seed, server in enumerate(_SERVERS)]
        self._top = module(f"{_TOP}/cpu", Top)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._both(_start, *((library.name, rank, store.port, self._tables, self._top) for rank in range(TRAINERS)))

    def _both(self, function: Any, mine: tuple[Any, ...], others: tuple[Any, ...]) -> list[Any]:
        """Runs it on both trainers."""
        future = self._library.rpc.rpc_async(_TRAINERS[1], function, args=others)
        return [function(*mine), future.wait()]

    def run(self, index: int) -> None:
        self._both(_step, (index,), (index,))

    def check(self, index: int, reply: None) -> None:
        """Nothing to see before all steps are done."""

    def finish(self, calls: int) -> None:
        alone = OneProcess()
        for index in range(calls):
            alone.step(index)
        right = [parameter for module in (*alone.tables, alone.top) for parameter in module.parameters()]
        found = [
            value
            for remote in (*self._tables, self._top)
            for value in self._library.rpc.rpc_sync(remote.on, _values, args=(remote.get_module_rref(),))
        ]
        for dense in self._both(_leave, (), ()):
            right += alone.dense.parameters()
            found += dense
        for one, other in zip(found, right, strict=True):
            # In float32 the order of sums grows to 1e-4 within the steps; a step that is lost or done twice, to more.
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
                raise WrongReplyError(f"after {calls} steps a parameter is off by {(one - other).abs().max()}")


HYBRID_STEP = Row(
    name="hybrid_step",
    title=f"hybrid: {TRAINERS} trainers, {TABLES} servers, top",
    case=_Step,
    plan=Plan(warmup=5, samples=40),
    quick=Plan(warmup=1, samples=3),
    floor=2.0,
    near=Near("plain_hybrid"),
    workers=TRAINERS + TABLES + 1,
)
