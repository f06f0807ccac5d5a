"""The verdict as two pictures: a bar per row with its floor and goal, and how the backward pass behaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.machine import Machine
from bench.stats import Ratio
from bench.table import NAMES
from bench.units import duration
from bench.verdict import MODE_FLOOR, MODE_GOAL, Growth, Mark, Verdict

__all__ = ["draw", "draw_autograd"]

_COLOURS = {Mark.GOAL: "#2a9d6f", Mark.FLOOR: "#e0a526", Mark.BELOW: "#c8453c"}
_LIBRARIES = {"telegrad": "#2a9d6f", "torch": "#8a9099"}
_INK = "#2b2f36"
_FAINT = "#8a9099"
_BAR = 0.58


@dataclass(frozen=True)
class _Bar:
    title: str
    ratio: Ratio
    mark: Mark
    floor: float
    goal: float | None

    @property
    def end(self) -> float:
        """How far to the right it needs room."""
        return max(self.ratio.high, self.floor, self.goal or 0.0)


def draw(path: Path, machine: Machine, verdict: Verdict) -> bool:
    """How many times as fast as torch; False, and no file, if no row ran on both libraries."""
    bars = [
        _Bar(line.row.title, line.speedup, line.mark, line.row.floor, line.row.goal)
        for line in verdict.lines
        if line.speedup is not None and line.mark is not None and line.row.floor is not None
    ]
    if not bars:
        return False
    figure = _figure(10, 1.9 + 0.56 * len(bars))
    axes = figure.subplots()
    _draw_bars(axes, bars, "times as fast as torch.distributed (TensorPipe = 1)")
    _head(axes, "telegrad against torch.distributed", machine, verdict)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    return True


def draw_autograd(path: Path, machine: Machine, verdict: Verdict) -> bool:
    """SMART against FAST, and the curves; False, and no file, if there is nothing of either."""
    bars = [_Bar(modes.row.title, modes.ratio, modes.mark, MODE_FLOOR, MODE_GOAL) for modes in verdict.modes]
    for near in verdict.nearness:
        asked, mark = near.row.near, near.mark
        if near.row.modes and asked is not None and asked.floor is not None and mark is not None:
            title = f"{near.row.title},\nagainst {near.limit.title}"
            bars.append(_Bar(title, near.sides["telegrad"], mark, asked.floor, asked.goal))
    if not bars and not verdict.growth:
        return False
    figure = _figure(10, 1.9 + 0.56 * len(bars) + 4)
    grid = figure.add_gridspec(2, max(1, len(verdict.growth)), height_ratios=(1.9 + 0.56 * len(bars), 4), hspace=0.7)
    if bars:
        axes = figure.add_subplot(grid[0, :])
        _draw_bars(axes, bars, "times as long in SMART mode as in FAST mode, or as named")
        _head(axes, "telegrad's backward: SMART against FAST, and how it grows", machine, verdict)
    for place, growth in enumerate(verdict.growth):
        _draw_curves(figure.add_subplot(grid[1, place]), growth)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    return True


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    return figure


def _draw_bars(axes: Axes, bars: Sequence[_Bar], label: str) -> None:
    reach = max(bar.end for bar in bars)
    for place, bar in enumerate(bars):
        axes.barh(place, bar.ratio.value, height=_BAR, color=_COLOURS[bar.mark], zorder=2)
        axes.plot([bar.ratio.low, bar.ratio.high], [place, place], color=_INK, linewidth=1.2, alpha=0.75, zorder=3)
        for target, style in ((bar.floor, ":"), (bar.goal, "-")):
            if target is not None:
                ends = [place - _BAR / 2 - 0.1, place + _BAR / 2 + 0.1]
                axes.plot([target, target], ends, color=_INK, linestyle=style, linewidth=2, zorder=4)
        label_at = bar.end + reach * 0.015
        axes.text(label_at, place, f"{bar.ratio.value:.2f}×", va="center", color=_INK, fontsize=11, fontweight="bold")
    axes.axvline(1, color=_FAINT, linewidth=1, zorder=1)
    axes.set_yticks(range(len(bars)), [bar.title for bar in bars], fontsize=11, color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, reach * 1.1)
    axes.set_xlabel(label, color=_INK)
    axes.grid(axis="x", color="#e6e8eb", zorder=0)
    _plain(axes)
    used = [mark for mark in Mark if any(mark is bar.mark for bar in bars)]
    axes.legend(
        handles=[
            *(Patch(color=_COLOURS[mark], label=mark.value) for mark in used),
            Line2D([], [], color=_INK, linestyle=":", linewidth=2, label="floor"),
            Line2D([], [], color=_INK, linewidth=2, label="goal"),
            Line2D([], [], color=_INK, linewidth=1.2, alpha=0.75, label="min..max of a round"),
        ],
        loc="upper center", bbox_to_anchor=(0.42, -0.7 / len(bars)), ncols=6, frameon=False, fontsize=9,
    )  # fmt: skip


def _draw_curves(axes: Axes, growth: Growth) -> None:
    """Both axes are logarithmic, so that a power of the size is a straight line."""
    sizes = sorted({size for curve in growth.curves.values() for size, _ in curve.points})
    for library, curve in growth.curves.items():
        slope = (
            "" if curve.exponent is None else f": exponent {curve.exponent:.2f}, last step {curve.last_exponent:.2f}"
        )
        axes.loglog(*zip(*curve.points, strict=True), "o-", color=_LIBRARIES[library], label=NAMES[library] + slope)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    axes.set_xlabel(growth.unit, color=_INK)
    axes.grid(color="#e6e8eb", zorder=0)
    axes.legend(
        frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1.0), title=growth.title, alignment="left"
    )
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(length=0, which="both", colors=_INK)
    axes.set_axisbelow(True)
    for edge in ("top", "right", "left", "bottom"):
        axes.spines[edge].set_visible(False)


def _head(axes: Axes, title: str, machine: Machine, verdict: Verdict) -> None:
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=_INK, pad=26)
    caption = f"median of {verdict.rounds} rounds, all in one run; {machine}"
    axes.text(0, 1.01, caption, transform=axes.transAxes, fontsize=8.5, color=_FAINT, va="bottom")
