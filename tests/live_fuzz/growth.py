"""Judges the figures of a victim: what it holds after many inputs must be no more than after few."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: How much more each figure may be at the end than at the beginning.  Memory, because an allocator keeps what it had
#: at the worst moment; threads, because the data plane lets surplus ones go only after ten idle seconds, and each stall
#: of a few milliseconds makes some; the other figures, because the honest worker's traffic goes on, and the victim may
#: still dial a worker that has just gone.
ALLOWED = {"memory": 48 << 20, "threads": 64, "busy threads": 4, "unfinished": 4, "descriptors": 8, "links": 4}
LEFT_OUT = frozenset(("inputs",))


def growth(samples: Sequence[dict[str, int]]) -> list[str]:
    """What has grown from the first quarter of the samples to the last; the first sample is warm-up."""
    if len(samples) < 3:
        return []
    samples = samples[1:]
    quarter = max(len(samples) // 4, 1)
    first, last = samples[:quarter], samples[-quarter:]
    grown = []
    for name in samples[0]:
        before, after = (median(sample[name] for sample in part) for part in (first, last))
        if name not in LEFT_OUT and after > before + ALLOWED.get(name, 0):
            grown.append(f"{name} from {before:,.0f} to {after:,.0f}")
    return grown
