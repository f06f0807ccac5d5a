"""Which sends are live: the discovery wave.

The wave starts at the root and runs along recv → send.  A worker that learns that one of its sends will get a gradient
follows the graph behind it, and tells the senders of the tensors that were received there.  The wave has ended when
everything is explored (``termination``); a send that no worker was told of is dead.  Only workers where sources meet
need the plan; if there is none of these, there is no wave.  No threads, sockets, clock or tensors in here.
"""

from __future__ import annotations

from collections.abc import Iterable

from telegrad.autograd.termination import Termination


class Plan:
    __slots__ = ("known", "live", "needs_plan", "started", "wave")

    def __init__(self, root: bool) -> None:
        self.wave = Termination(root)
        self.live: dict[int, set[int]] = {}  # message id → which of its tensors
        self.started = False  # the wave: at the root it has begun, elsewhere it has come here
        self.known = False  # the wave has ended
        self.needs_plan: set[int] = set()  # workers that must learn of the end, as far as known here

    def discovered(self, sends: Iterable[tuple[int, Iterable[int]]]) -> list[tuple[int, int]]:
        """Sends are live; returns those (message, part) of them that were not known to be."""
        self.started = True
        new = []
        for message_id, parts in sends:
            known = self.live.setdefault(message_id, set())
            new += [(message_id, part) for part in parts if part not in known]
            known.update(parts)
        return new

    def explored(self, by: int, count: int, owed: int, needs_plan: Iterable[int]) -> None:
        self.wave.answered(by, count, owed)
        self.needs_plan.update(needs_plan)

    def ends(self) -> bool:
        """Whether the root finds, for the first time, that the wave has ended."""
        if self.known or not self.started or not self.wave.over:
            return False
        self.known = True
        return True

    def __repr__(self) -> str:
        state = "known" if self.known else f"wave: {self.wave!r}" if self.started else "not asked for"
        return f"<Plan {len(self.live)} live sends, {state}>"
