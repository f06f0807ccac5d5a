"""The loss of both trainings as an SVG picture, for light and dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 84, 56  # margins of the plot
POINTS = 80  # the line has that many, each the mean of the steps around it
DOT_EVERY = 3

STYLE = """
  svg { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
  .page { fill: #fbfbfa; stroke: #d8dade; } .head { font-size: 17px; font-weight: 600; fill: #1f2933; }
  .note { font-size: 12.5px; fill: #5a6572; } .grid { stroke: #e3e6ea; }
  .line { fill: none; stroke: #2f6db5; stroke-width: 2.4; } .dot { fill: none; stroke: #c8621b; stroke-width: 1.6; }
  .floor { stroke: #79828d; stroke-width: 1.4; stroke-dasharray: 6 5; }
  .end { text-anchor: end; } .mid { text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12161c; stroke: #303844; } .head { fill: #e8edf3; } .note { fill: #a9b4c0; }
    .grid { stroke: #2a323c; } .line { stroke: #6aa7ee; } .dot { stroke: #f0a35e; } .floor { stroke: #8b96a3; }
  }"""


def draw(path: Path, distributed: Sequence[float], alone: Sequence[float], least: float) -> None:
    """A line for the workers, dots for one process, and the least loss that is possible."""
    steps = len(distributed)
    width = max(1, steps // POINTS)
    line, dots = _smooth(distributed, width), _smooth(alone, width)
    ticks = _ticks(min(least, *(y for _, y in line + dots)), max(y for _, y in line + dots))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (ticks[-1] - loss) / (ticks[-1] - ticks[0])

    def text(across: float, down: float, words: str, kind: str = "note") -> str:
        return f'<text class="{kind}" x="{across:.1f}" y="{down:.1f}">{words}</text>'

    def stroke(kind: str, *points: tuple[float, float]) -> str:
        return f'<polyline class="{kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'

    def dot(across: float, down: float) -> str:
        return f'<circle class="dot" cx="{across:.1f}" cy="{down:.1f}" r="4"/>'

    mean = f", mean of {width} steps" if width > 1 else ""
    parts = [
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
        text(24, 34, "Loss of the hybrid model", "head"),
        text(24, 55, f"binary cross-entropy{mean}"),
        stroke("line", (430, 30), (462, 30)),
        text(470, 34, "2 trainers, 2 parameter servers, 1 remote net"),
        dot(446, 50),
        text(470, 54, "one process"),
        stroke("floor", (590, 50), (622, 50)),
        text(630, 54, "the least possible: chance"),
        *(stroke("grid", (LEFT, y(tick)), (WIDTH - RIGHT, y(tick))) for tick in ticks),
        *(text(LEFT - 8, y(tick) + 4, f"{tick:.2f}", "note end") for tick in ticks),
        *(text(x(steps * i / 5), HEIGHT - BOTTOM + 22, f"{steps * i / 5:.0f}", "note mid") for i in range(6)),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "step", "note mid"),
        stroke("floor", (LEFT, y(least)), (WIDTH - RIGHT, y(least))),
        stroke("line", *((x(step), y(loss)) for step, loss in line)),
        *(dot(x(step), y(loss)) for step, loss in dots[::DOT_EVERY]),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = "The loss of the distributed training and that of one process fall together"
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
        f"<style>{STYLE}\n</style>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*svg, *parts, "</svg>\n"]))


def _smooth(losses: Sequence[float], width: int) -> list[tuple[float, float]]:
    """The middle and the mean of each ``width`` steps."""
    return [
        (start + width / 2, statistics.fmean(losses[start : start + width])) for start in range(0, len(losses), width)
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, the first below and the last above all."""
    apart = next(size for size in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1e9) if (high - low) / size <= 7)
    first, last = int(low / apart), int(high / apart) + 1
    return [apart * number for number in range(first, last + 1)]
