"""One thread's turn at a pass: the units that it runs one after the other, and the gradients that come of it.

A message costs more than a small unit, so gradients for one worker may leave together, and with the word that this
worker has finished.  They wait for no more than the end of the turn, and only where little can come before it: they are
small, and the unit has no node that torch's engine would run after its recvs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from telegrad._wire.messages import Finished, Gradients
from telegrad._wire.values import Bundle
from telegrad.autograd.backward_pass import Notes, Pass
from telegrad.autograd.local_pass import Job
from telegrad.errors import ProtocolError

_FULL = 32  # messages of which a letter has gradients: the receiver should not be idle for long

Messages = Sequence[tuple[int, Sequence[int], Sequence[int]]]


class GradientBatch:
    """Gradients for one worker."""

    __slots__ = ("_messages", "bundle", "counted", "finished")

    def __init__(self, counted: bool, bundle: Bundle) -> None:
        self.bundle = bundle
        self.finished: Finished | None = None
        self.counted = counted
        self._messages: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def add(self, message_id: int, gradients: dict[int, Tensor | None]) -> None:
        """What the tensors of a message got.  It is packed at once: who computed it may use the memory again."""
        tensors: list[Tensor] = []
        defined: list[int] = []
        undefined: list[int] = []
        for part, gradient in gradients.items():
            if gradient is None:
                undefined.append(part)
            else:
                defined.append(part)
                tensors.append(gradient if type(gradient) is Tensor else _plain(gradient))
        if tensors:
            self.bundle.add(tensors)
        self._messages.append((message_id, tuple(defined), tuple(undefined)))

    @property
    def may_grow(self) -> bool:
        """Whether there is room in it, so that it can wait for more."""
        return len(self._messages) < _FULL and self.bundle.is_small

    def payload(self, this: Pass) -> Gradients:
        return Gradients(this.head, tuple(self._messages), self.counted, self.finished)


def _plain(gradient: Tensor) -> Tensor:
    """A gradient is no parameter, though a user may give one as such."""
    return gradient.view_as(gradient) if isinstance(gradient, Parameter) else gradient


def unpack(messages: Messages, tensors: Sequence[Tensor]) -> dict[int, dict[int, Tensor | None]]:
    """The gradients of a letter, by message and by which of its tensors they are for."""
    came: dict[int, dict[int, Tensor | None]] = {}
    following, named = iter(tensors), 0
    for message_id, parts, undefined in messages:
        came[message_id] = dict.fromkeys(undefined) if undefined else {}
        came[message_id].update(zip(parts, following, strict=False))
        named += len(parts)
    if named != len(tensors):
        raise ProtocolError(f"{len(tensors)} gradients came with a letter that speaks of others")
    return came


class Turn:
    def __init__(self, this: Pass, jobs: Iterable[Job]) -> None:
        self.this = this
        self.todo = deque(jobs)
        self.notes: Notes = []
        self.letters: dict[int, GradientBatch] = {}  # by receiver

    def next_jobs(self) -> list[Job]:
        """The next unit, and quick ones after it that can go into the same call of torch's engine, which costs more
        than to run them."""
        jobs = [self.todo.popleft()]
        while self.todo and self._may_join(jobs[-1]) and self._may_join(self.todo[0]):
            jobs.append(self.todo.popleft())
        return jobs

    def _may_join(self, job: Job) -> bool:
        return job.unit.is_quick and self.this.is_complete(job)

    def take_mail(self) -> tuple[Notes, dict[int, GradientBatch]]:
        """What is to be sent now; an answer goes along with gradients for the same worker."""
        notes, letters = self.notes, self.letters
        if letters:
            self.letters = {}
        if notes:
            self.notes = []
            for to, payload in list(notes):
                if type(payload) is Finished and to in letters and letters[to].finished is None:
                    letters[to].finished = payload
                    notes.remove((to, payload))
        return notes, letters
