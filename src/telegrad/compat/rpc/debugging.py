"""Counts of what is there, under torch's names; tests wait for them to reach zero."""

from __future__ import annotations

from telegrad._current import current_worker


def _rref_context_get_debug_info() -> dict[str, str]:
    """Of references: torch counts a value when others hold references to it."""
    worker = current_worker()
    counts = worker.references.counts()
    return {
        "num_owner_rrefs": str(counts["values_with_forks"]),
        "num_forks": str(counts["forks_counted"]),
        "num_pending_users": str(counts["pending_forks"]),
        "num_pending_futures": str(len(worker.agent.calls)),
    }


def autograd_get_debug_info() -> dict[str, str]:
    """Of contexts."""
    engine = current_worker().autograd
    return {
        "num_current_backward_passes": str(len(list(engine.passes))),
        "num_autograd_contexts": str(len(engine.registry)),
    }
