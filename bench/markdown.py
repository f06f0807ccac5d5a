"""The verdict as a Markdown page, to be committed next to the code that it judges, and as a block of the README."""

from __future__ import annotations

from bench.machine import Machine
from bench.table import LIMIT_HEADINGS, SPEED_HEADINGS, limit_cells, notes, speed_cells
from bench.verdict import Verdict

__all__ = ["BEGIN", "END", "block", "page", "replace_block"]

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
_README_COLUMNS = 7  # the first ones of the table of speed-ups: floors, goals and marks are for developers


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


def block(machine: Machine, verdict: Verdict) -> str:
    """What the README shows of it."""
    table = _table(SPEED_HEADINGS[:_README_COLUMNS], [speed_cells(line)[:_README_COLUMNS] for line in verdict.lines])
    how, tails, _ = notes(verdict)
    return f"{table}\n\n{machine}. {how} {tails} More in [bench/results/latest.md](bench/results/latest.md)."


def replace_block(readme: str, text: str) -> str:
    """The README with another text between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no {BEGIN} followed by {END}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" if heading in ("row", "raw limit", "mark") else "---:" for heading in headings)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))
