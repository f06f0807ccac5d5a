"""What the run shows: a bar while it trains, and the table of gradients at the end."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from comparison import TOLERANCE, Comparison
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from watchdog import still_alive

WIDEST = 108
RECENT = 30  # steps over which loss and speed are averaged: those of one batch jump about
LINES = 10  # where there is no terminal, this many lines stand for the bar
COLOURS = {"trainer": "cyan", "ps": "yellow", "top": "magenta"}


def colour_of(worker: str) -> str:
    return COLOURS[worker.rstrip("01")]


class Pace:
    """The loss, and how many samples a second, of late."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.losses: list[float] = []
        self._times: list[float] = []

    def add(self, loss: float) -> None:
        still_alive()
        self.losses.append(loss)
        self._times.append(time.monotonic())

    def __str__(self) -> str:
        times = self._times[-RECENT - 1 :]  # the first step is slow, and no part of this
        rate = f"{(len(times) - 1) * self._batch / (times[-1] - times[0]):6,.0f}" if len(times) > 1 else "     …"
        return f"loss {statistics.fmean(self.losses[-RECENT:]):.4f}  {rate} samples/s"


class Screen:
    """A terminal, or a log file; both get the same words."""

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of failing
        probe = Console()
        self._console = Console(width=min(probe.width, WIDEST) if probe.is_terminal else WIDEST, highlight=False)
        self._started = time.monotonic()

    def title(self, workers: Sequence[str]) -> None:
        names = " · ".join(f"[bold {colour_of(worker)}]{worker}[/]" for worker in workers)
        text = f"[bold]telegrad[/]: one model on {len(workers)} processes, one backward through all of them\n\n{names}"
        self._console.print(Panel(text, border_style="blue", padding=(1, 3), expand=False))

    def say(self, text: str) -> None:
        self._console.print(text)

    @contextmanager
    def training(self, title: str, steps: int, batch: int) -> Iterator[Callable[[float], None]]:
        """Shows how far it is; what this gives is to be called with the loss of each step."""
        pace = Pace(batch)
        if not self._console.is_terminal:

            def print_now_and_then(loss: float) -> None:
                pace.add(loss)
                done = len(pace.losses)
                if done * LINES // steps > (done - 1) * LINES // steps:
                    self.say(f"{title}  step {done:4}/{steps}  {pace}")

            yield print_now_and_then
            return

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, expand=True) as progress:
            self._console.show_cursor(True)  # a run that hangs is ended as it is, and must not take the cursor along
            bar = progress.add_task(title, total=steps, pace="starting")

            def move(loss: float) -> None:
                pace.add(loss)
                progress.update(bar, advance=1, pace=str(pace))

            yield move

    def table(self, comparison: Comparison) -> None:
        title = "Gradients of the last step, and values after it, against one process"
        table = Table(title=title, title_style="bold", border_style="blue", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.show_edge = table.pad_edge = False  # so that it fits into 80 columns
        for heading in ("worker", "part"):
            table.add_column(heading)
        for heading in ("shape", "gradient\nnorm", "in one\nprocess", "gradients\ndiffer by", "values\ndiffer by", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        before = ""
        for row in comparison.rows:
            if before and colour_of(row.worker) != colour_of(before):
                table.add_section()
            table.add_row(
                f"[{colour_of(row.worker)}]{row.worker}[/]" if row.worker != before else "",
                row.part,
                "×".join(map(str, row.shape)),
                f"{row.norm:.3e}",
                f"{row.norm_alone:.3e}",
                f"{row.difference:.1e}",
                f"{row.drift:.1e}",
                "[bold green]✔[/]" if row.equal else "[bold red]✘[/]",
            )
            before = row.worker
        self._console.print()
        self._console.print(table)

    def verdict(self, comparison: Comparison) -> None:
        self.say(f"\nlargest difference from one process: {comparison.largest:.1e}")
        if comparison.equal:
            seconds = time.monotonic() - self._started
            text = f"[bold green]✔[/] five workers trained as one process does; all of it took {seconds:.0f} s"
            self._console.print(Panel(text, border_style="green", expand=False))
        else:
            wrong = [f"{row.worker} {row.part}" for row in comparison.rows if not row.equal]
            what = ", ".join(wrong) or "the losses"
            self.failure(f"This is not the training of one process (tolerance {TOLERANCE:g}): {what}")

    def failure(self, message: str) -> None:
        self._console.print(Panel(Text(message), title="The run failed", border_style="bold red"))
