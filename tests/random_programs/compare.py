"""Whether a distributed run did what the local one did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .distributed import Distributed, Mode
from .local import Expected, Local, Seen

_PLANNING = ("Discover", "Explored", "PlanWanted", "PlanKnown")

Gradient = Tensor | None


class Mismatch(AssertionError):
    """The two runs differ."""


def compare(local: Local, distributed: Distributed, mode: Mode = "smart", counted: bool = True) -> None:
    """Raises Mismatch with all the differences.

    FAST takes a part of a message that gets no gradient for one that gets zeros: there a gradient of zeros is as good
    as none, so is a hook that saw one, and more messages are sent than needed.
    """
    lenient = mode == "fast"
    differences = [
        f"{name}: {difference}"
        for name, seen in local.seen.items()
        for difference in _differences(seen, distributed.seen[name], lenient)
    ]
    if counted:
        for number, (expected, notes) in enumerate(zip(local.expected, distributed.notes, strict=True), 1):
            differences += [f"step {number}: {difference}" for difference in _messages(expected, notes, mode)]
        differences += _planning(local.expected, distributed.notes, mode)
    if differences:
        raise Mismatch("\n".join(differences))


def _differences(local: Seen, distributed: Seen, lenient: bool) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(local.gradients, distributed.gradients, strict=True)):
        yield from _same(f"gradient of parameter {index}", one, other, lenient)
    for what in ("leaves", "retained"):
        yield from _same_all(what, getattr(local, what), getattr(distributed, what), lenient)
    if local.count != distributed.count and not lenient:
        yield f"{local.count} leaves should have a gradient, but {distributed.count} do"
    for number in sorted(local.log.keys() | distributed.log.keys()):
        yield from _same_log(number, local.log.get(number, []), distributed.log.get(number, []), lenient)


def _same_all(what: str, local: Mapping[int, Gradient], other: Mapping[int, Gradient], lenient: bool) -> Iterator[str]:
    for number in sorted(local.keys() | other.keys()):
        yield from _same(f"{what} {number}", local.get(number), other.get(number), lenient)


def _same(what: str, one: Gradient, other: Gradient, lenient: bool) -> Iterator[str]:
    if one is None or other is None:
        if one is not other and not (lenient and _is_zero(one) and _is_zero(other)):
            yield f"{what}: {_show(one)} locally, but {_show(other)}"
    elif one.layout != other.layout and not lenient:
        yield f"{what}: {one.layout} locally, but {other.layout}"
    elif not _close(one, other):
        yield f"{what}: locally\n{one.to_dense()}\nbut\n{other.to_dense()}"


def _same_log(number: int, local: list[Gradient], other: list[Gradient], lenient: bool) -> Iterator[str]:
    """As multisets."""
    if lenient:
        local, other = _without_zeros(local), _without_zeros(other)
    left = list(other)
    missing = []
    for one in local:
        found = next((index for index, each in enumerate(left) if _close(one, each)), None)
        if found is None:
            missing.append(one)
        else:
            del left[found]
    if missing or left:
        yield (
            f"hook {number} fired {len(local)} times locally and {len(other)} times distributed; only locally with "
            f"{[_show(each) for each in missing]}, only distributed with {[_show(each) for each in left]}"
        )


def _without_zeros(log: Iterable[Gradient]) -> list[Gradient]:
    return [each for each in log if not _is_zero(each)]


def _is_zero(gradient: Gradient) -> bool:
    return gradient is None or not gradient.to_dense().any()


def _close(one: Gradient, other: Gradient) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one.to_dense(), other.to_dense(), rtol=1e-9, atol=1e-11)


def _show(gradient: Gradient) -> str:
    return "None" if gradient is None else f"{list(gradient.shape)} of sum {gradient.to_dense().sum():.6g}"


def _messages(expected: Expected, notes: Mapping[str, int], mode: Mode) -> Iterator[str]:
    gradients, letters = notes.get("of messages", 0), notes.get("Gradients", 0)
    if gradients != expected.gradients and not (mode == "fast" and gradients > expected.gradients):
        yield f"{expected.gradients} recvs are reached, but {gradients} gradients were sent"
    if letters > gradients or notes.get("Finished", 0) > letters:
        yield f"{gradients} gradients in {letters} letters, with {notes['Finished']} answers"


def _planning(expected: Sequence[Expected], notes: Sequence[Mapping[str, int]], mode: Mode) -> Iterator[str]:
    """Of all steps together: where all gradients come before the plan, the wave may still run in the next step."""
    planning = {kind: sum(each.get(kind, 0) for each in notes) for kind in _PLANNING}
    if any(planning.values()) and (mode == "fast" or not any(each.meets for each in expected)):
        yield f"no sources meet, but there was planning: {planning}"
    parts = sum(each.parts for each in expected)
    if planning["Discover"] > parts:
        yield f"{planning['Discover']} messages to discover {parts} tensors that were sent"
