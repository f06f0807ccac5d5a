"""The verdict on the terminal."""

from __future__ import annotations

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from bench.machine import Machine
from bench.table import TEXT_HEADINGS, Table, notes, tables
from bench.verdict import Mark, Verdict

__all__ = ["show"]

_STYLES = {Mark.GOAL: "bold green", Mark.FLOOR: "yellow", Mark.BELOW: "bold red", None: "dim"}


def show(console: Console, machine: Machine, verdict: Verdict) -> None:
    """All tables, the notes, and every failure in full."""
    for table in tables(verdict):
        console.print(_drawn(table))
    console.print(f"[dim]{escape(str(machine))}; {verdict.seconds:.0f} s[/dim]")
    for note in notes(verdict):
        console.print(f"[dim]{escape(note)}[/dim]")
    for miss in verdict.misses:
        console.print(f"[red]✗ {escape(miss)}[/red]")
    for failure in verdict.failures:
        console.rule(f"[bold red]{failure.side} failed in {failure.row}")
        console.print(failure.text, markup=False, highlight=False)


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=table.title, title_justify="left", title_style="bold")
    for heading in table.headings:
        drawn.add_column(heading, justify="left" if heading in TEXT_HEADINGS else "right")
    for cells, mark in zip(table.rows, table.marks, strict=True):
        *others, last = cells
        drawn.add_row(*others, Text(last, style=_STYLES[mark]) if table.headings[-1] == "mark" else last)
    return drawn
