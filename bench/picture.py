"""The verdict as a picture: a bar per row, its floor and goal on it, and the spread over the rounds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.machine import Machine
from bench.verdict import Mark, Verdict

__all__ = ["draw"]

_COLOURS = {Mark.GOAL: "#2a9d6f", Mark.FLOOR: "#e0a526", Mark.BELOW: "#c8453c"}
_INK = "#2b2f36"
_FAINT = "#8a9099"
_BAR = 0.58


def draw(path: Path, machine: Machine, verdict: Verdict) -> bool:
    """Write the picture; False, and no file, if no row ran on both libraries."""
    bars = [(line.row, line.speedup, line.mark) for line in verdict.lines if line.speedup is not None]
    if not bars:
        return False
    figure = Figure(figsize=(10, 1.9 + 0.56 * len(bars)), dpi=150)
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    axes = figure.subplots()
    reach = max(max(speedup.high, row.goal) for row, speedup, _ in bars)
    for place, (row, speedup, mark) in enumerate(bars):
        assert mark is not None
        axes.barh(place, speedup.value, height=_BAR, color=_COLOURS[mark], zorder=2)
        axes.plot([speedup.low, speedup.high], [place, place], color=_INK, linewidth=1.2, alpha=0.75, zorder=3)
        for target, style in ((row.floor, ":"), (row.goal, "-")):
            ends = [place - _BAR / 2 - 0.1, place + _BAR / 2 + 0.1]
            axes.plot([target, target], ends, color=_INK, linestyle=style, linewidth=2, zorder=4)
        label = max(speedup.high, speedup.value, row.goal) + reach * 0.015
        axes.text(label, place, f"{speedup.value:.2f}×", va="center", color=_INK, fontsize=11, fontweight="bold")
    axes.axvline(1, color=_FAINT, linewidth=1, zorder=1)
    axes.set_yticks(range(len(bars)), [row.title for row, _, _ in bars], fontsize=11, color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, reach * 1.1)
    axes.set_xlabel("times as fast as torch.distributed.rpc (TensorPipe = 1)", color=_INK)
    axes.grid(axis="x", color="#e6e8eb", zorder=0)
    axes.tick_params(length=0, colors=_INK)
    axes.set_axisbelow(True)
    for edge in ("top", "right", "left", "bottom"):
        axes.spines[edge].set_visible(False)
    axes.set_title(
        "telegrad against torch.distributed.rpc", loc="left", fontsize=14, fontweight="bold", color=_INK, pad=26
    )
    caption = f"median of {verdict.rounds} rounds, both in one run; {machine}"
    axes.text(0, 1.01, caption, transform=axes.transAxes, fontsize=8.5, color=_FAINT, va="bottom")
    used = [mark for mark in Mark if any(mark is found for _, _, found in bars)]
    axes.legend(
        handles=[
            *(Patch(color=_COLOURS[mark], label=mark.value) for mark in used),
            Line2D([], [], color=_INK, linestyle=":", linewidth=2, label="floor"),
            Line2D([], [], color=_INK, linewidth=2, label="goal"),
            Line2D([], [], color=_INK, linewidth=1.2, alpha=0.75, label="min..max of a round"),
        ],
        loc="upper center", bbox_to_anchor=(0.42, -0.7 / len(bars)), ncols=6, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    return True
