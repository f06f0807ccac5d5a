"""The smallest program that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .language import Call, Do, Fetch, Hook, NoGrad, Op, Program, Refer, Step, inputs_of, outputs_of, replace, walk

Ops = tuple[Op, ...]


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Takes away whatever can go, until nothing can."""
    while True:
        for smaller in _smaller(program):
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.steps)):
        yield _pruned(replace(program, steps=program.steps[:index] + program.steps[index + 1 :]))
    count = program.size()
    for size in (16, 4, 1):
        for start in range(0, count, size):
            candidate = _pruned(_each_op(program, lambda at, op, s=start, n=size: () if s <= at < s + n else (op,)))
            if candidate.size() < count:
                yield candidate
    for name, setup in program.setups.items():
        for index in range(len(setup.hooks)):
            hooks = setup.hooks[:index] + setup.hooks[index + 1 :]
            yield replace(program, setups={**program.setups, name: replace(setup, hooks=hooks)})
        if setup.module_hook:
            yield replace(program, setups={**program.setups, name: replace(setup, module_hook=False)})
    yield from _simpler_steps(program)
    yield from _simpler_ops(program)


def _simpler_steps(program: Program) -> Iterator[Program]:
    for number, step in enumerate(program.steps):
        simpler = [
            replace(step, roots=step.roots[:index] + step.roots[index + 1 :]) for index in range(len(step.roots))
        ]
        simpler = simpler if len(step.roots) > 1 else []
        if step.on != program.driver:
            simpler.append(replace(step, on=program.driver))
        if step.retain and number == len(program.steps) - 1:
            simpler.append(replace(step, retain=False))
        for each in simpler:
            yield _pruned(replace(program, steps=(*program.steps[:number], each, *program.steps[number + 1 :])))


def _simpler_ops(program: Program) -> Iterator[Program]:
    ops = [op for step in program.steps for op in walk(step.ops)]
    for at, op in enumerate(ops):
        for simpler in _simpler(op, program.workers):
            yield _pruned(_each_op(program, lambda index, each, a=at, s=simpler: (s,) if index == a else (each,)))
        if isinstance(op, Do) and len(op.ins) == len(op.outs) == 1:  # do without it
            yield _pruned(_substituted(program, op))


def _simpler(op: Op, workers: list[str]) -> Iterator[Op]:
    match op:
        case Hook() if op.action != "count":
            yield replace(op, action="count")
        case Call():
            for index in range(len(op.args)):
                yield replace(op, args=op.args[:index] + op.args[index + 1 :])
            if len(op.results) > 1 or op.how != "rref":
                for index in range(len(op.results)):
                    yield replace(op, results=op.results[:index] + op.results[index + 1 :], results_as="tuple")
            if op.how not in ("sync", "rref"):
                yield replace(op, how="sync")
            if op.own:
                yield replace(op, own=False)
            if (op.args_as, op.results_as) != ("tuple", "tuple"):
                yield replace(op, args_as="tuple", results_as="tuple")
            for worker in workers[: workers.index(op.to)]:
                yield replace(op, to=worker)


def _each_op(program: Program, change: Callable[[int, Op], Ops]) -> Program:
    """Replaces each operation, given its number in the order of ``walk``."""
    count = -1

    def block(ops: Ops) -> Ops:
        nonlocal count
        changed: list[Op] = []
        for op in ops:
            count += 1
            for new in change(count, op):
                inner = block(new.body) if isinstance(new, Call | NoGrad) else ()
                changed.append(replace(new, body=inner) if isinstance(new, Call | NoGrad) else new)
                break
            else:
                count += sum(1 for _ in walk(op.body)) if isinstance(op, Call | NoGrad) else 0
        return tuple(changed)

    return replace(program, steps=tuple(replace(step, ops=block(step.ops)) for step in program.steps))


def _substituted(program: Program, gone: Do) -> Program:
    """Whoever used the operation's result uses its input."""
    (old,), (new,) = gone.outs, gone.ins

    def value(number: int) -> int:
        return new if number == old else number

    def change(_: int, op: Op) -> Ops:
        match op:
            case Do():
                return (replace(op, ins=tuple(map(value, op.ins))),) if op != gone else ()
            case Hook() | Refer():
                return (replace(op, value=value(op.value)),)
            case Fetch():
                return (replace(op, rref=value(op.rref)),)
            case Call():
                args = tuple((value(here), there) for here, there in op.args)
                return (replace(op, args=args, results=tuple((value(there), here) for there, here in op.results)),)
            case NoGrad():
                return (op,)

    changed = _each_op(program, change)
    steps = [
        replace(step, roots=tuple(replace(root, value=value(root.value)) for root in step.roots))
        for step in changed.steps
    ]
    return replace(changed, steps=tuple(steps))


def _pruned(program: Program) -> Program:
    """Without whatever needs values that are no longer there, and without workers that have nothing to do."""
    known: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        known = set() if step.fresh else known
        ops = _pruned_block(step.ops, known)
        roots = tuple(root for root in step.roots if root.value in known)
        if ops or roots:
            steps.append(replace(step, ops=ops, roots=roots))
    calls = [op for step in steps for op in walk(step.ops) if isinstance(op, Call)]
    used = {program.driver, *(op.to for op in calls), *(step.on for step in steps)}
    setups = {name: setup for name, setup in program.setups.items() if name in used}
    return replace(program, steps=tuple(steps), setups=setups)


def _pruned_block(ops: Ops, known: set[int]) -> Ops:
    left: list[Op] = []
    for op in ops:
        if isinstance(op, Call):
            args = tuple((here, there) for here, there in op.args if here in known)
            inside = {there for _, there in args}
            body = _pruned_block(op.body, inside)
            results = tuple((there, here) for there, here in op.results if there in inside)
            if op.how == "rref" and not results:
                continue
            results_as = "tuple" if op.results_as == "single" and len(results) != 1 else op.results_as
            op = replace(op, args=args, body=body, results=results, results_as=results_as)
        elif isinstance(op, NoGrad):
            op = replace(op, body=_pruned_block(op.body, set(known)))
            if not op.body:
                continue
        elif not all(value in known for value in inputs_of(op)):
            continue
        known.update(outputs_of(op))
        left.append(op)
    return tuple(left)
