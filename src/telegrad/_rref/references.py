"""The references of one worker: drives the ledger, and keeps the values that this worker owns."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad._agent.agent import Agent
from telegrad._agent.dispatch import execute
from telegrad._agent.failures import copy_of, let_go_of_frames, story_of
from telegrad._core.interface import How, Link
from telegrad._ids import GlobalId, WorkerId
from telegrad._rref.ledger import Broken, Free, GiveUp, Instruction, Ledger, Send
from telegrad._wire.frames import Frame
from telegrad._wire.messages import (
    ChildConfirmed,
    Fetch,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    RemoteCall,
    RRefFork,
    UserDelete,
)
from telegrad.errors import ProtocolError, RpcTimeoutError, SerializationError, TelegradError, WorkerLostError

if TYPE_CHECKING:
    from telegrad._worker import Worker

_DROP_SECONDS = 0.05  # time after which the timer handles drops, if no call has done so


class Owned:
    """A value that lives here, or will: it may be asked for before the call that makes it has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Callable[[], None]] = []
        self.begun = False  # the call that makes it has come

    def set(self, value: Any, error: BaseException | None = None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._value, self._error = value, error
            self._done.set()
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._done.is_set():
                # It runs on the thread that makes the value, but in the autograd context of this caller.
                self._waiting.append(partial(contextvars.copy_context().run, callback))
                return
        callback()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def __len__(self) -> int:
        """The number of callbacks that wait for it."""
        return len(self._waiting)

    def wait(self, timeout: float | None) -> bool:
        return self._done.wait(timeout)

    def get(self) -> Any:
        """The value, or the exception of the call that should have made it."""
        if self._error is not None:
            error = copy_of(self._error)
            story = story_of(error)
            if story not in getattr(error, "__notes__", ()):  # not every exception can be copied
                error.add_note(story)
            raise error
        return self._value

    @property
    def error(self) -> BaseException | None:
        return self._error


class References:
    """Calls the ledger under one lock, and carries out its instructions outside of it."""

    worker: Worker  # set by it

    def __init__(self, agent: Agent, make_handle: Callable[[References, RRefFork, GlobalId | None], Any]) -> None:
        self.agent = agent
        self.ledger = Ledger(WorkerId(agent.me.worker_id))
        self.broken: dict[GlobalId, TelegradError | None] = {}
        self._make_handle = make_handle
        self._lock = threading.Lock()
        self._owned: dict[GlobalId, Owned] = {}
        self.dropped: deque[tuple[GlobalId, GlobalId | None]] = deque()
        self._given_up: set[GlobalId] = set()
        self._lost: set[int] = set()
        agent.on_request(RemoteCall, self._run_remote, How.CALL)
        agent.on_request(Fetch, self._answer_fetch)
        agent.marshal.make_reference = self._receive
        agent.lost_handlers.append(self._worker_lost)
        agent.now_and_then = self._now_and_then
        for kind in (ForkRequest, ForkAccepted, ForkRefused, ChildConfirmed, UserDelete):
            agent.on_message(kind, self._on_message)

    # --- making references --------------------------------------------------------------------------------------

    def create_local(self, value: Owned) -> GlobalId:
        with self._lock:
            rref_id = self.ledger.create_local()
            self._owned[rref_id] = value
        return rref_id

    def create_remote(self, owner: int) -> tuple[GlobalId, GlobalId]:
        self._expect_drops()
        with self._lock:
            return self.ledger.create_remote(WorkerId(owner))

    def _expect_drops(self) -> None:
        """Wakes the timer, which sleeps for long while there is nothing to drop."""
        if not self.ledger.holds_any():
            self.agent.tick_within(_DROP_SECONDS)

    def created(self, fork_id: GlobalId) -> None:
        self._apply(lambda: self.ledger.creation_confirmed(fork_id))

    def not_created(self, fork_id: GlobalId, error: TelegradError) -> None:
        """The call that should have made the value failed on its way."""
        with self._lock:
            if self.ledger.is_held(fork_id):
                # A copy: the error's traceback holds frames, these the handle, and that would never be dropped.
                self.broken[fork_id] = type(error)(*error.args)
        if isinstance(error, RpcTimeoutError):
            self._apply(lambda: self.ledger.creation_timed_out(fork_id))
        else:
            self._apply(lambda: self.ledger.creation_failed(fork_id))

    def share(self, rref_id: GlobalId, fork_id: GlobalId | None, to: int, answered: bool) -> RRefFork:
        """For a message to ``to``; ``answered``: it is a request."""
        with self._lock:
            return self.ledger.share(rref_id, fork_id, WorkerId(to), answered)

    def unshare(self, fork: RRefFork) -> None:
        self._apply(partial(self.ledger.unshare, fork))

    def _receive(self, fork: RRefFork, sender: int) -> Any:
        if fork.parent != sender:
            raise ProtocolError(f"worker {sender} sent a reference in the name of worker {fork.parent}")
        self.agent.peer(fork.owner)  # raises if there is no such worker, which no call could reach
        self._expect_drops()
        with self._lock:
            fork_id, instructions = self.ledger.receive(fork)
            if fork.owner == self.agent.me.worker_id and fork_id is None and fork.rref_id not in self._owned:
                expected = self._owned[fork.rref_id] = Owned()
                if fork.rref_id.created_on in self._lost:
                    self._give_up(expected, WorkerId(fork.rref_id.created_on))
        handle = self._make_handle(self, fork, fork_id)
        self._carry_out(instructions)
        return handle

    # --- dropping references ------------------------------------------------------------------------------------

    def drop(self, rref_id: GlobalId, fork_id: GlobalId | None) -> None:
        """A handle was garbage collected, on any thread and under any lock, so most drops are only noted here."""
        if fork_id is None and self._lock.acquire(blocking=False):  # this very thread may have it
            try:
                instructions = self.ledger.release(rref_id)
            finally:
                self._lock.release()
            if instructions and not self.agent.closing:
                self.agent.submit(self._carry_out, instructions)
            return
        self.dropped.append((rref_id, fork_id))

    def _now_and_then(self) -> float:
        """Called by the timer; returns the seconds until the next time.

        The next call handles the drops, or this does: to wake a thread for each would cost more than all the rest.
        """
        if self.dropped:
            self.agent.submit(self.let_go)
        return _DROP_SECONDS if self.ledger.holds_any() or self.dropped else math.inf

    def let_go(self) -> None:
        """Handles the drops that were noted."""
        while self.dropped:
            try:
                rref_id, fork_id = self.dropped.popleft()
            except IndexError:
                return  # another thread took it
            if fork_id is None:
                self._apply(partial(self.ledger.release, rref_id))
            else:
                self._apply(partial(self._drop, fork_id))
                self.broken.pop(fork_id, None)

    def _drop(self, fork_id: GlobalId) -> list[Instruction]:
        return [] if fork_id in self._given_up else self.ledger.drop(fork_id)

    def give_up_handles(self) -> None:
        """Drops all handles on values of other workers, though they are still there: at the end of a job."""
        with self._lock:
            held = self.ledger.held()
            self._given_up.update(held)
            instructions = [each for fork_id in held for each in self.ledger.drop(fork_id)]
        self._carry_out(instructions)

    # --- values -------------------------------------------------------------------------------------------------

    def owned(self, rref_id: GlobalId, asked_by: int | None = None) -> Owned:
        """A value of this worker; ``asked_by``: the worker that asks for it, None for a handle here."""
        with self._lock:
            value = self._owned.get(rref_id)
            if value is None:
                source = WorkerId(self.agent.me.worker_id if asked_by is None else asked_by)
                if rref_id.created_on in self._lost or not self.ledger.owned.expects(rref_id, source):
                    raise WorkerLostError(f"the value of reference {rref_id} is gone: its users were lost")
                # Its RemoteCall is still on its way: the message of another worker came first.
                value = self._owned[rref_id] = Owned()
            return value

    def until_made(self, rref_id: GlobalId) -> Callable[[Callable[[], None]], None] | None:
        """How to be called when a value has been made; None if it is here."""
        value = self.owned(rref_id)
        return None if value.done else value.when_done

    def _run_remote(self, link: Link, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, RemoteCall)
        self.agent.served_calls += 1
        rref_id = GlobalId(*message.rref_id)
        try:
            value, instructions = self._begin_remote(rref_id, GlobalId(*message.fork_id), link.peer_id)
        except TelegradError as error:
            self.agent.marshal.discard(link, message.body)
            self.agent.answer_failure(link, message.call_id, error)
            return
        self._carry_out(instructions)

        def finish(result: Any, error: BaseException | None = None) -> None:
            if error is not None:
                let_go_of_frames(error)  # they hold the arguments, and the handler
            value.set(result, error)
            self.agent.answer(link, message.call_id, None)

        execute(self.agent, link, frame, finish, lambda error: finish(None, error))

    def _begin_remote(self, rref_id: GlobalId, fork_id: GlobalId, caller: int) -> tuple[Owned, list[Instruction]]:
        instructions: list[Instruction] = []
        with self._lock:
            if caller == self.agent.me.worker_id:  # our own call: its handle is counted, or gone already
                value = self._owned.get(rref_id, Owned())
            else:
                instructions = self.ledger.remote_arrived(rref_id, fork_id, WorkerId(caller))
                value = self._owned.setdefault(rref_id, Owned())
                if value.done and not value.begun:  # it was given up; now it comes after all
                    value = self._owned[rref_id] = Owned()
            value.begun = True
        return value, instructions

    def _answer_fetch(self, link: Link, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Fetch)
        scope = None
        try:
            if message.body.extra is not None:
                scope = self.agent.marshal.open(link, message.body, [])[1]
            value = self.owned(GlobalId(*message.rref_id), link.peer_id)
        except TelegradError as error:
            self.agent.answer_failure(link, message.call_id, error)
            return

        def answer() -> None:
            if value.error is not None:
                self.agent.answer_failure(link, message.call_id, value.error)
            else:
                try:
                    with scope or nullcontext():
                        self.agent.answer(link, message.call_id, value.get())
                except SerializationError as error:
                    what = f"the value{''.join(error.path)} of reference {GlobalId(*message.rref_id)}"
                    reason = SerializationError(f"{what} cannot be sent: {error}")
                    self.agent.answer_failure(link, message.call_id, reason)

        value.when_done(answer)

    # --- the ledger's instructions ------------------------------------------------------------------------------

    def _apply(self, event: Callable[[], list[Instruction]]) -> None:
        with self._lock:
            instructions = event()
        self._carry_out(instructions)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self.agent.send_message(to, message, dials=False)
                case Free(rref_id):
                    with self._lock:  # unless its RemoteCall came after the event that freed it
                        freed = None if self.ledger.owned.has(rref_id) else self._owned.pop(rref_id, None)
                    if freed is not None and not freed.begun:
                        freed.set(None, WorkerLostError(f"the value of reference {rref_id} will not come"))
                    del freed  # outside the lock: the value may hold references itself
                case GiveUp(rref_id, worker):
                    with self._lock:
                        value = self._owned.get(rref_id)
                    if value is not None:
                        self._give_up(value, worker)
                case Broken(fork_id):
                    with self._lock:
                        if self.ledger.is_held(fork_id):
                            self.broken.setdefault(fork_id, None)

    def _give_up(self, value: Owned, worker: WorkerId) -> None:
        """Behind the calls of that worker that are here and wait for a thread: they may still make the value."""
        self.agent.plane.submit(_fail_unless_begun, value, worker, call=True)

    def _on_message(self, sender: int, message: Any, _: Callable[[], Any]) -> None:
        self._apply(lambda: self.ledger.on_message(WorkerId(sender), message))

    def _worker_lost(self, worker: int) -> None:
        with self._lock:
            self._lost.add(worker)
            instructions = self.ledger.worker_lost(WorkerId(worker))
        self._carry_out(instructions)

    # --- what is there ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        with self._lock:
            return self.ledger.counts()

    @property
    def empty(self) -> bool:
        with self._lock:
            return self.ledger.empty and not self._owned and not self.dropped

    def wait_empty(self, timeout: float) -> bool:
        """For tests of leaks: whether all references are gone, given some time."""
        deadline = time.monotonic() + timeout
        while not self.empty:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def __repr__(self) -> str:
        return f"<References of {self.agent.me.name!r}: {len(self._owned)} values, {self.ledger!r}>"


def _fail_unless_begun(value: Owned, worker: WorkerId) -> None:
    if not value.begun:
        value.set(None, WorkerLostError(f"this value has not come, and will not: worker {worker} is lost"))
