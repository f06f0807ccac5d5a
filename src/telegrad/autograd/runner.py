"""Runs the units of a pass with torch's engine, and sends what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._agent.agent import Agent
from telegrad._agent.failures import copy_of
from telegrad._torch import run_engine
from telegrad.autograd.accumulate import Leaves, address_of
from telegrad.autograd.backward_pass import Notes, Pass
from telegrad.autograd.context import context_variable
from telegrad.autograd.ddp import Reduction
from telegrad.autograd.diagnostics import nothing_came, too_late
from telegrad.autograd.functions import ANCHOR, Recv, here
from telegrad.autograd.graph import is_leaf_alone
from telegrad.autograd.local_pass import Job
from telegrad.autograd.turn import GradientBatch, Turn
from telegrad.errors import WorkerLostError

_ANCHOR_EDGE = get_gradient_edge(ANCHOR)
_LONG = 0.001  # seconds: the others should not wait longer for what a turn has done so far


class Runner:
    """``fail`` ends a pass with an error; ``lost`` makes one of the loss of a worker."""

    def __init__(
        self,
        agent: Agent,
        fail: Callable[[Pass, BaseException], None],
        lost: Callable[[int], WorkerLostError],
        leaves: Leaves,
    ) -> None:
        self._agent = agent
        self._fail = fail
        self._lost = lost
        self._leaves = leaves

    def carry_out(self, this: Pass, notes: Notes, jobs: Sequence[Job]) -> None:
        """Does what a pass wants done after an event."""
        if notes:
            self._post(this, notes)
        if jobs:
            self._take(Turn(this, jobs))

    def blocking(self, wait: Callable[[], bool]) -> bool:
        """Waits for another worker, in a way that the pool can see."""
        with self._agent.blocking():
            return wait()

    # --- a turn -------------------------------------------------------------------------------------------------

    def _take(self, turn: Turn) -> None:
        """Small units are faster one after the other, for under the GIL threads get in each other's way; after one that
        takes long, other threads get those that are left."""
        sent = time.monotonic()
        while turn.todo and turn.this.error is None:
            jobs = turn.next_jobs()
            if turn.letters and not jobs[0].unit.is_quick:
                self._send(turn)
            # A system call, so only where something waits for this unit; what comes up in it goes by the wall clock.
            begun = time.thread_time() if turn.todo else None
            self._run(turn, jobs)
            if not turn.todo:
                continue
            now = time.monotonic()
            if (now - sent if begun is None else time.thread_time() - begun) > _LONG:
                self._share(turn)
            elif now - sent > _LONG:
                self._send(turn)
                sent = now
        self._send(turn)

    def _share(self, turn: Turn) -> None:
        """Leaves what this thread has not begun to others, and sends what it has."""
        while turn.todo:
            self._agent.submit(lambda this, job: self._take(Turn(this, [job])), turn.this, turn.todo.popleft())
        self._send(turn)

    def _send(self, turn: Turn) -> None:
        if not turn.notes and not turn.letters:
            return
        notes, letters = turn.take_mail()
        if notes:
            self._post(turn.this, notes)
        for to, letter in letters.items():
            self._post_letter(turn.this, to, letter)

    def _post(self, this: Pass, notes: Notes) -> None:
        for to, payload in notes:
            if not self._agent.send_message(to, payload):
                self._fail(this, self._lost(to))

    def _post_letter(self, this: Pass, to: int, letter: GradientBatch) -> None:
        if this.error is None and not self._agent.send_message(to, letter.payload(this), tensors=letter.bundle):
            self._fail(this, self._lost(to))

    # --- torch's engine -----------------------------------------------------------------------------------------

    def _run(self, turn: Turn, jobs: Sequence[Job]) -> None:
        """Several units that have all they need, or one, on the calling thread."""
        this = turn.this
        try:
            edges, gradients = this.entries(jobs)
            if is_leaf_alone(edges, gradients) and self._leaves.after is None:
                this.forget_gradients(jobs)
                only: list[Tensor | None] = [gradients.pop()]
                self._leaves.add(this, [edges[0].node], only)
            elif edges:
                self._compute(turn, jobs, edges, gradients)
            if this.reductions:
                with this.lock:
                    ready = this.reductions_after(jobs)
                if any(ready):
                    self._share(turn)  # they wait for their groups
                self.reduce(this, ready)
            with this.lock:
                if this.error is None:
                    for job in jobs:
                        this.local.done(job)
                    notes, more = this.next_steps()
                    turn.notes += notes
                    turn.todo += more
        except BaseException as error:
            self._fail(this, error)

    def _compute(self, turn: Turn, jobs: Sequence[Job], edges: Sequence[GradientEdge], gradients: list[Tensor]) -> None:
        """In one call of torch's engine."""
        this = turn.this
        leaves, reached = jobs[0].unit.leaves, this.reached(jobs[0])
        if len(jobs) > 1:
            leaves = list(dict.fromkeys(leaf for job in jobs for leaf in job.unit.leaves))
            reached = {recv: parts for job in jobs for recv, parts in this.reached(job).items()}
        wanted = [GradientEdge(leaf, 0) for leaf in leaves]
        if reached:
            wanted.append(_ANCHOR_EDGE)
        if not wanted:
            return
        outer, here.run = here.run, _Run(self, turn, jobs, reached)
        # A hook may wait for another worker, and that one for what this turn has yet to send.
        agent = self._agent
        outer_wait = agent.before_waiting(partial(self._share, turn))
        entered = context_variable.set(this.context)
        try:
            results: list[Tensor | None] = list(
                run_engine(
                    tuple(edges),
                    tuple(gradients),
                    this.head.retain_graph,
                    this.head.create_graph,
                    tuple(wanted),
                    True,  # allow unused
                    accumulate_grad=False,
                )
            )
            gradients.clear()
            this.forget_gradients(jobs)
            if leaves:
                self._leaves.add(this, leaves, results)
        finally:
            context_variable.reset(entered)
            here.run = outer
            agent.before_waiting(outer_wait)

    def reduce(self, this: Pass, reductions: Iterable[Reduction]) -> None:
        """Hands what was held back to the modules that average it."""
        for reduction in reductions:
            if reduction:
                self.blocking(partial(reduction.run, this.context, self._leaves.swapping))

    def reduce_rest(self, this: Pass) -> None:
        """The same, at the end of a pass: nothing more can come."""
        with this.lock:
            rest, this.reductions = list(this.reductions.values()), {}
        self.reduce(this, rest)

    def gradient_for(self, turn: Turn, job: Job, message_id: int, part: int) -> Tensor | None:
        """Called by torch's engine: waits for what comes from the other end of a send."""
        this = turn.this
        with this.lock:
            here_already = message_id in this.gradients
            if not here_already:
                this.local.blocked(job, message_id)
                notes, more = this.next_steps()
                turn.notes += notes
                turn.todo += more
        if not here_already:
            self._share(turn)
            if not self.blocking(lambda: this.wait_for(lambda: message_id in this.gradients)):
                raise too_late(self._agent, this)
        if this.error is not None:
            raise copy_of(this.error)
        if this.over:
            raise nothing_came(self._agent, this)
        parts = this.gradients[message_id]
        return parts[part] if part in parts else this.zeros(message_id, part)

    def emit(
        self, turn: Turn, recv: Recv, gradients: dict[int, Tensor | None], at_once: bool, alone: bool = False
    ) -> None:
        """Called by torch's engine: what the tensors of a message got goes to its other end.

        ``alone``: nothing else can go along with it but an answer, which a letter that is counted waits for in vain.
        """
        this, to, agent = turn.this, recv.sender, self._agent
        letter = turn.letters.get(to)
        if letter is None:
            with this.lock:
                if this.error is not None:
                    raise copy_of(this.error)
                counted = this.local.flow.sent(to)
                this.told.add(to)
            try:
                letter = turn.letters[to] = GradientBatch(counted, agent.tensors_for(to, this.head.create_graph))
            except WorkerLostError:
                raise self._lost(to) from None
        this.memory_in_use.update(address_of(each) for each in gradients.values() if each is not None)
        letter.add(recv.message_id, gradients)
        if at_once or (alone and letter.counted) or not letter.may_grow:
            self._post_letter(this, to, turn.letters.pop(to))


class _Run:
    """What the nodes see of the engine call that runs them."""

    __slots__ = ("_alone", "_at_once", "_job", "_reached", "_ready", "_runner", "_turn")

    def __init__(self, runner: Runner, turn: Turn, jobs: Sequence[Job], reached: dict[Recv, set[int]]) -> None:
        self._runner, self._turn = runner, turn
        self._job = jobs[0]  # of several, none waits for anything, and all are quick
        self._at_once = turn.this.head.create_graph or not jobs[0].unit.is_quick
        self._reached = reached
        self._alone = len(reached) == 1 and not turn.todo and not turn.letters
        self._ready: dict[Recv, dict[int, Tensor | None]] = {}  # of messages of which another tensor is to come

    def gradient_for(self, message_id: int, part: int) -> Tensor | None:
        return self._runner.gradient_for(self._turn, self._job, message_id, part)

    def emit(self, recv: Recv, part: int, gradient: Tensor | None) -> None:
        ready = self._ready.setdefault(recv, {})
        ready[part] = gradient
        if len(ready) == len(self._reached[recv]):
            self._runner.emit(self._turn, recv, self._ready.pop(recv), self._at_once, self._alone)
