"""The verdict as a Markdown page, to be committed next to the code that it judges."""

from __future__ import annotations

from bench.machine import Machine
from bench.table import LIMIT_HEADINGS, SPEED_HEADINGS, limit_cells, notes, speed_cells
from bench.verdict import Verdict

__all__ = ["page"]


def page(machine: Machine, verdict: Verdict) -> str:
    """The whole page."""
    blocks = [
        "# Benchmark: telegrad against torch.distributed.rpc",
        f"{machine}. Load before the run: {machine.load:g}. Made with `python -m bench`.",
        _table(SPEED_HEADINGS, [speed_cells(line) for line in verdict.lines]),
        "Against the raw limits of the same rounds:",
        _table(LIMIT_HEADINGS, [limit_cells(near) for near in verdict.nearness]),
        *notes(verdict),
    ]
    blocks += [f"Failed: {failure.side} in {failure.row}; the row is not complete." for failure in verdict.failures]
    return "\n\n".join(blocks) + "\n"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" if heading in ("row", "raw limit", "mark") else "---:" for heading in headings)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))
