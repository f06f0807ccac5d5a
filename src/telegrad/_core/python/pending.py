"""A call that waits for its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telegrad._wire.frames import Frame

if TYPE_CHECKING:
    from telegrad._core.python.link import PythonLink


class PendingCall:
    """``settled`` is locked until there is an outcome.  A lock and not an Event, which costs 3 us more a call."""

    __slots__ = (
        "call_id",
        "deadline",
        "link",
        "outcome",
        "settled",
        "started",
        "then",
        "used",
        "waited_for",
        "what",
    )

    def __init__(
        self,
        link: PythonLink,
        call_id: int,
        what: str,
        started: float,
        deadline: float,
        then: Callable[[Any, Any], None] | None,
    ) -> None:
        self.link = link
        self.call_id = call_id
        self.what = what
        self.started = started
        self.deadline = deadline
        self.then = then
        self.outcome: Frame | Exception | None = None
        self.used = False  # the outcome was taken
        self.waited_for = False  # a thread waits for it, and calls ``then`` itself
        self.settled = threading.Lock()
        self.settled.acquire()

    def take_outcome(self) -> Frame | Exception | None:
        """The outcome, for the first that asks; None afterwards.  Waits if another thread settles it at this moment."""
        with self.settled:
            used, self.used = self.used, True
            return None if used else self.outcome

    def __repr__(self) -> str:
        return f"<PendingCall {self.call_id}: {self.what}{'' if self.outcome is None else ', settled'}>"
