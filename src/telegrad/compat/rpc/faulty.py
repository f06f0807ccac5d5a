"""A worker that loses and delays chosen messages: it replaces the agent with which torch tests its retries.

torch's names for messages, and telegrad's:

============================= =========================================================================
SCRIPT_CALL, PYTHON_CALL      ``Call`` of one of torch's operators, or of another function
SCRIPT_REMOTE_CALL, PYTHON_…  ``RemoteCall``, in the same way
SCRIPT_RREF_FETCH_CALL        ``Fetch``
RREF_FORK_REQUEST             ``ForkRequest``: never lost, as the next three
RREF_CHILD_ACCEPT             ``ChildConfirmed``
RREF_USER_DELETE              ``UserDelete``
CLEANUP_AUTOGRAD_CONTEXT_REQ  ``DropContext``
============================= =========================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._agent.peers import Peer
from telegrad._core.interface import Link
from telegrad._wire.messages import (
    Call,
    ChildConfirmed,
    DropContext,
    Fetch,
    ForkRequest,
    Message,
    RemoteCall,
    UserDelete,
)
from telegrad.compat.rpc import backend_registry
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.constants import DEFAULT_INIT_METHOD
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.compat.worker import BUILTIN, CompatWorker
from telegrad.rpc.options import UNSET

BACKEND = "FAULTY_TENSORPIPE"

#: torch repeats these until they arrive; telegrad's links lose none.
_NEVER_LOST_TYPES: dict[type, str] = {
    ForkRequest: "RREF_FORK_REQUEST",
    ChildConfirmed: "RREF_CHILD_ACCEPT",
    UserDelete: "RREF_USER_DELETE",
    DropContext: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
_NEVER_LOST = frozenset(_NEVER_LOST_TYPES.values())


class FaultyTensorPipeAgent(TensorPipeAgent):
    """The same class as any agent, as in torch."""


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    def __init__(
        self,
        *,
        num_worker_threads: int = UNSET,
        rpc_timeout: float = UNSET,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        self.worker_type = self._make_worker  # type: ignore[assignment]

    def _make_worker(self, *args: Any) -> FaultyWorker:
        worker = FaultyWorker(*args)
        worker.faults = self
        return worker


class FaultyWorker(CompatWorker):
    faults: FaultyTensorPipeRpcBackendOptions

    def _dial_peer(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        link = super()._dial_peer(agent, peer, timeout)
        link.send = self._faulty(link)  # type: ignore[method-assign]
        return link

    def _faulty(self, link: Link) -> Callable[..., None]:
        send = link.send

        def send_perhaps(message: Message, *args: Any, **kwargs: Any) -> None:
            name = _name_of(message)
            if name in self.faults.messages_to_fail and name not in _NEVER_LOST:
                self._expire(link, message.call_id)  # type: ignore[union-attr]
            elif delay := self.faults.messages_to_delay.get(name, 0.0):
                later = threading.Timer(delay, send, (message, *args), kwargs)
                later.daemon = True
                later.start()
            else:
                send(message, *args, **kwargs)

        return send_perhaps

    def _expire(self, link: Link, call_id: int) -> None:
        """Fails a call as if it had timed out: a call is never repeated."""
        pending = link.pending.get(call_id)
        if pending is not None:
            pending.waited_for = True  # it is settled on this thread: before the caller has its future, as in torch
            self.agent.plane.settle(pending, self.agent.calls.timed_out(pending))
            if pending.then is not None:
                pending.then(link, pending)


def _name_of(message: Message) -> str:
    match message:
        case Call(function=function):
            return "SCRIPT_CALL" if function.startswith(BUILTIN) else "PYTHON_CALL"
        case RemoteCall(function=function):
            return "SCRIPT_REMOTE_CALL" if function.startswith(BUILTIN) else "PYTHON_REMOTE_CALL"
        case Fetch():
            return "SCRIPT_RREF_FETCH_CALL"
    return _NEVER_LOST_TYPES.get(type(message), "")


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyTensorPipeRpcBackendOptions
) -> TensorPipeAgent:
    agent = backend_registry.init_telegrad(store, name, rank, world_size, rpc_backend_options)
    return FaultyTensorPipeAgent(agent._worker, rpc_backend_options, world_size)


def register() -> None:
    if not backend_registry.backend_registered(BACKEND):
        backend_registry.register_backend(BACKEND, _options, _init)
