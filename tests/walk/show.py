"""A walk as text: for the terminal, and for ``docs/design.md``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from .bounds import BOUNDS, Bound
from .scenes import CALLEE, CALLER, TITLES
from .way import Line, Walk, Way

WIDTH = 100
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design.md"
BEGIN, END = "<!-- walk -->", "<!-- /walk -->"

_TIED = "\u00a0"  # keeps a file and its count on one line
_UNSTABLE = 0.5  # a way that was taken in a smaller share of the rounds gets a note


# --- for the terminal -------------------------------------------------------------------------------------------------


def terminal(walks: Sequence[Walk]) -> str:
    parts = [line for walk in walks for line in (*_section(walk), "")]
    return "\n".join([*parts, *_summary(walks)])


def _section(walk: Walk) -> Iterator[str]:
    yield f"{walk.scene.upper()}: {TITLES[walk.scene]}"
    yield "=" * WIDTH
    for name, way in ((CALLER, walk.caller), (CALLEE, walk.callee)):
        for each in way.threads:
            yield ""
            yield f"{name}, thread {each.thread}"
            yield f"{'µs':>7}  {'file':{_file_width(way)}}function"
            yield from _lines(each.lines, _file_width(way), with_times=True)
        yield ""
        for line in textwrap.wrap(f"{name}: {_totals(way)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False):
            yield line.replace(_TIED, " ")
        yield f"  and {way.others} Python functions of torch and the standard library"
        if note := _note(way):
            yield f"  {note}"


def _lines(lines: Sequence[Line], file_width: int, with_times: bool) -> Iterator[str]:
    before = 9 if with_times else 0
    step = 2 if all(before + file_width + 2 * line.depth + len(_function(line)) <= WIDTH for line in lines) else 1
    for line in lines:
        loop = "" if line.times == 1 else f" x {line.times}" if with_times else " (loop)"
        time = f"{line.time / 1000:7.0f}  " if with_times else ""
        yield f"{time}{line.file:{file_width}}{' ' * (step * line.depth)}{_function(line)}{loop}".rstrip()


def _function(line: Line) -> str:
    return line.function if line.counts else f"[program] {line.function}"


def _file_width(way: Way) -> int:
    return max(map(len, way.files()), default=0) + 2


def _totals(way: Way) -> str:
    files = way.files()
    each = ", ".join(
        f"{file}{_TIED}{count}" for file, count in sorted(files.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"{way.total} functions in {len(files)} files ({each})"


def _note(way: Way) -> str:
    if way.rounds >= _UNSTABLE * way.of:
        return ""
    return f"not stable: this way, at the lower quartile of length, was taken in {way.rounds} of {way.of} rounds"


def _summary(walks: Sequence[Walk]) -> Iterator[str]:
    yield f"FUNCTIONS OF TELEGRAD ENTERED{CALLER:>24}{CALLEE:>34}"
    yield "=" * WIDTH
    for walk in walks:
        bound = BOUNDS[walk.scene]
        cells = [_rounds(way, most) for way, most in ((walk.caller, bound.caller), (walk.callee, bound.callee))]
        yield f"{walk.scene:19}{cells[0]:>34}{cells[1]:>34}"
    yield ""
    yield from textwrap.wrap(
        "A function that is entered again from the same place of the same run of another (a loop, such as a thread "
        "that looks for the next message) is shown as 'x N' and counted once. Times are those of a recorded run, which "
        "is several times slower than one that is not.",
        WIDTH,
    )


def _rounds(way: Way, most: int) -> str:
    return f"{way.total} (at most {most}), {way.rounds}/{way.of} rounds"


# --- for the document -------------------------------------------------------------------------------------------------


def markdown(walks: Sequence[Walk]) -> str:
    table = ["| step | caller | callee |", "| --- | ---: | ---: |"]
    table += [f"| {walk.scene} | {_cell(walk.caller)} | {_cell(walk.callee)} |" for walk in walks]
    return "\n\n".join(["\n".join(table), *map(_details, walks)])


def _cell(way: Way) -> str:
    return f"{way.total} in {len(way.files())} files"


def _details(walk: Walk) -> str:
    blocks = []
    for name, way in ((CALLER, walk.caller), (CALLEE, walk.callee)):
        for each in way.threads:
            lines = _lines(each.lines, _file_width(way), with_times=False)
            blocks.append("\n".join([f"{name}, thread {each.thread}", "", *lines]))
    text = "\n\n".join(blocks)
    return f"<details><summary>{TITLES[walk.scene]}</summary>\n\n```text\n{text}\n```\n\n</details>"


def rewritten(document: str, walks: Sequence[Walk]) -> str:
    """The document with these walks between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no place for the walk, between {BEGIN} and {END}")
    return f"{before}{begin}\n\n{markdown(walks)}\n\n{end}{after}"


def counts_in(document: str) -> dict[str, Bound]:
    """The counts that a document shows, by scene."""
    block = document.partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) in \d+ files \| (\d+) in \d+ files \|$", block, re.MULTILINE)
    return {scene: Bound(int(caller), int(callee)) for scene, caller, callee in rows}
