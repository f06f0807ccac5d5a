"""Questions to other workers about a pass that does not end as it should, or that has something left to do."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._current import current_worker
from telegrad._ids import PassId
from telegrad._wire.callables import export
from telegrad.autograd.backward_pass import Pass
from telegrad.errors import MissingGradientError, RpcTimeoutError, WorkerLostError

_PATIENCE = 1.0  # seconds that a worker has to answer


def lost_in_backward(agent: Agent, worker: int) -> WorkerLostError:
    peer = agent.peer(worker)
    reason = f": {peer.reason}" if peer.reason else ""
    return WorkerLostError(f"worker {peer.name!r} was lost in a backward{reason}")


def nothing_came(agent: Agent, this: Pass) -> MissingGradientError:
    """The pass is over, and sends still wait for a gradient."""
    total, texts = 0, []
    for report in [each for each in this.local.reports.values() if each.missing]:
        total += report.missing
        here = report.worker == agent.me.worker_id
        missing = this.missing() if here else _ask(report.worker, missing_of, this.id)
        texts.append(f"on worker {agent.peer(report.worker).name!r}: {', '.join(missing or ['it does not say which'])}")
    advice = ", so FAST cannot finish (SMART can)" if this.head.fast else "; this is a bug in telegrad"
    return MissingGradientError(f"{total} sends got no gradient{advice}: {'; '.join(texts)}")


def too_late(agent: Agent, this: Pass) -> RpcTimeoutError:
    """The deadline has passed; the text has all that is known of the pass, here and on the workers of its context."""
    texts = [f"backward did not end within {this.timeout:g} s. This worker: {this!r}"]
    for worker in (this.context.workers | this.drawn_in) - {agent.me.worker_id}:
        if text := _ask(worker, describe_pass, this.id):
            texts.append(f". Worker {agent.peer(worker).name!r}: {text}")
    return RpcTimeoutError("".join(texts))


def _ask(worker: int, function: Callable[..., Any], pass_id: PassId) -> Any:
    """The result of a function on that worker; None if it gives none soon."""
    with contextlib.suppress(Exception):  # of any type: under ``telegrad.compat`` calls raise those of torch
        return current_worker().rpc_sync(worker, function, tuple(pass_id), timeout=_PATIENCE)
    return None


def reduce_everywhere(agent: Agent, this: Pass, reduce_here: Callable[[PassId], None]) -> None:
    """Where gradients were held back to the end, all workers reduce at once: they may be of one process group."""
    timeout = max(this.deadline - time.monotonic(), 0.001) if math.isfinite(this.deadline) else 0.0
    others = [each.worker for each in this.local.reports.values() if each.reduces and each.worker != agent.me.worker_id]
    worker = current_worker()
    futures = [worker.rpc_async(other, reduce_rest, tuple(this.id), timeout=timeout) for other in others]
    reduce_here(this.id)
    for future in futures:
        future.wait()


@export
def reduce_rest(root: int, number: int, token: int) -> None:
    """Runs on a worker that holds gradients back until the end of a pass."""
    current_worker().autograd.reduce_rest(PassId(root, number, token))


@export
def describe_pass(root: int, number: int, token: int) -> str:
    """Runs on any worker: what it knows of a pass."""
    this = current_worker().autograd.passes.find(PassId(root, number, token))
    return repr(this) if this is not None else ""


@export
def missing_of(root: int, number: int, token: int) -> list[str]:
    """Runs on a worker that waits for sends that get no gradient: which they are."""
    this = current_worker().autograd.passes.find(PassId(root, number, token))
    return this.missing() if this is not None else []
