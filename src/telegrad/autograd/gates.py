"""Where a call of torch's engine enters the graph, and how it waits for a gradient that has not come.

If the gradients of all sources of a unit have come, the call starts right below the sends, with these gradients.
Otherwise it starts at the sends themselves, and each is a *gate*: the engine runs the node ``SendRpc``, whose backward
waits until the gradient is there.  While it waits, the thread that called the engine stands still.  So the engine must
come to a gate only when it has nothing else to do, and to the newest gate first (docs/autograd.md has the proof).

Of the nodes that are ready, torch's engine runs the one with the highest sequence number.  The numbers that are set
here are functions of what a node is, and not of the pass, since another pass of the same context may run the same
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad._agent.agent import Agent
from telegrad._agent.failures import copy_of
from telegrad._torch import input_metadata, runs_on_device, sequence_number, set_sequence_number
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.diagnostics import nothing_came, too_late
from telegrad.autograd.functions import SEND_NODE
from telegrad.autograd.graph import Unit, walk
from telegrad.autograd.local_pass import ROOT, Job
from telegrad.errors import UsageError

_NOTHING = torch.zeros(())  # the gradient that a gate is started with
_SEND: Any = SEND_NODE
_ABOVE_GATES = 1 << 60
_IN_ORDER = 1 << 61


def entries(this: Pass, jobs: Sequence[Job]) -> tuple[list[GradientEdge], list[Tensor]]:
    """The edges at which torch's engine starts, newest first, and the gradients that enter there."""
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    if len(jobs) > 1:
        _put_in_order([job.unit for job in jobs])
    for job in jobs:
        gates: list[Node] = []
        complete = this.local.arrived.issuperset(job.sources)
        for source in job.sources:
            if source == ROOT:
                edges += this.roots
                gradients += this.root_gradients
                continue
            nodes = this.context.sends[source].parts
            came: dict[int, Tensor | None] = this.gradients[source] if complete else {}
            all_came = len(came) == len(nodes)
            for part in range(len(nodes)) if all_came else this.live_parts(job, source):
                gradient = came.get(part)
                if gradient is None:
                    gates.append(nodes[part])
                    edges.append(GradientEdge(nodes[part], 0))
                    gradients.append(_NOTHING)
                else:
                    node, output = nodes[part].next_functions[0]
                    assert node is not None
                    edges.append(GradientEdge(node, output))
                    gradients.append(gradient)
        if not complete:
            _put_gates_last(job.unit, gates)
            _refuse_device(this, job, min(gates, key=sequence_number))
    return edges, gradients


def wait_for_gradient(agent: Agent, this: Pass, message_id: int) -> None:
    """Waits until the gradients of a message have come; raises if they cannot come any more."""
    with agent.blocking():
        if not this.wait(message_id):
            raise too_late(agent, this)
    if this.error is not None:
        raise copy_of(this.error)
    if this.over:
        raise nothing_came(agent, this)


def gradient_or_zeros(this: Pass, message_id: int, part: int) -> Tensor | None:
    """The gradient of one sent tensor.  FAST gives zeros if only others of the message got one, as torch does."""
    parts = this.gradients[message_id]
    if part in parts:
        return parts[part]
    node, output = this.context.sends[message_id].parts[part].next_functions[0]
    if node is None:
        return None
    metadata = input_metadata(node, output)
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _put_gates_last(unit: Unit, gates: Sequence[Any]) -> None:
    """Makes torch's engine run a gate only when no other node is ready, and the newest gate first."""
    for gate in gates:
        message_id, part = gate.sent
        set_sequence_number(gate, message_id << 12 | min(part, 0xFFF))
    for node in unit.nodes:
        number = sequence_number(node)
        if number < _ABOVE_GATES and type(node) is not _SEND:
            set_sequence_number(node, number + _ABOVE_GATES)


def _put_in_order(units: Sequence[Unit]) -> None:
    """Makes torch's engine run one unit after the other, as it would in calls of their own.

    Their nodes may have been made by different threads, each of which counts for itself.  A custom function that uses
    the memory of its gradient again relies on this order.
    """
    for unit in units:
        first = _IN_ORDER + (min(max(unit.sources), 1 << 39) << 20)
        nodes = [node for node in unit.nodes if type(node) is not _SEND]
        for rank, node in enumerate(sorted(nodes, key=sequence_number)):
            set_sequence_number(node, first + rank)


def _refuse_device(this: Pass, job: Job, last: Any) -> None:
    """Raises if nodes of a unit may run on a device while it waits at a gate; ``last`` is the gate that opens last.

    A gate waits on the thread that called the engine, and the nodes of a device run on that device's thread.  If these
    could run meanwhile, the unit would count as blocked while it still computes, so that the pass could end too early,
    and an error there would not reach the thread that waits.  What is below the last gate cannot run before it opens.
    """
    on_device = {node for node in job.unit.nodes if runs_on_device(node)}
    if not on_device:
        return
    for node in walk([(last, 0)]):
        on_device.discard(node)
    if on_device:
        missing = [this.describe(source) for source in job.sources if source not in this.local.arrived]
        first = next(node for node in job.unit.nodes if node in on_device)
        raise UsageError(
            f"{type(first).__name__} runs on a device, in a part of the graph that must wait for gradients "
            f"from other workers ({', '.join(missing)}): that works on the CPU only. It must wait where a tensor is "
            "sent and is also used on the sending worker. Call .cpu() on that tensor first; send and use the copy"
        )
