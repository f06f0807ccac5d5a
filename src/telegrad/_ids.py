"""The ids of workers, calls and references, and the generators that make them."""

from __future__ import annotations

import itertools
import secrets
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)

MAX_WORKERS = 1 << 16  # a context id gives the worker's id 16 bits


class GlobalId(NamedTuple):
    """The id of a reference, unique in a job: the worker that made it, and that worker's number for it.

    The number is a count and, below it, random bits, because an id is a capability: a worker that names a reference may
    use it, so only the workers that were given the reference may know its id.  Texts show the count alone.
    """

    created_on: int
    local_id: int

    @property
    def number(self) -> int:
        return self.local_id >> _RANDOM_BITS

    def __repr__(self) -> str:
        return f"{self.created_on}:{self.number}"


class PassId(NamedTuple):
    """The id of one backward.  ``token`` is random: only workers that take part in the pass can name it."""

    root: int  # the worker on which backward was called
    number: int  # counts the passes of that worker
    token: int

    def __repr__(self) -> str:
        return f"{self.root}:{self.number}"


class IdSource:
    """Makes the ids of one worker's references."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._count = itertools.count().__next__  # atomic under the GIL

    def next(self) -> GlobalId:
        return GlobalId(self._worker, (self._count() % _COUNTS) << _RANDOM_BITS | random_bits(_RANDOM_BITS))


_RANDOM_BITS = 48
_COUNTS = 1 << 15  # 63 bits in all: the wire has signed integers of 64


def random_bits(bits: int) -> int:
    """A number that cannot be guessed."""
    return secrets.randbits(bits)
