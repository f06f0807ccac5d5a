"""Programs as data: which worker does what, with which values, and how it calls the others.

A value has a number that is unique in its program, and a kind: M, H, V (matrix, half of one, vector), T (a table of
embeddings), S (a scalar), or R and the kind of what a reference refers to.  The body of a call is part of the call, so
each operation runs at most once and its number names what was seen there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

How = Literal["sync", "async", "remote", "rref", "relay", "proxy sync", "proxy async", "proxy remote"]
Pack = Literal["single", "tuple", "list", "dict", "nested", "object"]
Action = Literal["count", "scale", "retain"]
LeafAction = Literal["count", "scale", "post", "post scale", "post change"]


@dataclass(frozen=True)
class Do:
    """``outs = name(ins)``; see ``operations``."""

    name: str
    outs: tuple[int, ...]
    ins: tuple[int, ...] = ()
    number: int = 0  # what else the operation needs: which parameter, which constant


@dataclass(frozen=True)
class Hook:
    """Registers a hook on a value, if it needs a gradient."""

    value: int
    action: Action
    number: int


@dataclass(frozen=True)
class Fetch:
    """``out = rref.to_here()``"""

    out: int
    rref: int


@dataclass(frozen=True)
class Refer:
    """``out = RRef(value)``"""

    out: int
    value: int


@dataclass(frozen=True)
class Call:
    """Runs the body on another worker, on values that have other numbers there, and so do its results."""

    number: int
    to: str
    how: How
    args: tuple[tuple[int, int], ...]  # here → there
    body: tuple[Op, ...]
    results: tuple[tuple[int, int], ...]  # there → here
    args_as: Pack = "tuple"
    results_as: Pack = "tuple"
    own: bool = False  # the arguments are cloned first, so that the callee may change them in place


@dataclass(frozen=True)
class NoGrad:
    body: tuple[Op, ...]


Op = Do | Hook | Fetch | Refer | Call | NoGrad


@dataclass(frozen=True)
class Root:
    """A value or a reference to one, and the seed of its gradient (0: the default)."""

    value: int
    given: int = 0


@dataclass(frozen=True)
class Step:
    """Some forward, and a backward on worker ``on``.  ``fresh``: nothing of earlier steps is used."""

    ops: tuple[Op, ...]
    roots: tuple[Root, ...]
    retain: bool
    on: str
    fresh: bool


@dataclass(frozen=True)
class Setup:
    """What a worker has: parameters of these kinds, and hooks on them (index, what it does)."""

    parameters: str
    hooks: tuple[tuple[int, LeafAction], ...] = ()
    module_hook: bool = False


@dataclass(frozen=True)
class Program:
    seed: int
    driver: str
    setups: dict[str, Setup]
    steps: tuple[Step, ...]

    @property
    def workers(self) -> list[str]:
        return list(self.setups)

    def calls(self) -> dict[int, Call]:
        return {op.number: op for step in self.steps for op in walk(step.ops) if isinstance(op, Call)}

    def changes_sums(self) -> bool:
        """Whether a hook changes the gradients that have added up, so that it matters how often it fires."""
        actions = [action for setup in self.setups.values() for _, action in setup.hooks]
        return "post scale" in actions or "post change" in actions

    def size(self) -> int:
        return sum(1 for step in self.steps for _ in walk(step.ops))

    def __str__(self) -> str:
        lines = [f"program {self.seed}, driven by {self.driver}"]
        lines += [f"{name}: {setup}" for name, setup in self.setups.items()]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"step {number}{' (fresh)' if step.fresh else ''}:")
            lines += [f"    {line}" for op in step.ops for line in _lines(op)]
            roots = ", ".join(f"v{root.value}" + (f" given {root.given}" if root.given else "") for root in step.roots)
            retain = ", retain_graph" if step.retain else ""
            lines.append(f"    backward({roots}{retain})" + (f" on {step.on}" if step.on != self.driver else ""))
        return "\n".join(lines)


def walk(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield op
        if isinstance(op, Call | NoGrad):
            yield from walk(op.body)


def inputs_of(op: Op) -> tuple[int, ...]:
    """What an operation uses of its block's values."""
    match op:
        case Do():
            return op.ins
        case Hook() | Refer():
            return (op.value,)
        case Fetch():
            return (op.rref,)
        case Call():
            return tuple(here for here, _ in op.args)
        case NoGrad():
            made = {value for each in op.body for value in outputs_of(each)}
            return tuple(value for each in op.body for value in inputs_of(each) if value not in made)


def outputs_of(op: Op) -> tuple[int, ...]:
    match op:
        case Do():
            return op.outs
        case Hook():
            return ()
        case Fetch() | Refer():
            return (op.out,)
        case Call():
            return tuple(here for _, here in op.results)
        case NoGrad():
            return tuple(value for each in op.body for value in outputs_of(each))


def _names(values: tuple[int, ...]) -> str:
    return ", ".join(f"v{value}" for value in values)


def _lines(op: Op) -> list[str]:
    match op:
        case Do():
            return [f"{_names(op.outs)} = {op.name}({_names(op.ins)}; {op.number})"]
        case Hook():
            return [f"hook {op.number} on v{op.value}: {op.action}"]
        case Fetch():
            return [f"v{op.out} = v{op.rref}.to_here()"]
        case Refer():
            return [f"v{op.out} = RRef(v{op.value})"]
        case NoGrad():
            return ["no_grad:", *(f"    {line}" for each in op.body for line in _lines(each))]
        case Call():
            args = ", ".join(f"v{there}=v{here}" for here, there in op.args)
            own = ", own" if op.own else ""
            results = _names(tuple(here for _, here in op.results))
            returned = _names(tuple(there for there, _ in op.results))
            return [
                f"{results or '_'} = call {op.number} on {op.to} by {op.how}({args} as {op.args_as}{own}):",
                *(f"    {line}" for each in op.body for line in _lines(each)),
                f"    return {returned} as {op.results_as}",
            ]


replace = dataclasses.replace
