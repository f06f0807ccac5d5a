"""How the demo looks: code in colour, who called whom, results, and a table of what was measured."""

from __future__ import annotations

import inspect
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.pretty import Pretty
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

__all__ = ["Screen"]

WIDEST = 108
COLOURS = {"paris": "cyan", "oslo": "yellow", "lima": "magenta", "tokyo": "green"}


class Screen:
    """A terminal, or a log file without colours; both get the same words."""

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of failing
        probe = Console()
        width = min(probe.width, WIDEST) if probe.is_terminal else WIDEST
        self._console = Console(width=width, highlight=False)
        self._steps = 0

    def title(self, workers: Sequence[str], seconds: float) -> None:
        names = Text(" · ").join(Text(name, style=f"bold {COLOURS[name]}") for name in workers)
        text = Text.assemble(
            ("telegrad", "bold"),
            ": call functions on other processes\n\n",
            names,
            f"\nfour processes, met in {seconds:.1f} s",
        )
        text.justify = "center"
        self._console.print(Panel(text, border_style="blue", padding=(1, 2)))

    def step(self, title: str, function: Callable[[], object], paths: Sequence[Sequence[str]]) -> None:
        """Announce a step before it runs: its source, as it stands in the file, and the way that it takes."""
        self._steps += 1
        self._console.print()
        self._console.rule(Text(f" {self._steps}  {title} ", style="bold"), align="left", style="blue")
        code = Syntax(_body(function), "python", theme="ansi_dark", background_color="default", word_wrap=True)
        self._console.print()
        self._console.print(_indented(code))
        self._console.print()
        self._console.print(_indented(_drawing(paths)))
        self._console.print()

    def result(self, value: object, seconds: float, checked: str) -> None:
        shown = Columns([Text("→", style="bold"), Text(value) if isinstance(value, str) else Pretty(value)])
        self._console.print(_indented(shown))
        self._console.print(_indented(_verdict(checked, seconds)))

    def error(self, error: BaseException, text: str, seconds: float, checked: str) -> None:
        kind = Text(type(error).__name__, style="bold red")
        self._console.print(_indented(Panel(Text(text.strip()), title=kind, border_style="red", expand=False)))
        self._console.print(_indented(_verdict(checked, seconds)))

    def timings(self, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
        """One row per kind of call, from the seconds that each call took."""
        table = Table(title="Measured just now", title_style="bold", border_style="blue")
        table.add_column("call")
        for heading in ("median", "fastest", "slowest", "calls"):
            table.add_column(heading, justify="right")
        for name, seconds in rows:
            figures = (statistics.median(seconds), min(seconds), max(seconds))
            table.add_row(name, *(_duration(figure) for figure in figures), str(len(seconds)))
        self._console.print()
        self._console.print(table)

    def end(self, seconds: float) -> None:
        text = f"[bold green]✔[/] {self._steps} steps, every result checked, {seconds:.1f} s in all"
        self._console.print(Panel(text, border_style="green"))

    def failure(self, message: str) -> None:
        self._console.print(Panel(Text(message), title="The demo failed", border_style="bold red"))


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2), expand=False)


def _body(function: Callable[[], object]) -> str:
    """A function's source without its first line: what is shown is what runs."""
    return textwrap.dedent(inspect.getsource(function).partition("\n")[2]).rstrip()


def _drawing(paths: Sequence[Sequence[str]]) -> Text:
    """Ways that start at the same worker, drawn as a tree.

    paris ─┬─▶ oslo
           └─▶ tokyo ───▶ lima
    """
    start = paths[0][0]
    drawing = Text(no_wrap=True)
    for index, (_, *rest) in enumerate(paths):
        first, last = index == 0, index == len(paths) - 1
        joint = "─" if first and last else "┬" if first else "└" if last else "├"
        drawing.append(start, COLOURS[start]) if first else drawing.append(" " * len(start))
        drawing.append(f" {'─' if first else ' '}{joint}─▶ ", "dim")
        for hop, name in enumerate(rest):
            if hop:
                drawing.append(" ───▶ ", "dim")
            drawing.append(name, COLOURS[name])
        if not last:
            drawing.append("\n")
    return drawing


def _verdict(checked: str, seconds: float) -> Text:
    return Text.assemble(("✔ ", "bold green"), checked, (f"   {_duration(seconds)}", "dim"))


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
