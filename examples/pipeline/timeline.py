"""When which stage worked on which micro-batch, and how to show it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Times are of the system's monotonic clock, which all processes of a host share."""

    micro_batch: int
    backward: bool
    start: float
    end: float


class Recorder:
    """Notes what a stage does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.spans.append(Span(micro_batch, False, start, time.monotonic()))

    def backward(self, micro_batch: int, first: Tensor, last: Tensor) -> None:
        """Will note the backward of what lies between these two: it begins at the last, and ends at the first."""
        begun: list[float] = []
        last.grad_fn.register_prehook(lambda *_: begun.append(time.monotonic()))
        first.grad_fn.register_hook(
            lambda *_: self.spans.append(Span(micro_batch, True, begun.pop(), time.monotonic()))
        )


def overlap(stages: dict[str, list[Span]]) -> float:
    """Of the time in which any stage worked, the share in which two or more did."""
    changes = sorted(change for spans in stages.values() for change in _changes(spans))
    any_works = several_work = 0.0
    working, before = 0, 0.0
    for now, change in changes:
        any_works += (now - before) * (working > 0)
        several_work += (now - before) * (working > 1)
        working, before = working + change, now
    return several_work / any_works


def _changes(spans: list[Span]) -> Iterator[tuple[float, int]]:
    """When a stage begins to work (1) and when it stops (-1), whatever it works on."""
    events = sorted([(span.start, 1) for span in spans] + [(span.end, -1) for span in spans])
    depth = 0
    for now, change in events:
        if depth + change == 0 or depth == 0:
            yield now, change
        depth += change


def draw(stages: dict[str, list[Span]], columns: int = 88) -> str:
    """A line for each stage: ``1`` is the forward of the first micro-batch, ``a`` its backward, and so on."""
    every = [span for spans in stages.values() for span in spans]
    begin = min(span.start for span in every)
    each = (max(span.end for span in every) - begin) / columns
    lines = []
    for name, spans in stages.items():
        line = [" "] * columns
        for span in sorted(spans, key=lambda span: span.start):
            sign = "abcdefghijklmnop"[span.micro_batch] if span.backward else "123456789ABCDEFG"[span.micro_batch]
            start, end = int((span.start - begin) / each), int((span.end - begin) / each)
            line[start : max(end, start + 1)] = sign * max(end - start, 1)
        lines.append(f"{name} {''.join(line).rstrip()}")
    return "\n".join(lines)
