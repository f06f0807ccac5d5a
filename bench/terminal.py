"""The verdict on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bench.machine import Machine
from bench.table import LIMIT_HEADINGS, SPEED_HEADINGS, limit_cells, notes, speed_cells
from bench.verdict import Mark, Verdict

__all__ = ["show"]

_STYLES = {Mark.GOAL: "bold green", Mark.FLOOR: "yellow", Mark.BELOW: "bold red", None: "dim"}


def show(console: Console, machine: Machine, verdict: Verdict) -> None:
    """Both tables, the notes, and every failure in full."""
    speed = _table("telegrad against torch.distributed.rpc (TensorPipe)", SPEED_HEADINGS)
    for line in verdict.lines:
        *cells, mark = speed_cells(line)
        speed.add_row(*cells, Text(mark, style=_STYLES[line.mark]))
    limits = _table("against the raw limits of the same rounds", LIMIT_HEADINGS)
    for near in verdict.nearness:
        *cells, mark = limit_cells(near)
        limits.add_row(*cells, Text(mark, style=_STYLES[near.mark]))
    console.print(speed)
    console.print(limits)
    console.print(f"[dim]{escape(str(machine))}; {verdict.seconds:.0f} s[/dim]")
    for note in notes(verdict):
        console.print(f"[dim]{escape(note)}[/dim]")
    for miss in verdict.misses:
        console.print(f"[red]✗ {escape(miss)}[/red]")
    for failure in verdict.failures:
        console.rule(f"[bold red]{failure.side} failed in {failure.row}")
        console.print(failure.text, markup=False, highlight=False)


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        left = heading in ("row", "raw limit", "mark")
        table.add_column(heading, justify="left" if left else "right")
    return table
