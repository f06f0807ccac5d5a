"""Parts of the Python data plane that can be switched off, to measure what each of them brings.

``apply`` changes the classes and constants of the calling process only; ``python -m bench.compare`` starts workers that
do so before they join their job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ABLATIONS", "apply"]


def _spin() -> None:
    from telegrad._core.python import plane

    _set(plane, "SPIN", 0.0)


def _reader_runs() -> None:
    from telegrad._core.python.scheduler import LinkSchedule

    _always(LinkSchedule, "slow", True)


def _tick() -> None:
    from telegrad._core.python import plane, timer

    _set(timer, "TICK", 1e-3)
    _set(plane, "TICK", 1e-3)


def _stuck() -> None:
    from telegrad._core.python import scheduler

    _set(scheduler, "STUCK", float("inf"))


def _surplus() -> None:
    from telegrad._core.python import plane

    _set(plane, "_SURPLUS_SECONDS", 0.1)


def _set(where: Any, name: str, value: Any) -> None:
    getattr(where, name)  # it must be there, or the ablation would do nothing
    setattr(where, name, value)


def _always(cls: type[Any], name: str, value: bool) -> None:
    """Makes an attribute of its objects constant, whatever is assigned to it."""
    getattr(cls(), name)
    setattr(cls, name, property(lambda self: value, lambda self, _: None))


ABLATIONS: dict[str, tuple[str, Callable[[], None]]] = {
    "spin": ("a thread sleeps at once when there are no bytes (`SPIN` = 0)", _spin),
    "reader-runs": ("each call goes to the queue, for another thread than the one that read it", _reader_runs),
    "tick": ("a long call loses its link after 1 ms instead of 3 (`TICK`)", _tick),
    "stuck": ("no call begins above `num_worker_threads`, whatever happens (`STUCK` = never)", _stuck),
    "surplus": ("idle threads end after 0.1 s instead of 10 (`_SURPLUS_SECONDS`)", _surplus),
}
"""By name: what is different, and what makes it so."""


def apply(name: str) -> None:
    ABLATIONS[name][1]()
