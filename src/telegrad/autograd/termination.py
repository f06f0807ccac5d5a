"""When a computation that spreads from worker to worker has ended (Dijkstra and Scholten's algorithm).

Each worker counts the messages that it sent and that were not answered.  The first message that reaches a passive
worker makes its sender that worker's *parent*; messages of other workers are answered at once.  When the worker has
nothing to do and all its own messages are answered, it answers all those of its parent, and may be drawn in again
later.  When the root has nothing to do and no unanswered message, no worker has.

One shortcut: a message to the parent need not be answered.  The parent waits for its child's answer anyway, which says
how many such messages the parent is owed.  It does not matter which arrives first.

No threads, sockets or clock in here: one instance is what one worker knows.
"""

from __future__ import annotations

from typing import NamedTuple

from telegrad.errors import ProtocolError


class Answer(NamedTuple):
    """All that so many messages of worker ``to`` caused is done, but for ``owed`` messages that went back to it."""

    to: int
    messages: int
    owed: int


class Termination:
    __slots__ = ("_engaged", "_from_parent", "_owed", "_parent", "_root", "_sent_up", "_unanswered", "active")

    def __init__(self, root: bool) -> None:
        self.active = 0  # number of things that the worker is doing
        self._root = root
        self._engaged = root
        self._parent: int | None = None
        self._from_parent = 0
        self._sent_up = 0
        self._unanswered: dict[int, int] = {}
        self._owed: dict[int, int] = {}  # below 0: they came before the answer that counts them

    def received(self, sender: int, counted: bool = True) -> list[Answer]:
        if not counted:
            _count(self._owed, sender, -1)
        elif not self._engaged:
            self._engaged, self._parent, self._from_parent = True, sender, 1
        elif sender == self._parent:
            self._from_parent += 1
        else:
            return [Answer(sender, 1, 0)]
        return []

    def sent(self, to: int) -> bool:
        """A message is sent; returns whether it must be answered."""
        if self._engaged and to == self._parent:
            self._sent_up += 1
            return False
        _count(self._unanswered, to, 1)
        return True

    def answered(self, by: int, messages: int, owed: int) -> None:
        if not 0 < messages <= self._unanswered.get(by, 0) or owed < 0:
            raise ProtocolError(f"it answered {messages} messages, of {self._unanswered.get(by, 0)} that wait for it")
        _count(self._unanswered, by, -messages)
        if owed:
            _count(self._owed, by, owed)

    @property
    def quiet(self) -> bool:
        """Whether this worker has nothing to do, and waits for no answer."""
        return not (self.active or self._unanswered or self._owed)

    @property
    def over(self) -> bool:
        """At the root: whether it has ended everywhere."""
        return self._root and self.quiet

    def settle(self) -> list[Answer]:
        """After any event: the answer to the parent, if this worker is quiet."""
        if self._root or not self._engaged or not self.quiet:
            return []
        assert self._parent is not None
        answer = Answer(self._parent, self._from_parent, self._sent_up)
        self._engaged, self._parent, self._sent_up = False, None, 0
        return [answer]

    def waits_for(self, worker: int) -> bool:
        return worker in self._unanswered or worker in self._owed

    @property
    def awaited(self) -> set[int]:
        return {*self._unanswered, *self._owed}

    def __repr__(self) -> str:
        parts = [f"{self.active} active"] if self.active else []
        parts += [f"waits for {sorted(self.awaited)}"] if self.awaited else []
        return ", ".join(parts) or "quiet"


def _count(counts: dict[int, int], worker: int, by: int) -> None:
    count = counts.get(worker, 0) + by
    if count:
        counts[worker] = count
    else:
        counts.pop(worker, None)
