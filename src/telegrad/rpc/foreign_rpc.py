"""Workers of torch's own RPC at telegrad's rendezvous: a job that was moved over only in part.

The two cannot talk to each other, and each would wait for the other until its time is out.  But both leave marks in the
same store: torch's under ``rpc_prefix_<n>/``, for its n-th job, where gloo writes ``0/<rank>``, and in a job of open
size the agent ``names/<rank>``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from telegrad._torch import TCPStore
from telegrad.errors import RendezvousError
from telegrad.rpc.stores import JobStore

_GRACE = 3.0  # seconds: a program may use torch's RPC first, and telegrad's then
_JOBS = 4  # of torch, whose marks are looked for


class Strangers:
    """Looks for them while a worker waits for others.  ``store`` is without telegrad's prefix."""

    def __init__(self, store: JobStore, knock: Callable[[], object]) -> None:
        self._store = store
        self._knock = knock
        self._knocked = False
        self._since: dict[int, float] = {}
        self._next_look = time.monotonic() + 0.5

    def check(self, missing: Iterable[int]) -> None:
        """Raises when one of the missing ranks turns out to be with torch's RPC."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 0.5
        missing = list(missing)
        if 0 in missing and not self._knocked:
            self._knocked = True
            self._knock()
        for rank in missing:
            if not _has_left_marks(self._store, rank):
                self._since.pop(rank, None)
            elif now - self._since.setdefault(rank, now) > _GRACE:
                raise RendezvousError(
                    f"rank {rank} runs torch's own RPC (torch.distributed.rpc), and this worker telegrad's: they "
                    "cannot talk to each other. Start every worker of the job with `telegrad compat`, or import "
                    "telegrad.rpc in all of them"
                )


def _has_left_marks(store: JobStore, rank: int) -> bool:
    keys = [f"rpc_prefix_{number}/{mark}/{rank}" for number in range(_JOBS) for mark in ("0", "names")]
    return any(store.has(key) for key in keys)


def knock_at(store: JobStore, world_size: int | None) -> None:
    """Lets torch's rank 0 go on, if it is one: it writes nothing before it has counted all workers at its store.

    The counter is out of reach but for those who connect in torch's way.  To others it is nothing.
    """
    raw = store.raw
    if not isinstance(raw, TCPStore) or world_size is None:
        return
    store.check_alive()
    try:
        TCPStore(raw.host, raw.port, world_size, False, timedelta(seconds=5), wait_for_workers=True)
    except RuntimeError:
        pass  # it has gone, which others will notice
