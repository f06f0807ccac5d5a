"""Workers of this process on which programs run, with every internal message that they send counted."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from telegrad._wire.messages import Gradients
from telegrad._worker import Worker
from telegrad.errors import MissingGradientError
from telegrad.testing import Cluster, cluster

from . import distributed, local
from .compare import Mismatch, compare
from .distributed import Mode
from .language import Program


class Stage:
    def __init__(self, workers: Cluster) -> None:
        self.workers = workers
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        for worker in workers:
            self._count_messages(worker)

    def _count_messages(self, worker: Worker) -> None:
        """Where they are sent, so that those to oneself count too."""
        send: Callable[..., bool] = worker.agent.send_message

        def counted(to: int, message: Any, *rest: Any, **options: Any) -> bool:
            with self._lock:
                self._counts[type(message).__name__] += 1
                if isinstance(message, Gradients):
                    self._counts["of messages"] += len(message.messages)
                    self._counts["Finished"] += message.finished is not None
            return send(to, message, *rest, **options)

        worker.agent.send_message = counted  # type: ignore[method-assign]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def check(
        self, program: Program, mode: Mode = "smart", oracle: local.Local | None = None, alone: bool = True
    ) -> bool:
        """Raises if the program does not do what it does locally.  False: FAST cannot run it, and said so.

        Messages are counted only while a program is alone on the stage.
        """
        oracle = oracle or local.run(program)
        with self.workers.on(program.driver):
            try:
                outcome = distributed.run(program, oracle.expected, mode, self.counts)
            except MissingGradientError:
                if mode == "fast":
                    return False
                raise
        if mode == "fast" and program.changes_sums():
            return True
        try:
            compare(oracle, outcome, mode, counted=alone)
        except Mismatch as error:
            raise Mismatch(f"{error}\n\n{mode} run of {program}") from None
        return True

    def leftovers(self, patience: float = 5.0, failed: bool = False) -> list[str]:
        """What the workers still keep of programs that have ended, given some time to let go of it.

        A program that ``failed`` keeps its references itself.
        """
        deadline = time.monotonic() + patience
        while (left := self._left(failed)) and time.monotonic() < deadline:
            gc.collect()  # an exception holds its frames, and these what they used
            time.sleep(0.01)
        return left

    def _left(self, failed: bool) -> list[str]:
        left = []
        for worker in (each for each in self.workers if not each.closed):
            left += [f"{worker.name}: {context!r}" for context in worker.autograd.registry]
            left += [f"{worker.name}: {worker.references!r}"] if not failed and not worker.references.empty else []
            left += [f"{worker.name}: {call!r}" for call in worker.agent.plane.pending]
        return left


@contextmanager
def stage(names: str = "abcde", **options: Any) -> Iterator[Stage]:
    with cluster(*names, **{"timeout": 30.0, **options}) as workers:
        yield Stage(workers)
