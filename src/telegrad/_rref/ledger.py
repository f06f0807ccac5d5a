"""How references are counted: the owner/user fork protocol of one worker, as a function of events.

A value lives on its *owner*.  Every handle on another worker, a *user*, is one *fork*, and the owner counts the forks
and its own local handles.  Two guarantees make the counting right under any order of messages:

* **G1**  The owner learns of every deletion.  So it frees a value once, after the last handle anywhere is gone, and
  never while a handle, or a fork on its way, exists.
* **G2**  A parent is not deleted before the owner has confirmed its children.  So the owner counts at least one fork
  for as long as there is any.

User A gives a reference to user C; the owner is O::

        A (parent)                     C (child)                      O (owner)
        | 1 share: C's fork is         |                              |
        |   A's pending child          |                              |
        |------- 2 user's message ---->| 3 receive: PENDING           |
        | 4 drop: waits (G2)           |------- 5 ForkRequest ------->| 6 counts C's fork
        |                              |<------ 7 ForkAccepted -------|
        |<------ 8 ChildConfirmed -----| CONFIRMED                    |
        |------- 9 UserDelete --------------------------------------->| 10 uncounts A's fork
        |                              | 11 drop                      |
        |                              |------- 12 UserDelete ------->| 13 uncounts, frees (G1)

When the owner itself shares, it counts the fork in step 1 and the child is confirmed when it is received.  When the
owner is the receiver, step 3 counts a local handle and step 8 follows at once.  A request to the owner, which is
answered, needs less: A *lends* its own fork, and keeps its handle until the answer comes, or O is lost.  Then nothing
follows step 3.

``remote()`` names the value and its first fork with one id, before the owner knows of either.  Messages of other
workers may come before the RemoteCall, and two rules keep the count exact.  A fork of a value that has yet to come
makes the owner *expect* it: the creator's fork is counted as if the call had come, since by G2 the creator still holds
it.  A UserDelete of a creation that has yet to come (the creator stopped waiting) leaves a *tombstone*, so that the
late call counts no fork.

This module has the user's side, and what concerns both sides; ``owner_counts`` has the owner's.  Nothing here locks,
sends or reads a clock: events are method calls, which return instructions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from telegrad._ids import GlobalId, IdSource, WorkerId
from telegrad._rref.owner_counts import OwnerCounts
from telegrad._wire.messages import (
    ChildConfirmed,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    InternalMessage,
    RRefFork,
    UserDelete,
)
from telegrad.errors import ProtocolError, UsageError, WorkerLostError

# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    to: WorkerId
    message: InternalMessage


@dataclass(frozen=True, slots=True)
class Free:
    """The value has no holder any more: forget it, and fail what waits for it if it has not come."""

    rref_id: GlobalId


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The value will not come, because this worker is lost: fail what waits for it."""

    rref_id: GlobalId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Broken:
    """A local handle that is of no use: its owner is lost, or refused it."""

    fork_id: GlobalId


Instruction = Send | Free | GiveUp | Broken


# --- a user's fork ----------------------------------------------------------------------------------------------


class ForkState(enum.Enum):
    """What a user knows of one of its forks."""

    PENDING = enum.auto()  # the owner has not answered yet
    CONFIRMED = enum.auto()  # the owner counts it
    UNSURE = enum.auto()  # the RemoteCall timed out: whether the owner counts it, or will, is not known
    BROKEN = enum.auto()  # the owner is lost or refused; the handle is still there
    LEAVING = enum.auto()  # PENDING, and the handle is gone
    CLOSING = enum.auto()  # the handle is gone, but children are pending (G2)
    GONE = enum.auto()  # forgotten; never stored


class ForkEvent(enum.Enum):
    """What can happen to it."""

    SHARE = enum.auto()
    DROP = enum.auto()
    CONFIRM = enum.auto()
    FAIL = enum.auto()  # refused, or the RemoteCall never left
    TIME_OUT = enum.auto()
    LOSE_OWNER = enum.auto()
    SETTLE = enum.auto()  # no child is pending any more


_S, _E = ForkState, ForkEvent
# fmt: off
TRANSITIONS: Final[dict[ForkState, dict[ForkEvent, ForkState]]] = {
    _S.PENDING: {_E.SHARE: _S.PENDING, _E.DROP: _S.LEAVING, _E.CONFIRM: _S.CONFIRMED,
                 _E.FAIL: _S.BROKEN, _E.TIME_OUT: _S.UNSURE, _E.LOSE_OWNER: _S.BROKEN},
    _S.CONFIRMED: {_E.SHARE: _S.CONFIRMED, _E.DROP: _S.CLOSING, _E.LOSE_OWNER: _S.BROKEN},
    _S.UNSURE: {_E.SHARE: _S.UNSURE, _E.DROP: _S.CLOSING, _E.CONFIRM: _S.CONFIRMED, _E.LOSE_OWNER: _S.BROKEN},
    _S.BROKEN: {_E.DROP: _S.GONE, _E.SETTLE: _S.BROKEN},
    _S.LEAVING: {_E.CONFIRM: _S.CLOSING, _E.FAIL: _S.GONE, _E.TIME_OUT: _S.CLOSING, _E.LOSE_OWNER: _S.GONE},
    _S.CLOSING: {_E.SETTLE: _S.GONE, _E.LOSE_OWNER: _S.GONE},
    _S.GONE: {},
}
# fmt: on
_UNANSWERED: Final = frozenset({_S.PENDING, _S.LEAVING})


@dataclass(slots=True)
class _Fork:
    """``parent``: the worker that waits for the owner's answer to this fork."""

    rref_id: GlobalId
    owner: WorkerId
    parent: WorkerId | None = None
    state: ForkState = ForkState.PENDING
    children: set[GlobalId] = field(default_factory=set)
    shared: bool = False  # ever


class Ledger:
    """The forks that one worker holds, and the forks that others hold of its values."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self._ids = IdSource(me)
        self._lost: set[WorkerId] = set()
        self.owned = OwnerCounts(me, self._lost)
        self._forks: dict[GlobalId, _Fork] = {}
        self._children: dict[GlobalId, tuple[GlobalId, WorkerId]] = {}  # pending: its parent's id, its receiver

    # --- a value is made --------------------------------------------------------------------------------------

    def create_local(self) -> GlobalId:
        """A value of our own, with one local handle."""
        rref_id = self._ids.next()
        self.owned.add(rref_id)
        return rref_id

    def create_remote(self, owner: WorkerId) -> tuple[GlobalId, GlobalId]:
        """A ``remote()`` to another worker: the ids of the value and of our fork (they are equal, see above)."""
        self._check_alive(owner, "create_remote")
        rref_id = self._ids.next()
        self._forks[rref_id] = _Fork(rref_id, owner)
        return rref_id, rref_id

    def leave_out_id(self) -> None:
        """Skips one id."""
        self._ids.next()

    def creation_confirmed(self, fork_id: GlobalId) -> list[Instruction]:
        """The RemoteCall was answered, so the owner counts our fork."""
        return self._step(fork_id, _E.CONFIRM)

    def creation_timed_out(self, fork_id: GlobalId) -> list[Instruction]:
        """The RemoteCall was not answered in time.  It may still arrive, so the drop will send a UserDelete."""
        return self._step(fork_id, _E.TIME_OUT)

    def creation_failed(self, fork_id: GlobalId) -> list[Instruction]:
        """The RemoteCall never reached the owner, and never will."""
        fork = self._forks.get(fork_id)
        if fork is None or not fork.shared:
            return self._step(fork_id, _E.FAIL)
        # A child may have made the owner expect the value and count our fork, so the drop has to send a UserDelete.
        broken = [Broken(fork_id)] if fork.state is _S.PENDING else []
        return [*broken, *self._step(fork_id, _E.TIME_OUT)]

    def remote_arrived(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> list[Instruction]:
        """On the owner: a RemoteCall came.  Its result is freed at once when its creator is gone already."""
        if not holder == rref_id.created_on == fork_id.created_on:
            raise ProtocolError(f"worker {holder} makes a reference with an id of worker {rref_id.created_on}")
        return _free(rref_id, self.owned.call_arrived(rref_id, fork_id, holder))

    # --- handles are dropped and sent -------------------------------------------------------------------------

    def release(self, rref_id: GlobalId) -> list[Instruction]:
        """On the owner: a local handle is gone."""
        return _free(rref_id, self.owned.release(rref_id))

    def drop(self, fork_id: GlobalId) -> list[Instruction]:
        """On a user: the handle is gone.  The owner is told when it has confirmed the fork and its children."""
        return self._step(fork_id, _E.DROP)

    def share(self, rref_id: GlobalId, fork_id: GlobalId | None, to: WorkerId, answered: bool = False) -> RRefFork:
        """A handle is packed into a message to ``to``; ``fork_id`` is None for a handle on the owner.

        ``answered``: the message is a request, and the caller keeps the handle until the answer comes.
        """
        self._check_alive(to, "share")
        if fork_id is None:
            child = self._ids.next()
            self.owned.share(rref_id, child, to)
            return RRefFork(rref_id, child, self._me, self._me)
        self._step(fork_id, _E.SHARE)
        fork = self._forks[fork_id]
        fork.shared = True
        if answered and fork.owner == to:
            return RRefFork(rref_id, fork_id, to, self._me, lent=True)
        child = self._ids.next()
        fork.children.add(child)
        self._children[child] = (fork_id, to)
        return RRefFork(rref_id, child, fork.owner, self._me)

    def unshare(self, fork: RRefFork) -> list[Instruction]:
        """The message with that fork could not be sent at all, so it will not be received."""
        if fork.lent:
            return []
        if fork.owner == self._me:
            return _free(fork.rref_id, self.owned.uncount(fork.rref_id, fork.fork_id))
        return self._child_settled(fork.fork_id)

    def receive(self, fork: RRefFork) -> tuple[GlobalId | None, list[Instruction]]:
        """A message brought a reference: returns the id of the new fork, for ``drop``.

        None stands for a local handle on the owner, for ``release``.  A fork is one handle, so a worker receives it
        once; on the owner, another time gives one more handle.
        """
        owner, parent = WorkerId(fork.owner), WorkerId(fork.parent)
        if not fork.lent and fork.fork_id.created_on != parent:
            raise ProtocolError(f"worker {parent} sent fork {fork.fork_id}, which it did not make")
        if owner == self._me:
            return self._receive_own(fork, parent)
        if fork.lent:
            raise ProtocolError(f"worker {parent} lent a reference of worker {owner} to worker {self._me}")
        if fork.fork_id in self._forks:
            raise ProtocolError(f"worker {parent} sent fork {fork.fork_id} twice")
        self._forks[fork.fork_id] = _Fork(fork.rref_id, owner, parent if parent != owner else None)
        if owner in self._lost:
            return fork.fork_id, self._step(fork.fork_id, _E.LOSE_OWNER)
        if parent == owner:
            return fork.fork_id, self._step(fork.fork_id, _E.CONFIRM)
        return fork.fork_id, [Send(owner, ForkRequest(fork.rref_id, fork.fork_id))]

    def _receive_own(self, fork: RRefFork, parent: WorkerId) -> tuple[GlobalId | None, list[Instruction]]:
        counted = self.owned.receive(fork.rref_id, fork.fork_id, parent)
        out = [] if fork.lent else self._tell_parent(parent, fork.fork_id)
        if counted:
            return None, out
        # The parent was lost, and the value freed: a handle that is broken from the start.
        fork_id = self._ids.next() if fork.lent else fork.fork_id
        self._forks[fork_id] = _Fork(fork.rref_id, self._me, state=_S.BROKEN)
        return fork_id, [*out, Broken(fork_id)]

    # --- messages and losses ----------------------------------------------------------------------------------

    def on_message(self, sender: WorkerId, payload: InternalMessage) -> list[Instruction]:
        """A message came.  One that is late, or from a worker that is lost, changes nothing."""
        if sender in self._lost:
            return []
        match payload:
            case ForkRequest(rref_id=rref_id, fork_id=fork_id):
                accepted = self.owned.accept(rref_id, fork_id, sender)
                return [Send(sender, ForkAccepted(fork_id) if accepted else ForkRefused(fork_id))]
            case ForkAccepted(fork_id=fork_id) | ForkRefused(fork_id=fork_id):
                fork = self._forks.get(fork_id)
                if fork is None or fork.owner != sender:
                    return []
                return self._step(fork_id, _E.CONFIRM if isinstance(payload, ForkAccepted) else _E.FAIL)
            case ChildConfirmed(fork_id=fork_id):
                _, receiver = self._children.get(fork_id, (None, None))
                return self._child_settled(fork_id) if receiver == sender else []
            case UserDelete(rref_id=rref_id, fork_id=fork_id):
                return _free(rref_id, self.owned.delete(rref_id, fork_id, sender))
            case _:
                raise ProtocolError(f"worker {sender} sent the ledger a {type(payload).__name__}")

    def worker_lost(self, worker: WorkerId) -> list[Instruction]:
        """A worker is lost.  Its forks are uncounted, forks of its values break, and no child waits for it any more."""
        if worker == self._me:
            raise UsageError(f"worker_lost: worker {worker} cannot lose itself")
        if worker in self._lost:
            return []
        self._lost.add(worker)
        freed, given_up = self.owned.lose(worker)
        out: list[Instruction] = [*map(Free, freed), *(GiveUp(rref_id, worker) for rref_id in given_up)]
        for fork_id in [fork_id for fork_id, fork in self._forks.items() if fork.owner == worker]:
            out += self._step(fork_id, _E.LOSE_OWNER)
        for child_id in [child_id for child_id, (_, to) in self._children.items() if to == worker]:
            out += self._child_settled(child_id)
        return out

    def _check_alive(self, worker: WorkerId, event: str) -> None:
        if worker in self._lost:
            raise WorkerLostError(f"{event}: worker {worker} is lost")

    # --- the user's side --------------------------------------------------------------------------------------

    def _step(self, fork_id: GlobalId, event: ForkEvent) -> list[Instruction]:
        """Moves one fork through the table; the instructions follow from the event and the new state."""
        fork = self._forks.get(fork_id)
        state = fork.state if fork else _S.GONE
        to = TRANSITIONS[state].get(event)
        if fork is None or to is None:
            if event in (_E.SHARE, _E.DROP):  # all others may come late, and are ignored
                fault = WorkerLostError if state is _S.BROKEN else UsageError
                story = f"{event.name} of fork {fork_id} on worker {self._me} as user: it is {state.name}"
                raise fault(f"illegal event: {story}")
            return []
        out: list[Instruction] = []
        # The parent is told also if the owner is lost: it may be cut from this worker only, and the parent would wait
        # forever.  But not before the children are settled, which only the parent's fork may keep alive at the owner.
        parent_waits = fork.parent is not None and bool(fork.children) and fork.owner in self._lost
        if to is _S.GONE and parent_waits:
            to = _S.CLOSING
        fork.state = to
        if to not in _UNANSWERED and not parent_waits:
            out += self._tell_parent(fork.parent, fork_id)
            fork.parent = None
        if event is _E.SETTLE and to is _S.GONE and fork.owner not in self._lost:
            out.append(Send(fork.owner, UserDelete(fork.rref_id, fork_id)))
        if to is _S.BROKEN and state is not _S.BROKEN:
            out.append(Broken(fork_id))
        if to is _S.GONE:
            # One that was broken may go before its children are settled, as nothing is sent then.
            for child_id in self._forks.pop(fork_id).children:
                del self._children[child_id]
        if to is _S.CLOSING and not fork.children:
            out += self._step(fork_id, _E.SETTLE)
        return out

    def _tell_parent(self, parent: WorkerId | None, child_id: GlobalId) -> list[Instruction]:
        if parent is None or parent in self._lost:
            return []
        if parent == self._me:
            return self._child_settled(child_id)
        return [Send(parent, ChildConfirmed(child_id))]

    def _child_settled(self, child_id: GlobalId) -> list[Instruction]:
        if child_id not in self._children:
            return []
        fork_id, _ = self._children.pop(child_id)
        siblings = self._forks[fork_id].children
        siblings.remove(child_id)
        return [] if siblings else self._step(fork_id, _E.SETTLE)

    # --- what is there ----------------------------------------------------------------------------------------

    def is_confirmed(self, fork_id: GlobalId) -> bool:
        """Whether the owner is known to count this fork."""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.state in (_S.CONFIRMED, _S.CLOSING)

    def held(self) -> list[GlobalId]:
        """The forks that this worker has handles of."""
        return [fork_id for fork_id in self._forks if self.is_held(fork_id)]

    def is_held(self, fork_id: GlobalId) -> bool:
        """Whether there is a handle of this fork here."""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.state not in (_S.LEAVING, _S.CLOSING)

    def holds_any(self) -> bool:
        """Whether there is any fork here of a value of another worker."""
        return bool(self._forks)

    @property
    def empty(self) -> bool:
        """Nothing is left: no value, no fork, nothing that waits."""
        return not any(self.counts().values())

    def counts(self) -> dict[str, int]:
        """How much of everything there is, for the debug view."""
        return {
            **self.owned.counts(),
            "user_forks": len(self._forks),
            "leaving_forks": len(self._forks) - len(self.held()),
            "pending_forks": sum(fork.state in _UNANSWERED for fork in self._forks.values()),
            "pending_children": len(self._children),
        }

    def validate(self) -> None:
        """Check what must hold between any two events."""
        self.owned.validate()
        for fork_id, fork in self._forks.items():
            assert fork.state is not _S.GONE, f"{fork_id} is gone but stored"
            assert fork.state is not _S.CLOSING or fork.children, f"{fork_id} has nothing to wait for"
            parent_waits = fork.parent is not None and bool(fork.children) and fork.owner in self._lost
            assert fork.state is _S.BROKEN or fork.owner not in self._lost or parent_waits, f"owner is lost: {fork}"
            assert fork.parent is None or fork.state in _UNANSWERED or parent_waits, f"{fork_id}: parent waits: {fork}"
        pairs = {(child_id, fork_id) for fork_id, fork in self._forks.items() for child_id in fork.children}
        assert pairs == {(child_id, of) for child_id, (of, _) in self._children.items()}, f"{pairs}, {self._children}"
        for child_id, (_, to) in self._children.items():
            assert to not in self._lost, f"{child_id} is on its way to worker {to}, which is lost"

    def __repr__(self) -> str:
        forks = (
            f"holds {fork_id} of {fork.rref_id}@{fork.owner}: {fork.state.name}"
            + (f", children {sorted(fork.children)}" if fork.children else "")
            for fork_id, fork in self._forks.items()
        )
        return f"<Ledger of worker {self._me}: {'; '.join([*self.owned.describe(), *forks]) or 'empty'}>"


def _free(rref_id: GlobalId, unheld: bool) -> list[Instruction]:
    return [Free(rref_id)] if unheld else []
