"""Detects workers of torch's own RPC at telegrad's rendezvous, in a job of which only a part was moved over.

The two cannot talk to each other, and each would wait for the other until its timeout.  But both write to the same
store: torch's workers under ``rpc_prefix_<n>/``, for the n-th job, where gloo writes ``0/<rank>``, and in a job of open
size the agent ``names/<rank>``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from telegrad._torch import TCPStore
from telegrad.errors import RendezvousError
from telegrad.rpc.stores import JobStore

_GRACE = 3.0  # seconds that the keys must exist: a program may use torch's RPC first, and telegrad's afterwards
_JOBS = 4  # the first jobs of torch's RPC whose keys are looked for


class TorchWorkers:
    """Looks for workers of torch's RPC while this worker waits for others.

    Args:
        store: The job's store, without telegrad's prefix.
        count: Called once, if rank 0 is missing: see ``count_at_store``.
    """

    def __init__(self, store: JobStore, count: Callable[[], object]) -> None:
        self._store = store
        self._count = count
        self._counted = False
        self._since: dict[int, float] = {}
        self._next_look = time.monotonic() + 0.5

    def check(self, missing: Iterable[int]) -> None:
        """Raises ``RendezvousError`` if one of the missing ranks runs torch's RPC."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 0.5
        missing = list(missing)
        if 0 in missing and not self._counted:
            self._counted = True
            self._count()
        for rank in missing:
            if not _has_written(self._store, rank):
                self._since.pop(rank, None)
            elif now - self._since.setdefault(rank, now) > _GRACE:
                raise RendezvousError(
                    f"rank {rank} runs torch's own RPC (torch.distributed.rpc), and this worker telegrad's: they "
                    "cannot talk to each other. Start every worker of the job with `telegrad compat`, or import "
                    "telegrad.rpc in all of them"
                )


def _has_written(store: JobStore, rank: int) -> bool:
    keys = [f"rpc_prefix_{number}/{mark}/{rank}" for number in range(_JOBS) for mark in ("0", "names")]
    return any(store.has(key) for key in keys)


def count_at_store(store: JobStore, world_size: int | None) -> None:
    """Connects to the store as a worker of torch does, so that the store's server counts this worker.

    If rank 0 runs torch's RPC, it writes to the store only after it has counted all workers.  For other servers the
    connection has no effect.
    """
    raw = store.raw
    if not isinstance(raw, TCPStore) or world_size is None:
        return
    store.check_alive()
    try:
        TCPStore(raw.host, raw.port, world_size, False, timedelta(seconds=5), wait_for_workers=True)
    except RuntimeError:
        pass  # the server is gone: the next access to the store reports that
