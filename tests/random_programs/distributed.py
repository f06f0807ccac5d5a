"""The same program by telegrad.  All that is called over there is here, by name, with the program known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from telegrad import autograd, rpc
from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad.rpc.functions import async_execution

from .language import Call, Program, Root
from .local import Expected, Seen, leaves_of, seen
from .machine import Home, Later, Machine, pack, root_gradient, unpack

TIMEOUT = 20.0

Mode = Literal["smart", "fast"]
Counts = dict[str, int]

_homes: dict[tuple[str, str], Home] = {}  # by run and worker: tests have many workers in one process
_runs = itertools.count()


def _machine(run: str) -> Machine:
    return Machine(_homes[run, current_worker().name], Telegrad(run))


# --- what the other workers are asked to do -----------------------------------------------------------------------


def prepare(run: str, program: Program) -> None:
    name = current_worker().name
    _homes[run, name] = Home(program, name, in_place=True)


def forget(run: str) -> None:
    del _homes[run, current_worker().name]


def finish(run: str) -> int:
    """Waits for the calls that this worker made; how many there were."""
    home = _homes[run, current_worker().name]
    unfinished, home.unfinished = home.unfinished, []
    for later in unfinished:
        later.get()
        later.finish()
    return len(unfinished)


def await_value(rref: RRef[Any]) -> None:
    rref.local_value()


def report(run: str, context_id: int) -> Seen:
    """What this worker has in the end; nothing may be in ``.grad``."""
    home = _homes[run, current_worker().name]
    for leaf in leaves_of(home):
        assert leaf.grad is None, f"{home.name} has a gradient in .grad"
    return seen(home, {id(leaf): gradient for leaf, gradient in autograd.get_gradients(context_id).items()})


def call(run: str, number: int, values: Any) -> Any:
    machine = _machine(run)
    op = machine.home.calls[number]
    return pack(op.results_as, machine.body(op, unpack(op.args_as, values)))


@async_execution
def relay(run: str, number: int, values: Any) -> torch.futures.Future[Any]:
    """Runs the body up to its last call; the rest when that is answered."""
    machine = _machine(run)
    op = machine.home.calls[number]
    known = machine.bind(op, unpack(op.args_as, values))
    last = max((index for index, each in enumerate(op.body) if isinstance(each, Call)), default=None)

    def finish() -> Any:
        machine.run(op.body[last + 1 if last is not None else 0 :], known)
        return pack(op.results_as, machine.results(op, known))

    if last is None:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(finish())
        return future
    machine.run(op.body[:last], known)
    inner: Any = op.body[last]
    arguments = pack(inner.args_as, machine.arguments(inner, known))
    reply = rpc.rpc_async(inner.to, call, (run, inner.number, arguments), timeout=TIMEOUT)

    def go_on(done: torch.futures.Future[Any]) -> Any:
        results = unpack(inner.results_as, done.wait())
        known.update(zip([here for _, here in inner.results], results, strict=True))
        return finish()

    return reply.then(go_on)


class Actor:
    """A value whose methods are called by its reference."""

    def __init__(self, run: str) -> None:
        self.run = run

    def call(self, number: int, values: Any) -> Any:
        return call(self.run, number, values)


def backward_here(context_id: int, roots: Sequence[Any], given: Sequence[Root], options: dict[str, Any]) -> None:
    """The roots are tensors of this worker, or references."""
    autograd.backward(context_id, roots, grad_tensors=_gradients(roots, given), timeout=TIMEOUT, **options)


def _gradients(roots: Sequence[Any], given: Sequence[Root]) -> list[Any] | None:
    """Only scalars come by reference, so that their shape is known here."""
    if not any(root.given for root in given):
        return None
    scalar = torch.zeros((), dtype=torch.double)
    return [
        root_gradient(root, scalar if isinstance(value, RRef) else value)
        for root, value in zip(given, roots, strict=True)
    ]


# --- making calls -------------------------------------------------------------------------------------------------


class Telegrad:
    """The wire of a machine whose calls go to other workers."""

    def __init__(self, run: str) -> None:
        self._run = run

    def call(self, machine: Machine, op: Call, values: list[Any]) -> Later:
        args = (self._run, op.number, pack(op.args_as, values))
        if op.how.startswith("proxy"):
            proxied = rpc.remote(op.to, Actor, (self._run,), timeout=TIMEOUT)
            way = op.how.removeprefix("proxy ")
            result = getattr(proxied, f"rpc_{way}" if way != "remote" else way)(TIMEOUT).call(*args[1:])
        else:
            way = {"relay": "sync", "rref": "remote"}.get(op.how, op.how)
            function = relay if op.how == "relay" else only if op.how == "rref" else call
            result = getattr(rpc, f"rpc_{way}" if way != "remote" else way)(op.to, function, args, timeout=TIMEOUT)
        if op.how == "rref":
            return Later(lambda: [result], lambda: rpc.rpc_sync(op.to, await_value, (result,)))
        if way == "async":
            return Later(lambda: unpack(op.results_as, result.wait()))
        results = unpack(op.results_as, result.to_here() if way == "remote" else result)
        return Later(lambda: results)

    def fetch(self, machine: Machine, rref: RRef[Any]) -> Any:
        return rref.to_here(TIMEOUT)

    def refer(self, machine: Machine, value: Any) -> RRef[Any]:
        return RRef(value)


def only(run: str, number: int, values: Any) -> Any:
    """As ``call``, for a body whose one result is to be referred to."""
    machine = _machine(run)
    op = machine.home.calls[number]
    return machine.body(op, unpack(op.args_as, values))[0]


# --- a whole program ----------------------------------------------------------------------------------------------


@dataclass
class Distributed:
    """The outcome of a run: what each worker has, and which notes went around in each backward."""

    seen: dict[str, Seen]
    notes: list[Counts]


def run(
    program: Program, expected: Sequence[Expected], mode: Mode = "smart", counts: Callable[[], Counts] = dict
) -> Distributed:
    """Runs on the driver.  ``expected`` says which roots need a gradient; ``counts`` which notes were sent so far."""
    key = f"{current_worker().name}-{next(_runs)}"
    for name in program.workers:
        rpc.rpc_sync(name, prepare, (key, program))
    try:
        with autograd.context() as context_id:
            return _run(program, expected, mode, counts, key, context_id)
    finally:
        for name in program.workers:
            rpc.rpc_sync(name, forget, (key,))


def _run(
    program: Program, expected: Sequence[Expected], mode: Mode, counts: Callable[[], Counts], key: str, context_id: int
) -> Distributed:
    driver = _machine(key)
    values: dict[int, Any] = {}
    notes = []
    for step, expects in zip(program.steps, expected, strict=True):
        values = {} if step.fresh else values
        driver.run(step.ops, values)
        before = counts()
        if expects.roots:
            given = [step.roots[index] for index in expects.roots]
            roots = [driver.get(values, root.value) for root in given]
            arguments = (context_id, roots, given, {"retain_graph": step.retain, "mode": mode})
            if step.on == program.driver:
                backward_here(*arguments)
            else:
                rpc.rpc_sync(step.on, backward_here, arguments, timeout=TIMEOUT * 2)
        notes.append({kind: count - before.get(kind, 0) for kind, count in counts().items()})
    while sum(rpc.rpc_sync(name, finish, (key,)) for name in program.workers):
        pass  # what was called made calls itself
    return Distributed({name: rpc.rpc_sync(name, report, (key, context_id)) for name in program.workers}, notes)
