"""Forward and backward in a context, shared by the rows about autograd: a task, and which part of it is timed.

Every gradient is compared with local autograd's of the same computation: the caller's after each sample, those on the
other workers at the end of each round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.library import Library
from bench.row import Case, WrongReplyError
from bench.rows.weights import gradient_of_weight, new_weight, set_weight

__all__ = ["BackwardOnly", "Gradients", "RemoteTask", "Task", "WholePass", "inputs", "same"]

Gradients = Mapping[Tensor, Tensor]

_DISTINCT = 64
"""Arguments are made once and used in turn; no two neighbours have the same gradients."""


class Task(ABC):
    """Something to differentiate."""

    @abstractmethod
    def forward(self, index: int) -> Tensor:
        """The loss; inside a context."""

    @abstractmethod
    def verify(self, index: int, gradients: Gradients) -> None:
        """Raise ``WrongReplyError`` unless the caller's gradients are exactly right."""

    def verify_elsewhere(self, index: int, context_id: int) -> None:  # noqa: B027 (there may be no others)
        """The same of the gradients on the other workers."""


def inputs() -> list[Tensor]:
    """The arguments of small passes."""
    base = torch.arange(4, dtype=torch.float64).reshape(2, 2)
    return [(base + turn).requires_grad_() for turn in range(_DISTINCT)]


class RemoteTask(Task):
    """A task that takes one tensor through these workers, each of which multiplies with a parameter of its own."""

    def __init__(self, library: Library, workers: Sequence[str]) -> None:
        self.library = library
        self._workers = workers
        for place, worker in enumerate(workers):
            library.rpc.rpc_sync(worker, set_weight, args=(place + 2.0,))
        self._inputs = inputs()
        weights = [new_weight(place + 2.0) for place in range(len(workers))]
        self._expected = [
            torch.autograd.grad(self._loss(self.locally(tensor, weights)), [tensor, *weights])
            for tensor in self._inputs
        ]

    @abstractmethod
    def remotely(self, tensor: Tensor) -> Tensor:
        """The computation, through the workers."""

    @abstractmethod
    def locally(self, tensor: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The same in this process: the oracle."""

    @staticmethod
    def _loss(result: Tensor) -> Tensor:
        return result.square().sum()  # so that every gradient depends on the argument

    def forward(self, index: int) -> Tensor:
        return self._loss(self.remotely(self._inputs[index % _DISTINCT]))

    def verify(self, index: int, gradients: Gradients) -> None:
        place = index % _DISTINCT
        same(gradients.get(self._inputs[place]), self._expected[place][0], f"pass {index}, the caller")

    def verify_elsewhere(self, index: int, context_id: int) -> None:
        _, *expected = self._expected[index % _DISTINCT]
        for worker, right in zip(self._workers, expected, strict=True):
            found = self.library.rpc.rpc_sync(worker, gradient_of_weight, args=(self.library.name, context_id))
            same(found, right, f"pass {index}, {worker}")


def same(found: Tensor | None, right: Tensor, where: str) -> None:
    """Raise ``WrongReplyError`` unless this is the right gradient."""
    if found is None or found.dtype != right.dtype or not torch.equal(found, right):
        raise WrongReplyError(f"{where}: the gradient is {found}, not {right}")


class WholePass(Case[Gradients]):
    """A context from its beginning to its end is timed: forward, backward and a look at the gradients."""

    def __init__(self, library: Library, task: Task) -> None:
        self._library = library
        self._task = task

    def run(self, index: int) -> Gradients:
        autograd = self._library.autograd
        with autograd.context() as context_id:
            self._library.backward(context_id, [self._task.forward(index)])
            return autograd.get_gradients(context_id)  # type: ignore[no-any-return]

    def check(self, index: int, reply: Gradients) -> None:
        self._task.verify(index, reply)

    def finish(self, calls: int) -> None:
        with self._library.autograd.context() as context_id:
            self._library.backward(context_id, [self._task.forward(calls)])
            self._task.verify_elsewhere(calls, context_id)


class BackwardOnly(Case[None]):
    """Only the backward pass is timed: the forward pass comes before, and the context ends after it."""

    held = 1

    def __init__(self, library: Library, task: Task) -> None:
        self._library = library
        self._task = task

    def prepare(self, index: int) -> None:
        self._context = self._library.autograd.context()
        self._context_id = self._context.__enter__()
        self._loss = self._task.forward(index)

    def run(self, index: int) -> None:
        self._library.backward(self._context_id, [self._loss])

    def check(self, index: int, reply: None) -> None:
        self._task.verify(index, self._library.autograd.get_gradients(self._context_id))
        self._task.verify_elsewhere(index, self._context_id)
        del self._loss
        self._context.__exit__(None, None, None)
