"""Runs a program's operations for one worker; how calls are made is up to the ``Wire``."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .language import Call, Do, Fetch, Hook, NoGrad, Op, Pack, Program, Refer, Root
from .operations import OPERATIONS, ROWS, Log, N, constant, remember

Values = dict[int, Any]


class Affine(torch.nn.Module):
    """A module over a parameter that others use too."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight / N + 0.1


class Home:
    """What one worker has in one run of a program, and what it saw.

    Under torch alone, gradients of several leaves may share memory; hooks that change one in place would change the
    others.  telegrad promises more, so only there such hooks really work in place.
    """

    def __init__(self, program: Program, name: str, in_place: bool) -> None:
        self.program, self.name, self._in_place = program, name, in_place
        self.calls = program.calls()
        setup = program.setups[name]
        seed = program.seed % 1000 + 10 * program.workers.index(name)
        self.parameters = [
            torch.nn.Parameter(constant(seed + index, ROWS if kind == "T" else N, N))
            for index, kind in enumerate(setup.parameters)
        ]
        self._kept: list[Tensor] = []
        for parameter in self.parameters:
            self.keep(parameter)
        self.log: defaultdict[int, Log] = defaultdict(list)  # by the number of a hook or an operation
        self.leaves: dict[int, Tensor] = {}
        self.retained: dict[int, Tensor] = {}
        self.unfinished: list[Later] = []
        self.module = Affine(self.parameters[0])
        for number, (index, action) in enumerate(setup.hooks):
            self._hook_leaf(self.parameters[index], action, self.log[-1 - number])
        if setup.module_hook:
            log = self.log[-1000]
            self.module.register_full_backward_hook(lambda _, inward, outward: _remember_all(log, inward, outward))

    def keep(self, leaf: Tensor) -> None:
        """Two threads that use a leaf at once may block each other for good, in torch itself: one has the leaf's lock
        and wants the GIL, the other, in ``Function.apply`` or an index, the reverse.  Not while a graph holds its node.
        """
        with torch.enable_grad():
            self._kept.append(leaf.view_as(leaf))

    def _hook_leaf(self, leaf: Tensor, action: str, log: Log) -> None:
        if action.startswith("post"):
            in_place = self._in_place and action == "post change"
            leaf.register_post_accumulate_grad_hook(post_hook(log, action != "post", in_place))
        else:
            leaf.register_hook(tensor_hook(log, action == "scale"))


def _remember_all(log: Log, *gradients: Sequence[Tensor | None]) -> None:
    for each in gradients:
        for gradient in each:
            remember(log, gradient)


def tensor_hook(log: Log, scales: bool) -> Callable[[Tensor | None], Tensor | None]:
    def hook(gradient: Tensor | None) -> Tensor | None:
        remember(log, gradient)
        return gradient * 0.5 if scales and gradient is not None else None

    return hook


def post_hook(log: Log, scales: bool, in_place: bool) -> Callable[[Tensor], None]:
    def hook(leaf: Tensor) -> None:
        remember(log, leaf.grad)
        if scales and leaf.grad is not None:
            leaf.grad = leaf.grad.mul_(0.75) if in_place else leaf.grad * 0.75

    return hook


class Later:
    """The results of a call, which may still be under way."""

    def __init__(self, wait: Callable[[], list[Any]], finish: Callable[[], Any] = lambda: None) -> None:
        self.finish = finish  # waits until nothing of the call runs any more
        self._wait: Callable[[], list[Any]] | None = wait
        self._values: list[Any] = []
        self._lock = threading.Lock()

    def get(self) -> list[Any]:
        with self._lock:
            if self._wait is not None:
                self._values, self._wait = self._wait(), None
            return self._values


@dataclass
class Result:
    """One result of a call."""

    of: Later
    index: int


class Wire(Protocol):
    """How a machine reaches other workers."""

    def call(self, machine: Machine, op: Call, values: list[Any]) -> Later:
        """Starts a call."""

    def fetch(self, machine: Machine, rref: Any) -> Any:
        """``rref.to_here()``"""

    def refer(self, machine: Machine, value: Any) -> Any:
        """``RRef(value)``"""


class Machine:
    def __init__(self, home: Home, wire: Wire) -> None:
        self.home, self.wire = home, wire

    def run(self, ops: Sequence[Op], values: Values) -> None:
        for op in ops:
            self._step(op, values)

    def body(self, op: Call, arguments: Sequence[Any]) -> list[Any]:
        """What the callee does."""
        values = self.bind(op, arguments)
        self.run(op.body, values)
        return self.results(op, values)

    @staticmethod
    def bind(op: Call, arguments: Sequence[Any]) -> Values:
        return {there: argument for (_, there), argument in zip(op.args, arguments, strict=True)}

    @classmethod
    def results(cls, op: Call, values: Values) -> list[Any]:
        return [cls.get(values, there) for there, _ in op.results]

    @staticmethod
    def get(values: Values, number: int) -> Any:
        value = values[number]
        if isinstance(value, Result):
            value = values[number] = value.of.get()[value.index]
        return value

    def _step(self, op: Op, values: Values) -> None:
        match op:
            case Do():
                tensors = [self.get(values, each) for each in op.ins]
                made = OPERATIONS[op.name].run(self.home, op.number, *tensors)
                values.update(zip(op.outs, made if len(op.outs) > 1 else (made,), strict=True))
            case Hook():
                self._hook(op, self.get(values, op.value))
            case Fetch():
                values[op.out] = self.wire.fetch(self, self.get(values, op.rref))
            case Refer():
                values[op.out] = self.wire.refer(self, self.get(values, op.value))
            case NoGrad():
                with torch.no_grad():
                    self.run(op.body, values)
            case Call():
                self.start(op, values)

    def start(self, op: Call, values: Values) -> None:
        later = self.wire.call(self, op, self.arguments(op, values))
        for index, (_, here) in enumerate(op.results):
            values[here] = Result(later, index)
        self.home.unfinished.append(later)

    def arguments(self, op: Call, values: Values) -> list[Any]:
        arguments = [self.get(values, here) for here, _ in op.args]
        if not op.own:
            return arguments
        clones = {id(each): each.clone() for each in arguments}
        return [clones[id(each)] for each in arguments]

    def _hook(self, op: Hook, tensor: Tensor) -> None:
        if not tensor.requires_grad or any(tensor is each for each in self.home.parameters):
            return  # parameters get their hooks before anything runs, in one order wherever calls are at once
        if op.action == "retain":
            if not tensor.is_leaf:
                tensor.retain_grad()
                self.home.retained[op.number] = tensor
        else:
            tensor.register_hook(tensor_hook(self.home.log[op.number], op.action == "scale"))


def root_gradient(root: Root, tensor: Tensor) -> Tensor | None:
    return constant(root.given, *tensor.shape) if root.given else None


# --- what a call's values look like on their way ----------------------------------------------------------------------


class Box:
    """An object that only pickle can send."""

    def __init__(self, inside: list[Any]) -> None:
        self.inside = inside


def pack(how: Pack, values: list[Any]) -> Any:
    match how:
        case "single":
            return values[0] if values else None
        case "tuple":
            return tuple(values)
        case "list":
            return values
        case "dict":
            return {f"k{index}": value for index, value in enumerate(values)}
        case "nested":
            return {"first": values[:1], "rest": [(value, {"n": index}) for index, value in enumerate(values[1:])]}
        case "object":
            return Box(values)


def unpack(how: Pack, packed: Any) -> list[Any]:
    match how:
        case "single":
            return [packed] if packed is not None else []
        case "tuple" | "list":
            return list(packed)
        case "dict":
            return list(packed.values())
        case "nested":
            return [*packed["first"], *(value for value, _ in packed["rest"])]
        case "object":
            assert isinstance(packed, Box)
            return packed.inside
