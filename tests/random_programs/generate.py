"""A random program from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import get_args

from .language import (
    Call,
    Do,
    Fetch,
    Hook,
    How,
    LeafAction,
    NoGrad,
    Op,
    Pack,
    Program,
    Refer,
    Root,
    Setup,
    Step,
)
from .operations import OPERATIONS

_CHOICES = [name for name, operation in OPERATIONS.items() if operation.weight]
_WEIGHTS = [OPERATIONS[name].weight for name in _CHOICES]
# No views: one that was made in no_grad requires a gradient, but has no node; torch's own functions stumble over it.
_IN_NO_GRAD = ["add", "mul", "matmul", "tanh", "module", "two", "change", "clone", "tap", "first only", "leaf"]
_HOWS: list[How] = list(get_args(How))
_RETURNING: list[How] = ["sync", "async", "remote", "proxy sync", "proxy async", "proxy remote"]
_PACKS: list[Pack] = ["tuple", "list", "dict", "nested", "object"]
_LEAF_ACTIONS: list[LeafAction] = list(get_args(LeafAction))


class Scope:
    """The values that a block on one worker can use, with their kinds."""

    def __init__(self, worker: str, kinds: dict[int, str] | None = None) -> None:
        self.worker = worker
        self.kinds = kinds or {}

    def of(self, kind: str) -> list[int]:
        return [value for value, each in self.kinds.items() if each == kind]


def generate(seed: int, names: Sequence[str] = "abcde") -> Program:
    """Of two or more of these workers."""
    return _Author(seed, names).program()


class _Author:
    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.workers = self.random.sample(list(names), self.random.randint(2, len(names)))
        self.sparse = self.likely(0.6)
        # Where a gradient is undefined, torch runs post-accumulate hooks all the same, and telegrad does not.
        self.undefined = self.likely(0.5)
        self.computed: set[int] = set()  # references to what is no parameter: that needs a gradient even in no_grad
        self.setups = {name: self._setup() for name in self.workers}
        self.calls_left = self.random.choice([2, 4, 6, 8, 10])
        self._values = itertools.count(1)
        self._numbers = itertools.count(1)

    def likely(self, chance: float) -> bool:
        return self.random.random() < chance

    def _setup(self) -> Setup:
        parameters = "M" + "".join(self.random.choices("MT" if self.sparse else "M", k=self.random.randint(0, 2)))
        actions = [action for action in _LEAF_ACTIONS if not (action.startswith("post") and self.undefined)]
        hooks = tuple(
            (self.random.randrange(len(parameters)), self.random.choice(actions))
            for _ in range(self.random.choice([0, 0, 0, 1, 2]))
        )
        return Setup(parameters, hooks, self.likely(0.2))

    def program(self) -> Program:
        driver = self.random.choice(self.workers)
        count = self.random.choice([1, 1, 1, 2, 2, 3])
        steps: list[Step] = []
        scope = Scope(driver)
        for number in range(count):
            fresh = number > 0 and self.likely(0.3)
            if fresh:
                scope = Scope(driver)
                steps[-1] = Step(steps[-1].ops, steps[-1].roots, self.likely(0.3), steps[-1].on, steps[-1].fresh)
            steps.append(self._step(scope, fresh, retain=number < count - 1 or self.likely(0.2)))
        return Program(self.seed, driver, self.setups, tuple(steps))

    def _step(self, scope: Scope, fresh: bool, retain: bool) -> Step:
        ops = self.block(scope, self.random.randint(2, 12), 0)
        roots = []
        for _ in range(self.random.choice([1, 1, 1, 2])):
            more, root = self.loss(scope)
            ops += more
            roots.append(root)
        if self.likely(0.05):
            roots.append(roots[0])
        on = scope.worker
        if all(scope.kinds[root.value] == "RS" for root in roots) and self.likely(0.5):
            on = self.random.choice(self.workers)
        return Step(tuple(ops), tuple(roots), retain, on, fresh)

    # --- one operation after the other --------------------------------------------------------------------------

    def block(self, scope: Scope, size: int, depth: int) -> list[Op]:
        ops: list[Op] = []
        for _ in range(size):
            ops += self.some(scope, depth)
        return ops

    def plain_block(self, scope: Scope, size: int) -> list[Op]:
        """One that talks to nobody."""
        ops: list[Op] = []
        for _ in range(size):
            ops += self.hook(scope) if self.likely(0.2) else self.do(scope)
        return ops

    def no_grad_block(self, scope: Scope, size: int, depth: int) -> NoGrad:
        ops: list[Op] = []
        for _ in range(size):
            rrefs = [value for value in scope.kinds if value in self.computed]
            if depth < 3 and self.calls_left > 0 and self.likely(0.2):
                ops += self.call_without_gradients(scope)
            elif rrefs and self.likely(0.3):
                rref = self.random.choice(rrefs)
                ops.append(Fetch(self.values(scope, [scope.kinds[rref][1:]])[0], rref))
            else:
                ops += self.named(scope, self.random.choice(_IN_NO_GRAD))
        return NoGrad(tuple(ops))

    def some(self, scope: Scope, depth: int) -> list[Op]:
        dice = self.random.random()
        if dice < 0.3 and depth < 4 and self.calls_left > 0:
            return self.call(scope, depth)
        if dice < 0.42:
            return self.hook(scope)
        if dice < 0.46:
            return [self.no_grad_block(scope, self.random.randint(1, 3), depth)]
        if dice < 0.5:
            return self.reference(scope)
        return self.do(scope)

    def do(self, scope: Scope) -> list[Op]:
        return self.named(scope, self.random.choices(_CHOICES, _WEIGHTS)[0])

    def named(self, scope: Scope, name: str) -> list[Op]:
        if (name == "first only" and not self.undefined) or ("T" in OPERATIONS[name].ins and not self.sparse):
            return []
        ops, ins = self.inputs(scope, OPERATIONS[name].ins)
        number = next(self._numbers)
        if name.startswith("param"):
            parameters = self.setups[scope.worker].parameters
            having = [index for index, kind in enumerate(parameters) if kind == name[-1]]
            if not having:
                return []
            number = self.random.choice(having)
        return [*ops, Do(name, self.values(scope, OPERATIONS[name].outs), tuple(ins), number)]

    def values(self, scope: Scope, kinds: Sequence[str]) -> tuple[int, ...]:
        made = tuple(next(self._values) for _ in kinds)
        scope.kinds.update(zip(made, kinds, strict=True))
        return made

    def inputs(self, scope: Scope, kinds: str) -> tuple[list[Op], list[int]]:
        """Values of these kinds, and the operations that make those that are missing."""
        ops: list[Op] = []
        chosen = []
        for kind in kinds:
            while not scope.of(kind):
                ops += self.source(scope, kind)
            known = scope.of(kind)
            # Mostly new ones, so that programs are deep; and any of the old, so that they skip and share.
            chosen.append(self.random.choice(known[-3:] if self.likely(0.6) else known))
        return ops, chosen

    def source(self, scope: Scope, kind: str) -> list[Op]:
        """Something that makes a value of that kind."""
        match kind:
            case "M":
                return self.named(scope, "param M" if self.likely(0.8) else "leaf")
            case "T":
                return self.named(scope, "param T") or [Do("table", self.values(scope, "T"), (), next(self._numbers))]
            case "H":
                return self.named(scope, self.random.choice(["chunk", "narrow"]))
            case _:
                return self.named(scope, self.random.choice(["unbind", "select"]))

    def hook(self, scope: Scope) -> list[Op]:
        values = [value for value, kind in scope.kinds.items() if kind in "MHVTS"]
        if not values:
            return []
        return [
            Hook(
                self.random.choice(values[-4:]),
                self.random.choice(["count", "count", "scale", "retain"]),
                next(self._numbers),
            )
        ]

    def reference(self, scope: Scope) -> list[Op]:
        known = [value for value, kind in scope.kinds.items() if kind[0] == "R"]
        if known and self.likely(0.7):
            rref = self.random.choice(known)
            return [Fetch(self.values(scope, [scope.kinds[rref][1:]])[0], rref)]
        ops, (value,) = self.inputs(scope, "M")
        return [*ops, Refer(self.values(scope, ["RM"])[0], value)]

    # --- calls --------------------------------------------------------------------------------------------------

    def call(self, scope: Scope, depth: int, how: How | None = None) -> list[Op]:
        self.calls_left -= 1
        to = self.random.choice(self.workers)
        how = how or self.random.choice(_HOWS)
        if self.likely(0.12) and how not in ("rref", "relay"):
            return self.owning_call(scope, depth, to, how)
        ops: list[Op] = []
        if not scope.kinds:
            ops += self.named(scope, "param M")
        here = [self.random.choice(list(scope.kinds)) for _ in range(self.random.choice([0, 1, 1, 2, 2, 3]))]
        there = Scope(to)
        args = tuple((value, self.values(there, [scope.kinds[value]])[0]) for value in here)
        body = self.block(there, self.random.randint(0, 5), depth + 1)
        if how == "relay":
            body += self.call(there, depth + 1, self.random.choice(["sync", "async"]))
            body += self.plain_block(there, self.random.randint(0, 3))
        if how == "rref":
            more, returned = self.inputs(there, self.random.choice("MMMHVT" if self.sparse else "MMHV"))
            body += more
        else:
            more, returned = self.inputs(there, "M")
            body += more
            returned += self.random.choices(list(there.kinds), k=self.random.choice([0, 0, 1, 2, 3]))
            self.random.shuffle(returned)
        kinds = [("R" if how == "rref" else "") + there.kinds[value] for value in returned]
        results = tuple(zip(returned, self.values(scope, kinds), strict=True))
        if how == "rref" and any(isinstance(each, Do) and results[0][0] in each.outs and each.ins for each in body):
            self.computed.add(results[0][1])
        results_as: Pack = "single" if len(results) == 1 and self.likely(0.7) else self.random.choice(_PACKS)
        op = Call(next(self._numbers), to, how, args, tuple(body), results, self.random.choice(_PACKS), results_as)
        return [*ops, op]

    def call_without_gradients(self, scope: Scope) -> list[Op]:
        """One inside no_grad: nothing with a graph may come back, so no references, and no value that stays here."""
        self.calls_left -= 1
        how = self.random.choice(_RETURNING)
        to = self.random.choice([name for name in self.workers if how[-6:] != "remote" or name != scope.worker])
        ops, here = self.inputs(scope, "M" * self.random.randint(0, 2))
        there = Scope(to)
        args = tuple((value, self.values(there, "M")[0]) for value in here)
        body = self.plain_block(there, self.random.randint(0, 3))
        body += self.named(there, "clone")  # not a parameter, which needs a gradient anywhere
        returned = body[-1].outs[0]  # type: ignore[union-attr]
        results = ((returned, self.values(scope, "M")[0]),)
        return [*ops, Call(next(self._numbers), to, how, args, tuple(body), results)]

    def owning_call(self, scope: Scope, depth: int, to: str, how: How) -> list[Op]:
        """One in which both sides change what they received in place."""
        ops, here = self.inputs(scope, self.random.choice(["M", "MM"]))
        there = Scope(to)
        args = tuple((value, self.values(there, "M")[0]) for value in here)
        changed = args[0][1]
        body: list[Op] = self.hook(there) if self.likely(0.3) else []
        body.append(Do("mul_", self.values(there, "M"), (changed,)))
        body += self.block(there, self.random.randint(0, 4), depth + 1)
        body += self.named(there, "clone")
        returned = body[-1].outs[0]  # type: ignore[union-attr]
        (received,) = self.values(scope, "M")
        results = ((returned, received),)
        op = Call(next(self._numbers), to, how, args, tuple(body), results, "tuple", "single", own=True)
        ops.append(op)
        if self.likely(0.5):
            ops.append(Do("mul_", self.values(scope, "M"), (received,)))
        return ops

    # --- losses -------------------------------------------------------------------------------------------------

    def loss(self, scope: Scope) -> tuple[list[Op], Root]:
        given = next(self._numbers) if self.likely(0.2) else 0
        ops, used = self.inputs(scope, "M" * self.random.randint(1, 3))
        dice = self.random.random()
        if dice < 0.2:  # any shape, with a gradient given
            return ops, Root(used[0], given or next(self._numbers))
        if dice < 0.45:  # computed elsewhere
            to = self.random.choice(self.workers)
            there = Scope(to)
            args = tuple((value, self.values(there, "M")[0]) for value in used)
            body, (total,) = self._total(there, [inner for _, inner in args])
            (root,) = self.values(scope, ["RS"])
            ops.append(Call(next(self._numbers), to, "rref", args, tuple(body), ((total, root),), "tuple", "single"))
            return ops, Root(root, given)
        body, (root,) = self._total(scope, used)
        return [*ops, *body], Root(root, given)

    def _total(self, scope: Scope, used: list[int]) -> tuple[list[Op], tuple[int, ...]]:
        ops: list[Op] = []
        total = used[0]
        for value in used[1:]:
            (added,) = self.values(scope, "M")
            ops.append(Do(self.random.choice(["add", "mul", "matmul"]), (added,), (total, value)))
            total = added
        outs = self.values(scope, "S")
        ops.append(Do("total", outs, (total,), next(self._numbers)))
        return ops, outs
