"""``_all_gather``: every worker gets an object of each, by way of the one whose name comes first.

1. Each sends its object to the leader (``_gather_to_leader``), and waits.
2. When all are there, the leader sends them to all (``_broadcast_to_followers``).

The names are those of ``torch.distributed.rpc.api``, which ends a job with it; tests replace some of them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AllGatherStates:
    """One gathering, as one worker sees it."""

    gathered_objects: dict[str, Any] = field(default_factory=dict)
    proceed_signal: threading.Event = field(default_factory=threading.Event)


class Gatherings:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = defaultdict(int)
        self._states: dict[str, AllGatherStates] = defaultdict(AllGatherStates)

    def begin(self, names: Set[str]) -> tuple[str, AllGatherStates]:
        """The n-th gatherings of the same workers meet."""
        group = "".join(sorted(names))
        with self._lock:
            number = self._numbers[group]
            self._numbers[group] += 1
            key = f"{group}{number}"
            return key, self._states[key]

    def add(self, key: str, worker: str, value: Any, names: Set[str]) -> None:
        """On the leader: adds the object of another worker."""
        with self._lock:
            state = self._states[key]
            if worker in state.gathered_objects:
                raise RuntimeError(f"{worker} reported intent sequence id {key} twice.")
            state.gathered_objects[worker] = value
            complete = names == state.gathered_objects.keys()
        if complete:
            state.proceed_signal.set()

    def missing(self, key: str, names: Set[str]) -> list[str]:
        """On the leader: the workers whose objects are missing."""
        with self._lock:
            state = self._states.get(key)
            return sorted(names - state.gathered_objects.keys()) if state is not None else []

    def complete(self, key: str, objects: dict[str, Any]) -> None:
        """On a follower: the objects of all workers have arrived."""
        with self._lock:
            state = self._states[key]
            if state.proceed_signal.is_set():
                raise RuntimeError(f"Termination signal sequence id {key} got set twice.")
            state.gathered_objects = objects
        state.proceed_signal.set()

    def end(self, key: str) -> None:
        with self._lock:
            self._states.pop(key, None)

    def forget(self) -> None:
        """The job has ended; the counts start again with the next one."""
        with self._lock:
            self._numbers.clear()
            self._states.clear()
