"""One step of a DistributedOptimizer over 4 workers with 200 parameters each; the gradients are there already.

Two rows: SGD, which is one operation a parameter, and Adam with its defaults, whose arithmetic on the owners takes most
of the time in both libraries.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.library import LIBRARIES, Library
from bench.row import CALLEES, CALLER, Case, Plan, Row, WrongReplyError

__all__ = ["OPTIMIZER_STEPS"]

_WORKERS = (CALLER, *CALLEES[:3])
_PARAMETERS = 200
_RATE = 2.0**-20

_parameters: list[Tensor] = []


def _make(library: str) -> list[Any]:
    """On each worker: new parameters, and references to them."""
    _parameters[:] = [torch.zeros(16, dtype=torch.float64).requires_grad_() for _ in range(_PARAMETERS)]
    return [LIBRARIES[library].rpc.RRef(parameter) for parameter in _parameters]


def _total(factor: Tensor) -> Tensor:
    """On each worker: something in which parameter number i has the gradient i + 1."""
    weighted = [parameter.sum() * (index + 1) for index, parameter in enumerate(_parameters)]
    return torch.stack(weighted).sum() * factor


def _values() -> list[float]:
    return [parameter[0].item() for parameter in _parameters]


class _Step(Case[None]):
    def __init__(self, library: Library, peer: str, kind: type[torch.optim.Optimizer]) -> None:
        self._library, self._kind = library, kind
        call = library.rpc.rpc_sync
        references = [rref for worker in _WORKERS for rref in call(worker, _make, args=(library.name,))]
        self._optimizer = library.optim.DistributedOptimizer(kind, references, lr=_RATE)
        self._context = library.autograd.context()
        self._context_id = self._context.__enter__()
        one = torch.ones((), dtype=torch.float64)
        losses = [call(worker, _total, args=(one,)) for worker in _WORKERS]
        library.autograd.backward(self._context_id, [torch.stack(losses).sum()])

    def run(self, index: int) -> None:
        self._optimizer.step(self._context_id)

    def check(self, index: int, reply: None) -> None:
        """Nothing to see before all steps are done."""

    def finish(self, calls: int) -> None:
        self._context.__exit__(None, None, None)
        right = _in_one_process(self._kind, calls)
        for worker in _WORKERS:
            found = self._library.rpc.rpc_sync(worker, _values)
            if not all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(found, right, strict=True)):
                raise WrongReplyError(f"after {calls} steps {worker} has {found[:3]}..., not {right[:3]}...")


def _in_one_process(kind: Any, steps: int) -> list[float]:
    """The first element of each parameter after that many steps of plain ``torch.optim``."""
    parameters = [torch.zeros(1, dtype=torch.float64).requires_grad_() for _ in range(_PARAMETERS)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full((1,), index + 1.0, dtype=torch.float64)
    optimizer = kind(parameters, lr=_RATE)
    for _ in range(steps):
        optimizer.step()
    return [parameter.item() for parameter in parameters]


def _row(kind: type[torch.optim.Optimizer], floor: float | None = None) -> Row:
    return Row(
        name=f"optimizer_{kind.__name__.lower()}",
        title=f"optimizer, {kind.__name__}: 4 x 200 parameters",
        case=partial(_Step, kind=kind),
        plan=Plan(warmup=10, samples=60),
        quick=Plan(warmup=1, samples=3),
        floor=floor,
        workers=len(_WORKERS),
    )


OPTIMIZER_STEPS = (_row(torch.optim.SGD, floor=3.0), _row(torch.optim.Adam))
