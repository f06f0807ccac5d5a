"""Declared faults: what the network between workers of one process loses, delays, repeats or reorders.

A fault names message types and a pair of workers, and says what happens to how many of them.  Nothing is random and
nothing sleeps unless a fault says so, so a test reads as the story that it tells.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from telegrad._wire.messages import Message, Note

Kind = Literal["drop", "delay", "repeat", "reorder"]


@dataclass
class Fault:
    """What happens to the next ``count`` messages that match.

    ``Cluster.fault`` makes one from the names of the workers.

    Attributes:
        kind (str): ``"drop"``, ``"delay"``, ``"repeat"`` or ``"reorder"``.
        types (tuple): The types of messages; empty for any. The types of notes count too.
        sender (int): The rank of the sender; None for any.
        receiver (int): The rank of the receiver; None for any.
        count (int): How many messages it happens to; None for all.
        seconds (float): The length of a delay.
        hits (int): How many messages it has happened to.
    """

    kind: Kind
    types: tuple[type, ...] = ()  # empty: any; the types of notes count too
    sender: int | None = None
    receiver: int | None = None
    count: int | None = None
    seconds: float = 0.0  # of a delay
    hits: int = 0
    _held: list[Callable[[], None]] = field(default_factory=list)

    def matches(self, sender: int, receiver: int, message: Message) -> bool:
        """Tells whether it happens to a message.

        Args:
            sender (int): The rank of the sender.
            receiver (int): The rank of the receiver.
            message (Message): The message.

        Returns:
            A bool.
        """
        if self.count is not None and self.hits >= self.count:
            return False
        if self.sender not in (None, sender) or self.receiver not in (None, receiver):
            return False
        payload = message.payload if isinstance(message, Note) else message
        return not self.types or isinstance(message, self.types) or isinstance(payload, self.types)


class FaultyCarrier:
    """Carries messages between the workers of one process, as its faults say.

    The first fault that matches a message decides. ``carried`` counts the messages.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.carried = 0
        self._lock = threading.Lock()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, fault: Fault) -> Fault:
        """Adds a fault, from now on.

        Args:
            fault (Fault): The fault.

        Returns:
            The same.
        """
        with self._lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Ends all faults.

        What they held back to change its order arrives. A delayed message still comes at its time, and a dropped one
        never.
        """
        with self._lock:
            held = [deliver for fault in self.faults for deliver in fault._held]
            self.faults.clear()
        for deliver in held:
            deliver()

    def carry(self, sender: int, receiver: int, message: Message, deliver: Callable[[], None]) -> None:
        """Delivers a message, or does what a fault says.

        Args:
            sender (int): The rank of the sender.
            receiver (int): The rank of the receiver.
            message (Message): The message.
            deliver (Callable): Hands it to the receiver.
        """
        with self._lock:
            self.carried += 1
            fault = next((each for each in self.faults if each.matches(sender, receiver, message)), None)
            now = [deliver]
            if fault is not None:
                fault.hits += 1
                now = self._apply(fault, deliver)
        for each in now:
            each()

    def _apply(self, fault: Fault, deliver: Callable[[], None]) -> list[Callable[[], None]]:
        """Under the lock: what is to be delivered at once, in this order."""
        match fault.kind:
            case "drop":
                return []
            case "repeat":
                return [deliver, deliver]
            case "reorder":
                if not fault._held:
                    fault._held.append(deliver)
                    return []
                return [deliver, fault._held.pop()]
            case "delay":
                heapq.heappush(self._later, (time.monotonic() + fault.seconds, next(self._order), deliver))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="telegrad-testing-delay", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return []

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (not self._later or self._later[0][0] > time.monotonic()):
                    pause = self._later[0][0] - time.monotonic() if self._later else None
                    self._changed.wait(pause)
                if self._closed:
                    return
                deliver = heapq.heappop(self._later)[2]
            deliver()

    def close(self) -> None:
        """Ends the thread that delivers delayed messages.

        Messages that it still has do not arrive.
        """
        with self._lock:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(5.0)
