"""Asking the other workers about a pass that does not end as it should, or of which something is left to do."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._current import current_worker
from telegrad._ids import PassId
from telegrad._wire.callables import export, name_of
from telegrad._wire.messages import Call
from telegrad.autograd.backward_pass import Pass
from telegrad.errors import MissingGradientError, RpcTimeoutError, TelegradError

_PATIENCE = 1.0  # seconds


def nothing_came(agent: Agent, this: Pass) -> MissingGradientError:
    """The pass is over, and somebody still waits."""
    total, texts = 0, []
    for report in [each for each in this.local.reports.values() if each.missing]:
        total += report.missing
        here = report.worker == agent.me.worker_id
        missing = this.missing() if here else _ask(agent, report.worker, missing_of, this.id)
        texts.append(f"on worker {agent.peer(report.worker).name!r}: {', '.join(missing or ['it does not say which'])}")
    advice = ", so FAST cannot finish (SMART can)" if this.head.fast else "; this is a bug in telegrad"
    return MissingGradientError(f"{total} sends got no gradient{advice}: {'; '.join(texts)}")


def too_late(agent: Agent, this: Pass) -> RpcTimeoutError:
    """The deadline has come; with all that is known of the pass."""
    return RpcTimeoutError(
        f"backward did not end within {this.timeout:g} s. This worker: {this!r}{_ask_around(agent, this)}"
    )


def _ask_around(agent: Agent, this: Pass) -> str:
    """What the other workers know of it."""
    near = [peer for peer in agent.peers if peer.links and peer.id != agent.me.worker_id]
    texts = [(peer.name, _ask(agent, peer.id, describe_pass, this.id)) for peer in near]
    return "".join(f". Worker {name!r}: {text}" for name, text in texts if text)


def _ask(agent: Agent, worker: int, function: Callable[..., Any], pass_id: PassId) -> Any:
    """The result of a function there; None if there is none soon."""
    name = name_of(function)
    assert name is not None
    with contextlib.suppress(TelegradError):
        peer = agent.peer(worker)
        call = agent.start_call(peer, name, _PATIENCE, lambda i, body: Call(i, name, body), (*pass_id, None))
        return agent.wait(call)
    return None


def reduce_everywhere(agent: Agent, this: Pass, reduce_here: Callable[[Pass], None]) -> None:
    """Where gradients were held back to the end: all reduce at once, for they may be of one process group."""
    name = name_of(reduce_rest)
    assert name is not None
    timeout = max(this.deadline - time.monotonic(), 0.001) if math.isfinite(this.deadline) else 0.0
    calls = []
    for report in [each for each in this.local.reports.values() if each.reduces]:
        if report.worker != agent.me.worker_id:
            peer = agent.peer(report.worker)
            calls.append(agent.start_call(peer, name, timeout, lambda i, body: Call(i, name, body), (*this.id, None)))
    reduce_here(this)
    for call in calls:
        agent.wait(call)


@export
def reduce_rest(root: int, number: int, token: int) -> None:
    """Runs on a worker that holds gradients back until the end of a pass."""
    current_worker().autograd.reduce_rest(PassId(root, number, token))


@export
def describe_pass(root: int, number: int, token: int) -> str:
    """Runs on any worker: what it knows of a pass."""
    this = current_worker().autograd.find_pass(PassId(root, number, token))
    return repr(this) if this is not None else ""


@export
def missing_of(root: int, number: int, token: int) -> list[str]:
    """Runs on a worker that waits for sends in vain: which they are."""
    this = current_worker().autograd.find_pass(PassId(root, number, token))
    return this.missing() if this is not None else []
