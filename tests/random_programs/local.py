"""The oracle: the same program as one local graph.

A call is a plain call, and each tensor that crosses between workers goes through a node of its own, as many times as it
is sent.  So a hook on a received tensor has something to sit on, and the graph shows where the workers' parts end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from .language import Call, Program
from .machine import Home, Later, Machine, root_gradient

Edge = tuple[Node | None, int]


class Crossing(torch.autograd.Function):
    """One tensor of one message."""

    @staticmethod
    def forward(ctx: Any, message: int, tensor: Tensor) -> Tensor:
        ctx.message = message
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, gradient


_CROSSING: Any = Crossing._backward_cls
_LEAF = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


@dataclass(eq=False)
class Reference:
    """What an RRef is here."""

    owner: str
    value: Any


@dataclass(frozen=True)
class Expected:
    """What a backward should cost."""

    roots: tuple[int, ...]  # which of the step's roots need a gradient at all
    gradients: int = 0  # how many messages are reached
    parts: int = 0  # how many of their tensors
    meets: bool = False  # whether sources meet, so that there must be a plan


@dataclass
class Seen:
    """What one worker has in the end."""

    gradients: list[Tensor | None]
    leaves: dict[int, Tensor]  # of other leaves than parameters, and where retain_grad was called
    retained: dict[int, Tensor]
    log: dict[int, list[Tensor | None]]
    count: int  # of leaves that have a gradient


@dataclass
class Local:
    """The outcome of a local run."""

    expected: list[Expected] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)


class World:
    """All workers at once; the wire of every machine."""

    def __init__(self, program: Program) -> None:
        self.machines = {name: Machine(Home(program, name, in_place=False), self) for name in program.workers}
        self.messages: list[list[Node]] = []

    def cross(self, sender: str, receiver: str, values: Sequence[Any]) -> list[Any]:
        """Sends one message; a tensor that is in it twice is one tensor over there too."""
        made: dict[int, Tensor] = {}
        nodes: list[Node] = []
        for value in values:
            if isinstance(value, Tensor) and id(value) not in made:
                crossed = made[id(value)] = Crossing.apply(len(self.messages), value)
                if crossed.grad_fn is not None:
                    nodes.append(crossed.grad_fn)
        self.messages.append(nodes)
        return [made[id(value)] if isinstance(value, Tensor) else value for value in values]

    def call(self, machine: Machine, op: Call, values: list[Any]) -> Later:
        here, there = machine.home.name, self.machines[op.to]
        arguments = self.cross(here, op.to, values)
        with torch.enable_grad():  # no_grad is the caller's own business
            results = there.body(op, arguments)
        if op.how == "rref":
            results = [Reference(op.to, results[0])]
        elif not (op.how in ("remote", "proxy remote") and op.to == here):
            results = self.cross(op.to, here, results)
        return Later(lambda: results)

    def fetch(self, machine: Machine, rref: Reference) -> Any:
        here = machine.home.name
        return rref.value if rref.owner == here else self.cross(rref.owner, here, [rref.value])[0]

    def refer(self, machine: Machine, value: Any) -> Reference:
        return Reference(machine.home.name, value)

    # --- what it should cost ------------------------------------------------------------------------------------

    def expect(self, roots: Sequence[Tensor], usable: Sequence[int]) -> Expected:
        edges = [get_gradient_edge(root) for root in roots]
        sources = [_part([(edge.node, edge.output_nr) for edge in edges])]
        sources += [_part([edge for node in nodes for edge in node.next_functions]) for nodes in self.messages]
        live = self._live([(edge.node, edge.output_nr) for edge in edges])
        messages = {node.message for node in live}
        meets = self._meets(sources, {0, *(message + 1 for message in messages)})
        return Expected(tuple(usable), len(messages), len(live), meets)

    @staticmethod
    def _live(edges: list[Edge]) -> list[Any]:
        """The crossings that get a gradient."""
        seen: set[Node] = set()
        live: list[Any] = []
        while edges:
            node, _ = edges.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node) is _CROSSING:
                live.append(node)
            edges.extend(node.next_functions)
        return live

    @staticmethod
    def _meets(sources: list[set[Any]], live: set[int]) -> bool:
        """Whether a live source shares a node with any other."""
        where: dict[Any, list[int]] = {}
        for index, nodes in enumerate(sources):
            for node in nodes:
                where.setdefault(node, []).append(index)
        return any(len(met) > 1 and live & set(met) for met in where.values())


def _part(edges: list[Edge]) -> set[Any]:
    """What a source reaches on its worker: nodes, leaves with hooks, and the messages at which the part ends."""
    seen: set[Any] = set()
    while edges:
        node, _ = edges.pop()
        if node is None or node in seen:
            continue
        if type(node) is _CROSSING:
            seen.add(node.message)  # type: ignore[attr-defined]
        elif type(node) is _LEAF:
            leaf: Any = node.variable  # type: ignore[attr-defined]
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                seen.add(node)
        else:
            seen.add(node)
            edges.extend(node.next_functions)
    return seen


def run(program: Program) -> Local:
    world = World(program)
    driver = world.machines[program.driver]
    outcome = Local()
    values: dict[int, Any] = {}
    for step in program.steps:
        values = {} if step.fresh else values
        driver.run(step.ops, values)
        backward = world.machines[step.on]
        given, gradients, usable = [], [], []
        for index, root in enumerate(step.roots):
            value = driver.get(values, root.value)
            tensor = world.fetch(backward, value) if isinstance(value, Reference) else value
            if tensor.requires_grad:
                usable.append(index)
                given.append(tensor)
                gradients.append(root_gradient(root, tensor))
        outcome.expected.append(world.expect(given, usable) if given else Expected(()))
        if given:
            torch.autograd.backward(given, gradients, retain_graph=step.retain)
            _own_gradients(world)
    for name, machine in world.machines.items():
        outcome.seen[name] = seen(machine.home, {id(leaf): leaf.grad for leaf in leaves_of(machine.home)})
    return outcome


def _own_gradients(world: World) -> None:
    """torch may leave leaves with gradients that share memory, and a later backward adds to one of them in place.

    Say ``x.view(16) + y.view(16)``, where one gradient goes to both; or an embedding, whose sparse one is made of it.
    """
    for machine in world.machines.values():
        for leaf in leaves_of(machine.home):
            leaf.grad = leaf.grad.clone() if leaf.grad is not None else None


def leaves_of(home: Home) -> Iterable[Tensor]:
    return [*home.parameters, *home.leaves.values()]


def seen(home: Home, gradients: dict[int, Tensor | None]) -> Seen:
    """Gradients are given by the ids of the leaves."""
    return Seen(
        [gradients.get(id(leaf)) for leaf in home.parameters],
        {number: gradient for number, leaf in home.leaves.items() if (gradient := gradients.get(id(leaf))) is not None},
        {number: tensor.grad for number, tensor in home.retained.items() if tensor.grad is not None},
        {number: log for number, log in home.log.items() if log},
        sum(1 for gradient in gradients.values() if gradient is not None),
    )
