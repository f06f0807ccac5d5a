"""One backward pass from its beginning to its end, on the worker that calls ``backward``: the root.

The other workers are drawn in by the messages that they get (``handlers``).  On each worker a pass has a state
(``backward_pass``); every event changes it under a lock and returns what follows: messages to send and units of the
graph to run, which a ``Run`` carries out with torch's engine (``run``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._agent.agent import Agent
from telegrad._ids import PassId
from telegrad.autograd.accumulate import Leaves
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.context import Context, Registry
from telegrad.autograd.context_end import ContextEnd
from telegrad.autograd.ddp import watch
from telegrad.autograd.diagnostics import nothing_came, reduce_everywhere, too_late
from telegrad.autograd.handlers import Handlers
from telegrad.autograd.interceptors import Interceptors
from telegrad.autograd.passes import Passes
from telegrad.autograd.run import Run, reduce


class Engine:
    """The autograd of one worker."""

    def backward(
        self,
        context: Context,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        retain_graph: bool,
        create_graph: bool,
        fast: bool,
        timeout: float,
    ) -> None:
        """Returns when every worker has done its part; ``timeout`` 0: waits for as long as all are alive."""
        this = self.passes.begin(context, roots, gradients, retain_graph, create_graph, fast, timeout)
        try:
            steps = this.step(this.start)  # find the units of the graph, and which are ready
            Run(self._agent, self.leaves, this).carry_out(steps)  # run them, and send gradients to other workers
            self._wait(this)  # until all workers are done; handlers run what becomes ready here
            if this.local.reports:
                self._take_reports(this)  # raise if gradients are missing; reduce for DistributedDataParallel
        except BaseException as error:
            this.fail(error)
            raise
        finally:
            self.passes.end(this)  # after an error, on all workers

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.registry = Registry(agent.me.worker_id, guessable=agent.options.allow_pickle)
        self.passes = Passes(agent, self.registry)
        self.interceptors = Interceptors(agent, self.registry)
        self.leaves = Leaves()
        self.swapping = self.leaves.swapping
        self._context_end = ContextEnd(agent, self.registry)
        self._handlers = Handlers(agent, self.passes, self.leaves)
        self._ddp_watch = watch()
        self.drop = self._context_end.drop
        agent.marshal.incoming = self.interceptors.incoming
        agent.answer_opened = self.interceptors.answered
        agent.lost_handlers.append(self._worker_lost)

    def _wait(self, this: Pass) -> None:
        """Waits until the pass is over; raises its error if it failed."""
        if not this.over:
            with self._agent.blocking():
                if not this.wait():
                    raise too_late(self._agent, this)
        if not this.over:
            assert this.error is not None
            raise this.error

    def _take_reports(self, this: Pass) -> None:
        """What workers have reported to be left when all are done."""
        reports = this.local.reports.values()
        if any(report.missing for report in reports):
            raise nothing_came(self._agent, this)
        if any(report.reduces for report in reports):
            reduce_everywhere(self._agent, this, self.reduce_rest)

    def reduce_rest(self, pass_id: PassId) -> None:
        """On each worker that holds gradients back until the end of a pass, when all else is done."""
        this = self.passes.find(pass_id)
        if this is not None and this.reductions is not None:
            with this.lock:
                rest = this.reductions.take_rest()
            reduce(self._agent, self.leaves, this, rest)

    def _worker_lost(self, worker: int) -> None:
        self._context_end.worker_lost(worker)
        self._handlers.worker_lost(worker)

    def close(self) -> None:
        """Removes what was registered with torch."""
        self._ddp_watch.remove()
