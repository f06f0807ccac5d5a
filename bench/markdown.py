"""The verdict as a Markdown page, to be committed next to the code that it judges, and as a block of the README."""

from __future__ import annotations

from bench.machine import Machine
from bench.table import TEXT_HEADINGS, Table, notes, tables
from bench.verdict import Verdict

__all__ = ["BEGIN", "END", "block", "page", "replace_block"]

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"


def page(machine: Machine, verdict: Verdict) -> str:
    """The whole page."""
    blocks = [
        "# Benchmark: telegrad against torch.distributed",
        f"{machine}. Load before the run: {machine.load:g}. Made with `python -m bench`.",
        *(_text(table, len(table.headings)) for table in tables(verdict)),
        *notes(verdict),
    ]
    blocks += [f"Failed: {failure.side} in {failure.row}; the row is not complete." for failure in verdict.failures]
    return "\n\n".join(blocks) + "\n"


def block(machine: Machine, verdict: Verdict) -> str:
    """What the README shows of it."""
    shown = "\n\n".join(_text(table, table.brief) for table in tables(verdict))
    return (
        f"{shown}\n\n{machine}. {' '.join(notes(verdict))} More in [bench/results/latest.md](bench/results/latest.md)."
    )


def replace_block(readme: str, text: str) -> str:
    """The README with another text between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no {BEGIN} followed by {END}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def _text(table: Table, columns: int) -> str:
    """The title and the first columns."""
    rule = tuple("---" if heading in TEXT_HEADINGS else "---:" for heading in table.headings)
    lines = [cells[:columns] for cells in (table.headings, rule, *table.rows)]
    return f"{table.title}:\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
