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

from collections import defaultdict
from typing import NamedTuple

from telegrad.errors import ProtocolError


class Answer(NamedTuple):
    """All that so many messages of worker ``to`` caused is done, but for ``owed`` messages that went back to it."""

    to: int
    messages: int
    owed: int


class Termination:
    __slots__ = ("_from_parent", "_owed", "_parent", "_root", "_sent_up", "_unanswered", "active")

    def __init__(self, root: bool) -> None:
        self.active = 0  # number of things that the worker is doing
        self._root = root
        self._parent: int | None = None  # that drew this worker in; None at the root, and while it is passive
        self._from_parent = 0
        self._sent_up = 0
        # By worker, without zeros.  Owed messages below 0 came before the answer that counts them.
        self._unanswered: defaultdict[int, int] = defaultdict(int)
        self._owed: defaultdict[int, int] = defaultdict(int)

    def received(self, sender: int, counted: bool = True) -> list[Answer]:
        if not counted:
            self._owed[sender] -= 1
            if not self._owed[sender]:
                del self._owed[sender]
        elif sender == self._parent:
            self._from_parent += 1
        elif self._parent is None and not self._root:
            self._parent, self._from_parent = sender, 1
        else:
            return [Answer(sender, 1, 0)]
        return []

    def sent(self, to: int) -> bool:
        """A message is sent; returns whether it must be answered."""
        if to == self._parent:
            self._sent_up += 1
            return False
        self._unanswered[to] += 1
        return True

    def answered(self, by: int, messages: int, owed: int) -> None:
        if not 0 < messages <= self._unanswered.get(by, 0) or owed < 0:
            raise ProtocolError(f"it answered {messages} messages, of {self._unanswered.get(by, 0)} that wait for it")
        for counts, change in ((self._unanswered, -messages), (self._owed, owed)):
            counts[by] += change
            if not counts[by]:
                del counts[by]

    @property
    def over(self) -> bool:
        """At the root: whether it has ended everywhere."""
        return self._root and not (self.active or self._unanswered or self._owed)

    def settle(self) -> list[Answer]:
        """After any event: the answer to the parent, if this worker has nothing to do and waits for no answer."""
        if self._parent is None or self.active or self._unanswered or self._owed:
            return []
        answer = Answer(self._parent, self._from_parent, self._sent_up)
        self._parent, self._sent_up = None, 0
        return [answer]

    @property
    def awaited(self) -> set[int]:
        """The workers that must answer, or send what is owed."""
        return {*self._unanswered, *self._owed}

    def __repr__(self) -> str:
        parts = [f"{self.active} active"] if self.active else []
        parts += [f"waits for {sorted(self.awaited)}"] if self.awaited else []
        return ", ".join(parts) or "quiet"
