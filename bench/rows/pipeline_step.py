"""A pipeline of three stages on three workers: a step with 8 micro-batches, forward, backward and optimizer."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bench.library import LIBRARIES, Library
from bench.row import CALLEES, Case, Near, Plan, Row, WrongReplyError
from bench.rows.pipeline_parts import MICRO_BATCHES, RATE, STAGES, OneProcess, batches, layers

__all__ = ["PIPELINE_STEP"]


class Stage(nn.Module):
    """Lives on a worker of its own; takes one micro-batch after the other."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = layers(number)
        self._lock = threading.Lock()

    def forward(self, inputs: Any) -> Tensor:
        """``inputs`` is a reference: a stage gets its inputs straight from the stage before."""
        tensor = inputs.to_here()
        with self._lock:
            return self.layers(tensor)  # type: ignore[no-any-return]

    def references(self, library: str) -> list[Any]:
        return [LIBRARIES[library].rpc.RRef(parameter) for parameter in self.parameters()]

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters()]


class _Step(Case[Tensor]):
    def __init__(self, library: Library, peer: str) -> None:
        self._library = library
        self._stages = [library.rpc.remote(CALLEES[number], Stage, args=(number,)) for number in range(STAGES)]
        references = [each for stage in self._stages for each in stage.rpc_sync().references(library.name)]
        self._optimizer = library.optim.DistributedOptimizer(torch.optim.SGD, references, lr=RATE)
        self._batches = batches()
        self._alone = OneProcess()

    def run(self, index: int) -> Tensor:
        first, *between, last = self._stages
        inputs, targets = self._batches[index % len(self._batches)]
        with self._library.autograd.context() as context_id:
            futures = []
            for some in inputs:
                hidden = first.remote().forward(self._library.rpc.RRef(some))
                for stage in between:
                    hidden = stage.remote().forward(hidden)
                futures.append(last.rpc_async().forward(hidden))
            outputs = zip(futures, targets, strict=True)
            loss = torch.stack([mse_loss(future.wait(), target) for future, target in outputs]).mean()
            self._library.autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return loss.detach()

    def check(self, index: int, reply: Tensor) -> None:
        right = self._alone.step(index)
        if not torch.allclose(reply, right, rtol=1e-3):
            raise WrongReplyError(f"step {index} had a loss of {reply}, not {right}")

    def finish(self, calls: int) -> None:
        for stage, right in zip(self._stages, self._alone.stages, strict=True):
            for found, parameter in zip(stage.rpc_sync().values(), right.parameters(), strict=True):
                # In float32 the order of sums grows to 1e-4 within the steps; a wrong gradient, to more.
                if not torch.allclose(found, parameter, rtol=1e-3, atol=1e-3):
                    raise WrongReplyError(
                        f"after {calls} steps a parameter is off by {(found - parameter).abs().max()}"
                    )


PIPELINE_STEP = Row(
    name="pipeline_step",
    title=f"pipeline: {STAGES} stages, {MICRO_BATCHES} micro-batches",
    case=_Step,
    plan=Plan(warmup=5, samples=40),
    quick=Plan(warmup=1, samples=3),
    floor=1.5,
    near=Near("plain_pipeline"),
    workers=STAGES + 1,
)
