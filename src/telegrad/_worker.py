"""One worker: its agent, its references and its autograd engine, and the operations of ``telegrad.rpc`` on them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.barrier import BarrierLeader, go_round, leader_of, repeated_notice
from telegrad._agent.dispatch import run_call
from telegrad._agent.futures import Future
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._call_arguments import call_value, naming_argument
from telegrad._core.interface import How, Link, Pending
from telegrad._current import adopt, current_worker
from telegrad._ids import GlobalId
from telegrad._rref.references import Owned, References
from telegrad._rref.rref import UNSET_TIMEOUT, RRef, handle, receive_handle
from telegrad._wire.callables import export
from telegrad._wire.messages import Call, Fetch, RemoteCall
from telegrad._wire.values import Route
from telegrad.autograd.api import backward
from telegrad.autograd.engine import Engine
from telegrad.errors import (
    NotInitializedError,
    RpcTimeoutError,
    SerializationError,
    TelegradError,
    UsageError,
    WorkerLostError,
)

log = logging.getLogger("telegrad.rpc")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the id of a worker, as :func:`telegrad.rpc.get_worker_info` gives them.

    Args:
        name (str): The name that the worker gave to ``init_rpc``.
        id (int): Its rank.
    """

    name: str
    id: int


To = str | int | WorkerInfo


class Worker:
    #: The classes of the futures and references that calls return; ``telegrad.compat`` has subclasses.
    future_type: type[Future] = Future
    rref_type: type[RRef[Any]] = RRef

    def __init__(
        self,
        me: WorkerRecord,
        options: AgentOptions,
        dial: Callable[[Agent, Peer, float], Link],
        make_route: Callable[[WorkerRecord], Route],
    ) -> None:
        self._timeout = options.timeout
        self._make_route = make_route
        self._dial = dial
        self.agent = Agent(me, options, self._dial_peer, self._on_thread_start)
        self.agent.on_request(Call, partial(run_call, self.agent), How.CALL)
        self.references = References(self.agent, receive_handle)
        self.references.worker = self
        self.autograd = Engine(self.agent)
        self._leader = BarrierLeader(self.agent)
        self._on_close: list[Callable[[], None]] = [self.autograd.close]
        self.on_fork: list[Callable[[], None]] = [self.autograd.close]  # called in a forked child
        self.keep: tuple[Any, ...] = ()  # objects that must live as long as the worker
        self.closed = False
        self._at_barrier = False  # waits for the other workers, in a graceful shutdown
        self._served = 0  # number of served calls when a graceful shutdown last could log
        self.add_peer(me)

    @property
    def name(self) -> str:
        return self.agent.me.name

    @property
    def id(self) -> int:
        return self.agent.me.worker_id

    def add_peer(self, record: WorkerRecord) -> Peer:
        route = self._make_route(record)
        route.outgoing = self.autograd.interceptors.outgoing
        return self.agent.add_peer(record, route)

    def _dial_peer(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        if peer.id == self.id:
            return agent.loopback()
        return self._dial(agent, peer, timeout)

    def _on_thread_start(self) -> None:
        """Runs first on each thread of the pool.

        torch keeps the weights that autocast has cast in one cache for all threads, so calls that run at the same time
        would share them, and their gradients would be added in the low precision.  The setting is per thread.
        """
        adopt(self)
        torch.set_autocast_cache_enabled(False)

    def start(self) -> None:
        self.agent.start()

    def on_close(self, action: Callable[[], None]) -> None:
        self._on_close.append(action)

    # --- workers ------------------------------------------------------------------------------------------------

    def info(self, of: To | None = None) -> WorkerInfo:
        if of is None:
            return WorkerInfo(self.name, self.id)
        peer = self._peer(of)
        return WorkerInfo(peer.name, peer.id)

    def _peer(self, to: To) -> Peer:
        if type(to) is str or type(to) is int:
            return self.agent.peer(to)
        if isinstance(to, WorkerInfo):
            return self.agent.peer(to.id)
        name = getattr(to, "name", None)  # torch's own WorkerInfo, for example
        if isinstance(name, str):
            return self.agent.peer(name)
        raise UsageError(f"a worker is named by its name, its id or its WorkerInfo, not by {to!r}")

    # --- timeouts -----------------------------------------------------------------------------------------------

    @property
    def default_timeout(self) -> float:
        return self._timeout

    @default_timeout.setter
    def default_timeout(self, seconds: float) -> None:
        self._timeout = seconds

    def seconds(self, timeout: float) -> float:
        """The seconds of a timeout that the user gave; 0 means no limit."""
        if timeout == UNSET_TIMEOUT:
            return self._timeout
        if not isinstance(timeout, (int, float)) or timeout < 0:
            raise UsageError(f"a timeout is a number of seconds, or 0 for none, not {timeout!r}")
        return float(timeout)

    # --- calls --------------------------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: To,
        func: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Any:
        return self.agent.wait(self.start_call(to, func, args, kwargs, timeout))

    def rpc_async(
        self,
        to: To,
        func: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future:
        future = self.future_type()
        try:
            self.start_call(to, func, args, kwargs, timeout, future)
        except (WorkerLostError, RpcTimeoutError) as error:
            future.set_exception(error)  # as if the worker had been lost after the call was sent
        return future

    def start_call(
        self,
        to: To,
        func: Any,
        args: Any,
        kwargs: Any = None,
        timeout: float = UNSET_TIMEOUT,
        future: Future | None = None,
    ) -> Pending:
        """Starts a call.  Without a future, ``Agent.wait`` returns its result."""
        if self.closed:
            self._check_open()
        if self.references.dropped:
            self.references.let_go()
        peer = self._peer(to)
        name, pickled, value = call_value(peer, func, args, kwargs)
        try:
            return self.agent.start_call(
                peer,
                name or repr(func),
                self.seconds(timeout),
                lambda call_id, body: Call(call_id, name, body, pickled),
                value,
                future,
            )
        except SerializationError as error:
            raise naming_argument(error, peer, func, value, bool(name or pickled)) from error.__cause__

    def remote(
        self,
        to: To,
        func: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> RRef[Any]:
        self._check_open()
        peer = self._peer(to)
        if peer.id == self.id:
            return self._remote_to_self(func, args, kwargs, timeout)
        name, pickled, value = call_value(peer, func, args, kwargs)
        self.references.let_go()
        seconds = self.seconds(timeout)
        deadline = time.monotonic() + seconds if seconds else math.inf
        self.agent.link_to(peer, deadline)  # a lost peer raises here, not in to_here
        rref_id, fork_id = self.references.create_remote(peer.id)
        rref = handle(self.references, rref_id, fork_id, peer.id)
        future = rref._creation = self.creation_future()
        notice = None
        if future is None:
            notice = partial(self._remote_done, fork_id)
        else:
            future.add_done_callback(lambda done: self._remote_done(fork_id, _error_of(done)))
        try:
            self.agent.start_call(
                peer,
                name or repr(func),
                self.seconds(timeout),
                lambda call_id, body: RemoteCall(call_id, name, rref_id, fork_id, body, pickled),
                value,
                future,
                notice,
            )
        except BaseException as error:  # also a Ctrl-C while the arguments are packed
            reason = error if isinstance(error, TelegradError) else UsageError(f"remote was interrupted: {error!r}")
            self.references.not_created(fork_id, reason)
            if isinstance(error, SerializationError):
                raise naming_argument(error, peer, func, value, bool(name or pickled)) from error.__cause__
            raise
        return rref

    def creation_future(self) -> Future | None:
        """A future that is done when the owner has made a value of ``remote``; None here, because it costs 100 us."""
        return None

    def _remote_done(self, fork_id: GlobalId, error: Exception | None) -> None:
        if isinstance(error, TelegradError):
            self.references.not_created(fork_id, error)
        else:
            self.references.created(fork_id)

    def _remote_to_self(self, func: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        """``remote`` to this worker: copies the arguments, and refers to the result itself."""
        peer = self._peer(self.id)
        name, pickled, value = call_value(peer, func, args, kwargs)
        owned = Owned()
        rref: RRef[Any] = self.rref_type.__new__(self.rref_type)
        rref._become_owner(self.references, owned)
        rref_id = rref._rref_id
        future = rref._creation = self.future_type()

        def done(future: torch.futures.Future[Any]) -> None:
            try:
                future.wait()
            except TelegradError as error:  # a timeout, or a shutdown; otherwise the value is set already
                owned.set(None, error)

        future.add_done_callback(done)
        try:
            self.agent.start_call(
                peer,
                name or repr(func),
                self.seconds(timeout),
                lambda call_id, body: RemoteCall(call_id, name, rref_id, rref_id, body, pickled),
                value,
                future,
            )
        except SerializationError as error:
            raise naming_argument(error, peer, func, value, bool(name or pickled)) from error.__cause__
        return rref

    def fetch(self, owner: int, rref_id: GlobalId, timeout: float, what: str) -> Any:
        self._check_open()
        peer = self.agent.peer(owner)
        return self.agent.wait(
            self.agent.start_call(
                peer, f"to_here of {what}", self.seconds(timeout), lambda call_id, body: Fetch(call_id, rref_id, body)
            )
        )

    def backward_of(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        if rref.is_owner():
            run_backward_of(rref, context_id, retain_graph)
        else:
            self.rpc_sync(rref._owner, run_backward_of, (rref, context_id, retain_graph))

    def wait_locally(self, wait: Callable[[], bool]) -> bool:
        """Calls a function that blocks.  While it does, the calling thread does not count as a running call."""
        with self.agent.blocking():
            return wait()

    def _check_open(self) -> None:
        if self.closed:
            raise NotInitializedError(f"worker {self.name!r} has shut down: call init_rpc again first")

    # --- shutdown -----------------------------------------------------------------------------------------------

    def shutdown(self, graceful: bool = True, timeout: float = 0.0) -> None:
        """Leaves the job; if ``graceful``, when no worker has a call under way."""
        if self.closed:
            return
        if graceful and (self.agent.serves_here() or self.agent.coroutines.runs_here()):
            raise UsageError("a function that runs for another worker cannot call shutdown: it would wait for itself")
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        begun = time.monotonic()
        self._served = self.agent.served_calls
        try:
            if graceful:
                with repeated_notice(lambda: self._say_what_shutdown_awaits(time.monotonic() - begun)):
                    self._wait_for_all(deadline, timeout)
        finally:
            self.closed = True
            self.agent.say_goodbye()
            for action in self._on_close:
                action()
            self.agent.close()

    def _wait_for_all(self, deadline: float, timeout: float) -> None:
        seen = -1
        number = 0
        while True:
            self._at_barrier = False
            while len(self.agent.calls) or self.agent.plane.unfinished or self.agent.coroutines.running:
                if time.monotonic() > deadline:
                    raise RpcTimeoutError(f"shutdown waited {timeout:g} s for {self.agent!r}")
                time.sleep(0.002)
            active = self.agent.calls.started != seen and seen >= 0
            left = max(deadline - time.monotonic(), 0.001) if timeout > 0 else 0.0
            self._at_barrier = True
            try:
                again = go_round(self.agent, self._leader, number, active, left)
            except RpcTimeoutError as error:
                missing = ", ".join(self._missing()) or "some of them"
                raise RpcTimeoutError(
                    f"shutdown waited {timeout:g} s for the other workers: {missing} did not call shutdown"
                ) from error
            if number and not again:
                return
            number += 1
            seen = self.agent.calls.started

    def _say_what_shutdown_awaits(self, seconds: float) -> None:
        """Logs what a graceful shutdown waits for, unless this worker has served a call since the last time."""
        before, self._served = self._served, self.agent.served_calls
        if self._served != before or (self._at_barrier and self.agent.plane.unfinished):
            return
        if self._at_barrier:
            awaited = f"{', '.join(self._missing()) or 'the others'} to call shutdown and end their calls"
        else:
            running = self.agent.plane.unfinished
            awaited = f"its own calls ({self.agent.calls!r}) and functions that run here for others ({running})"
        log.warning("worker %r: shutdown has waited %.0f s for %s", self.name, seconds, awaited)

    def _missing(self) -> list[str]:
        """The names of the workers that have not reached the barrier, from its leader."""
        try:
            names: list[str] = self.rpc_sync(leader_of(self.agent).id, missing_at_barrier, timeout=1.0)
        except TelegradError:
            return []
        return names

    def abandon(self) -> None:
        """Ends the worker as if it were killed, without a ``Goodbye``.  For tests."""
        self.closed = True
        for action in self._on_close:
            action()
        self.agent.close()

    def disown(self) -> None:
        """In a forked child: closes the inherited descriptors, without sending anything or ending the connections.

        While the child holds a descriptor, the parent's peers do not notice the parent's death.
        """
        self.closed = self.agent.closing = True
        for peer in self.agent.peers:
            for link in peer.links:
                link.disown()
        for disown in self.on_fork:
            disown()

    def __repr__(self) -> str:
        lost = [peer.name for peer in self.agent.peers if peer.state is PeerState.LOST]
        return f"<Worker {self.name!r} ({self.id}) of {len(self.agent.peers)}{f', lost: {lost}' if lost else ''}>"


@export
def run_backward_of(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Runs ``backward`` from the tensor of a reference, on its owner."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"backward of {rref!r}: its value is a {type(value).__name__}, not a tensor")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        backward(context_id, [value], retain_graph)


@export
def missing_at_barrier() -> list[str]:
    """On the leader of a shutdown: the names of the workers that have not reached the barrier."""
    worker = current_worker()
    worker.agent.served_calls -= 1  # this call does not count as serving
    return worker._leader.missing()


def _error_of(done: torch.futures.Future[Any]) -> Exception | None:
    try:
        done.wait()
    except Exception as error:
        return error
    return None
