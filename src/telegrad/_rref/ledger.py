"""Who holds which remote reference: the owner/user fork protocol, as a function of events.

A value lives on its *owner*.  Every handle on another worker, a *user*, is one *fork*, and the owner counts the forks
and its own local handles.  Two guarantees make the counting right under any order of messages:

* **G1**  The owner learns of every deletion.  So it frees a value once, after the last handle anywhere is gone, and
  never while a handle, or a fork on its way, exists.
* **G2**  A parent is not deleted before the owner has confirmed its children.  So whatever happens to the messages,
  the owner counts at least one fork for as long as there is any.

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

When the owner itself shares, it counts the fork in step 1 and the child is born confirmed.  When it is the receiver,
step 3 counts a local handle and step 8 follows at once.  In a request, which is answered, there is less to do: A
*lends* its own fork, and keeps its handle until the answer comes, or O is lost.  Then nothing follows step 3.

``remote()`` names the value and its first fork with one id, before the owner knows of either.  Notes may overtake the
RemoteCall, and two rules keep the count exact.  A fork of a value that has yet to come makes the owner *expect* it: the
creator's fork is counted as if the call had come, since by G2 the creator still holds it.  A UserDelete of a creation
that has yet to come (the creator gave up waiting) leaves a *tombstone*, so that the late call counts for nobody.

Nothing here locks, sends or reads a clock: events are method calls, and the answer is what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from telegrad._ids import GlobalId, IdSource, WorkerId
from telegrad._rref.forks import OWN_EVENTS, TRANSITIONS, UNANSWERED, ForkEvent, ForkState
from telegrad._rref.instructions import Broken, Free, Instruction, Send
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

_S, _E = ForkState, ForkEvent

#: How many ended forks the owner remembers, to recognise a repeated note.  Notes are taken once by the layer below, so
#: this is a second fence, and it may be low.
ENDED_FORKS_REMEMBERED: Final = 4096

#: How many values that have yet to come one worker may make the owner expect.
MOST_EXPECTED: Final = 10_000


@dataclass(slots=True)
class _Fork:
    """A user's side of one fork.  ``parent`` is the worker that waits to hear of the owner's answer."""

    rref_id: GlobalId
    owner: WorkerId
    parent: WorkerId | None = None
    state: ForkState = ForkState.PENDING
    children: set[GlobalId] = field(default_factory=set)
    shared: bool = False  # ever


@dataclass(frozen=True, slots=True)
class _Child:
    of: GlobalId
    to: WorkerId


@dataclass(slots=True)
class _Value:
    """The owner's side: its own handles, and the holder of each fork.  Not ``arrived``: only expected so far."""

    arrived: bool
    handles: int = 0
    forks: dict[GlobalId, WorkerId] = field(default_factory=dict)


class Ledger:
    """The forks that one worker holds, and the forks that others hold of its values."""

    def __init__(self, me: WorkerId, ids: IdSource | None = None) -> None:
        self._me = me
        self._ids = ids or IdSource(me)
        self._values: dict[GlobalId, _Value] = {}
        self._forks: dict[GlobalId, _Fork] = {}
        self._children: dict[GlobalId, _Child] = {}
        self._tombstones: dict[GlobalId, WorkerId] = {}
        self._expected: dict[GlobalId, set[WorkerId]] = {}  # values that have yet to come, and who told of them
        self._ended: dict[tuple[GlobalId, WorkerId], None] = {}  # with their holders, in order of their end
        self._lost: set[WorkerId] = set()

    # --- a value is made --------------------------------------------------------------------------------------

    def create_remote(self, owner: WorkerId) -> tuple[GlobalId, GlobalId]:
        """A ``remote()`` to another worker: the ids of the value and of our fork (they are equal, see above)."""
        if owner == self._me:
            raise UsageError(f"create_remote: worker {owner} is the owner itself; use create_local")
        self._check_alive(owner, "create_remote")
        rref_id = self._ids.next()
        self._forks[rref_id] = _Fork(rref_id, owner)
        return rref_id, rref_id

    def leave_out_id(self) -> None:
        """The next number is for nobody."""
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
        # A child may have made the owner expect the value and count our fork: it has to hear of our drop.
        broken = [Broken(fork_id)] if fork.state is _S.PENDING else []
        return [*broken, *self._step(fork_id, _E.TIME_OUT)]

    def remote_arrived(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> list[Instruction]:
        """On the owner: a RemoteCall came.  Its result is freed at once when its creator is gone already."""
        if not holder == rref_id.created_on == fork_id.created_on:
            raise ProtocolError(f"worker {holder} makes a reference with an id of worker {rref_id.created_on}")
        unwanted = holder in self._lost or self._has_ended(fork_id, holder)
        self._tombstones.pop(fork_id, None)
        value = self._values.get(rref_id)
        if value is None:
            if unwanted:
                return [Free(rref_id)]
            value = self._values[rref_id] = _Value(arrived=True)
        value.arrived = True
        self._expected.pop(rref_id, None)
        if not unwanted:
            value.forks[fork_id] = holder
        return []

    def create_local(self) -> GlobalId:
        """A value of our own, with one local handle."""
        rref_id = self._ids.next()
        self._values[rref_id] = _Value(arrived=True, handles=1)
        return rref_id

    # --- handles come and go ----------------------------------------------------------------------------------

    def hold(self, rref_id: GlobalId) -> None:
        """On the owner: one more local handle."""
        self._value(rref_id, "hold").handles += 1

    def release(self, rref_id: GlobalId) -> list[Instruction]:
        """On the owner: a local handle is gone."""
        value = self._value(rref_id, "release")
        if value.handles == 0:
            raise UsageError(f"illegal event: release of {rref_id} on its owner, worker {self._me}: no local handle")
        value.handles -= 1
        return self._free_if_unheld(rref_id)

    def drop(self, fork_id: GlobalId) -> list[Instruction]:
        """On a user: the handle is gone.  The owner hears of it when it knows of the fork and of its children."""
        return self._step(fork_id, _E.DROP)

    # --- references travel ------------------------------------------------------------------------------------

    def share(self, rref_id: GlobalId, fork_id: GlobalId | None, to: WorkerId, type_name: str = "") -> RRefFork:
        """A handle goes into a message to ``to``; ``fork_id`` is None for a handle on the owner."""
        self._check_alive(to, "share")
        if fork_id is None:
            child = self._ids.next()
            self._value(rref_id, "share").forks[child] = to
            return RRefFork(rref_id, child, self._me, self._me, type_name)
        self._step(fork_id, _E.SHARE)
        fork = self._forks[fork_id]
        child = self._ids.next()
        fork.shared = True
        fork.children.add(child)
        self._children[child] = _Child(fork_id, to)
        return RRefFork(rref_id, child, fork.owner, self._me, type_name)

    def lend_or_share(self, rref_id: GlobalId, fork_id: GlobalId, to: WorkerId, type_name: str = "") -> RRefFork:
        """As ``share``, on a user, for a request to ``to``: whoever sends it keeps the handle until it is answered."""
        fork = self._forks.get(fork_id)
        if fork is None or fork.owner != to:
            return self.share(rref_id, fork_id, to, type_name)
        self._check_alive(to, "share")
        if fork.state is not _S.CONFIRMED:  # which it would stay
            self._step(fork_id, _E.SHARE)
        fork.shared = True
        return RRefFork(rref_id, fork_id, to, self._me, type_name, lent=True)

    def unshare(self, fork: RRefFork) -> list[Instruction]:
        """The message with that fork could not be sent at all, so nobody will receive it."""
        if fork.lent:
            return []
        if fork.owner == self._me:
            return self._uncount(fork.rref_id, fork.fork_id)
        return self._child_settled(fork.fork_id)

    def receive(self, fork: RRefFork) -> tuple[GlobalId | None, list[Instruction]]:
        """A message brought a reference: the id of the new fork, to be dropped one day.

        None stands for a local handle on the owner, to be released.  A fork is one handle, so a worker receives it
        once; on the owner, another time gives one more handle.
        """
        if not fork.lent and fork.fork_id.created_on != fork.parent:
            raise ProtocolError(f"worker {fork.parent} sent fork {fork.fork_id}, which it did not make")
        if fork.owner == self._me:
            return self._receive_own(fork)
        if fork.lent:
            raise ProtocolError(f"worker {fork.parent} lent a reference of worker {fork.owner} to worker {self._me}")
        if fork.fork_id in self._forks:
            raise ProtocolError(f"worker {fork.parent} sent fork {fork.fork_id} twice")
        owner, parent = WorkerId(fork.owner), WorkerId(fork.parent)
        mine = self._forks[fork.fork_id] = _Fork(fork.rref_id, owner)
        if owner in self._lost:
            return fork.fork_id, self._step(fork.fork_id, _E.LOSE_OWNER)
        if parent == owner:
            return fork.fork_id, self._step(fork.fork_id, _E.CONFIRM)
        mine.parent = parent
        return fork.fork_id, [Send(owner, ForkRequest(fork.rref_id, fork.fork_id))]

    def _receive_own(self, fork: RRefFork) -> tuple[GlobalId | None, list[Instruction]]:
        value = self._known_or_expected(fork.rref_id, WorkerId(fork.parent))
        told = [] if fork.lent else self._tell_parent(WorkerId(fork.parent), fork.fork_id)
        if value is None:  # the parent was lost, and the value freed: a handle that is broken from the start
            fork_id = self._ids.next() if fork.lent else fork.fork_id
            self._forks[fork_id] = _Fork(fork.rref_id, self._me, state=_S.BROKEN)
            return fork_id, [*told, Broken(fork_id)]
        if not fork.lent and value.forks.get(fork.fork_id) == self._me:
            del value.forks[fork.fork_id]  # we sent it to ourselves
        value.handles += 1
        return None, told

    # --- messages ---------------------------------------------------------------------------------------------

    def on_message(self, sender: WorkerId, payload: InternalMessage) -> list[Instruction]:
        """A message came.  One that is late, or from a worker that is lost, changes nothing."""
        if sender in self._lost:
            return []
        match payload:
            case ForkRequest(rref_id=rref_id, fork_id=fork_id):
                return [Send(sender, self._answer(rref_id, fork_id, sender))]
            case ForkAccepted(fork_id=fork_id):
                return self._step(fork_id, _E.CONFIRM) if self._is_owner(sender, fork_id) else []
            case ForkRefused(fork_id=fork_id):
                return self._step(fork_id, _E.FAIL) if self._is_owner(sender, fork_id) else []
            case ChildConfirmed(fork_id=fork_id):
                child = self._children.get(fork_id)
                return self._child_settled(fork_id) if child is not None and child.to == sender else []
            case UserDelete(rref_id=rref_id, fork_id=fork_id):
                return self._deleted(rref_id, fork_id, sender)
            case _:
                raise ProtocolError(f"worker {sender} sent the ledger a {type(payload).__name__}")

    def _is_owner(self, worker: WorkerId, fork_id: GlobalId) -> bool:
        fork = self._forks.get(fork_id)
        return fork is not None and fork.owner == worker

    def _answer(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> InternalMessage:
        value = None if self._has_ended(fork_id, holder) else self._known_or_expected(rref_id, holder)
        if value is None or value.forks.get(fork_id, holder) != holder:
            return ForkRefused(fork_id)
        value.forks[fork_id] = holder
        return ForkAccepted(fork_id)

    def _deleted(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> list[Instruction]:
        """A worker says that its fork is gone; only the holder of a fork may say so."""
        value = self._values.get(rref_id)
        if self._has_ended(fork_id, holder) or (value is not None and value.forks.get(fork_id, holder) != holder):
            return []
        if fork_id == rref_id and (value is None or not value.arrived):
            if holder != rref_id.created_on:
                return []
            self._tombstones[fork_id] = holder
        self._ended[fork_id, holder] = None
        if len(self._ended) > ENDED_FORKS_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return self._uncount(rref_id, fork_id)

    def _has_ended(self, fork_id: GlobalId, holder: WorkerId) -> bool:
        return (fork_id, holder) in self._ended or self._tombstones.get(fork_id) == holder

    # --- losses -----------------------------------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId) -> list[Instruction]:
        """A worker died.  What it held is uncounted, what it owned is broken, what waited for it goes on."""
        if worker == self._me:
            raise UsageError(f"worker_lost: worker {worker} cannot lose itself")
        if worker in self._lost:
            return []
        self._lost.add(worker)
        self._tombstones = {fork_id: holder for fork_id, holder in self._tombstones.items() if holder != worker}
        return [
            *self._lose_holder(worker),
            *self._lose_teller(worker),
            *self._lose_owner(worker),
            *self._lose_children(worker),
        ]

    def _lose_holder(self, worker: WorkerId) -> list[Instruction]:
        out: list[Instruction] = []
        for rref_id, value in list(self._values.items()):
            value.forks = {fork_id: holder for fork_id, holder in value.forks.items() if holder != worker}
            freed = self._free_if_unheld(rref_id)
            if not freed and not value.arrived and rref_id.created_on == worker:
                freed = [Broken(rref_id)]
            out += freed
        return out

    def _lose_teller(self, worker: WorkerId) -> list[Instruction]:
        """A value that only lost workers told of is not expected: its RemoteCall, if there is one, begins anew."""
        out: list[Instruction] = []
        for rref_id, tellers in list(self._expected.items()):
            tellers.discard(worker)
            if not tellers:
                del self._expected[rref_id]
                out += self._uncount(rref_id, rref_id)
        return out

    def _lose_owner(self, worker: WorkerId) -> list[Instruction]:
        orphans = [fork_id for fork_id, fork in self._forks.items() if fork.owner == worker]
        return [instruction for fork_id in orphans for instruction in self._step(fork_id, _E.LOSE_OWNER)]

    def _lose_children(self, worker: WorkerId) -> list[Instruction]:
        settled = [child_id for child_id, child in self._children.items() if child.to == worker]
        return [instruction for child_id in settled for instruction in self._child_settled(child_id)]

    # --- the user's side --------------------------------------------------------------------------------------

    def _step(self, fork_id: GlobalId, event: ForkEvent) -> list[Instruction]:
        """Move one fork through the table, and say what follows from where it came to."""
        fork = self._forks.get(fork_id)
        state = fork.state if fork else _S.GONE
        to = TRANSITIONS[state].get(event)
        if fork is None or to is None:
            if event in OWN_EVENTS:
                fault = WorkerLostError if state is _S.BROKEN else UsageError
                story = f"{event.name} of fork {fork_id} on worker {self._me} as user: it is {state.name}"
                raise fault(f"illegal event: {story}")
            return []
        out: list[Instruction] = []
        fork.state = to
        if event in (_E.CONFIRM, _E.FAIL):
            out += self._tell_parent(fork.parent, fork_id)
        if to not in UNANSWERED:
            fork.parent = None  # it was told, or learns of the owner's death itself
        if event is _E.SETTLE:
            out.append(Send(fork.owner, UserDelete(fork.rref_id, fork_id)))
        if to is _S.BROKEN:
            out.append(Broken(fork_id))
        if to is _S.GONE:
            self._forget(fork_id)
        if to is _S.CLOSING and not fork.children:
            out += self._step(fork_id, _E.SETTLE)
        return out

    def _forget(self, fork_id: GlobalId) -> None:
        """A fork that was broken may go before its children are settled, as nothing is sent then."""
        for child_id in self._forks.pop(fork_id).children:
            del self._children[child_id]

    def _check_alive(self, worker: WorkerId, event: str) -> None:
        if worker in self._lost:
            raise WorkerLostError(f"{event}: worker {worker} is lost")

    def _tell_parent(self, parent: WorkerId | None, child_id: GlobalId) -> list[Instruction]:
        if parent is None or parent in self._lost:
            return []
        if parent == self._me:
            return self._child_settled(child_id)
        return [Send(parent, ChildConfirmed(child_id))]

    def _child_settled(self, child_id: GlobalId) -> list[Instruction]:
        child = self._children.pop(child_id, None)
        if child is None:
            return []
        siblings = self._forks[child.of].children
        siblings.remove(child_id)
        return [] if siblings else self._step(child.of, _E.SETTLE)

    # --- the owner's side -------------------------------------------------------------------------------------

    def _known_or_expected(self, rref_id: GlobalId, teller: WorkerId) -> _Value | None:
        """The value; one that a RemoteCall on its way will bring; or None, after a loss, when it was freed.

        ``teller``: the worker that speaks of it.
        """
        value = self._values.get(rref_id)
        if rref_id in self._expected:
            self._expected[rref_id].add(teller)
        creator = WorkerId(rref_id.created_on)
        if (
            value is None
            and creator != self._me
            and creator not in self._lost
            and not self._has_ended(rref_id, creator)
        ):
            if sum(teller in tellers for tellers in self._expected.values()) >= MOST_EXPECTED:
                raise ProtocolError(f"worker {teller} speaks of more than {MOST_EXPECTED:,} values that have not come")
            value = self._values[rref_id] = _Value(arrived=False, forks={rref_id: creator})
            self._expected[rref_id] = {teller}
        return value

    def _uncount(self, rref_id: GlobalId, fork_id: GlobalId) -> list[Instruction]:
        value = self._values.get(rref_id)
        if value is None or value.forks.pop(fork_id, None) is None:
            return []
        return self._free_if_unheld(rref_id)

    def _value(self, rref_id: GlobalId, event: str) -> _Value:
        value = self._values.get(rref_id)
        if value is None:
            raise UsageError(f"illegal event: {event} of {rref_id} on worker {self._me} as owner: no such value")
        return value

    def _free_if_unheld(self, rref_id: GlobalId) -> list[Instruction]:
        value = self._values[rref_id]
        if value.handles or value.forks:
            return []
        del self._values[rref_id]
        self._expected.pop(rref_id, None)
        return [Free(rref_id)]

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
        """Whether there is any handle here on a value of another worker."""
        return bool(self._forks)

    def expects(self, rref_id: GlobalId, teller: WorkerId) -> bool:
        """On the owner, asked by the holder of a fork: whether the value is here, or a RemoteCall will bring it."""
        return self._known_or_expected(rref_id, teller) is not None

    def has_given_up(self, rref_id: GlobalId) -> bool:
        """On the owner: whether a handle here waits for a value that only lost workers told of."""
        value = self._values.get(rref_id)
        return value is not None and not value.arrived and rref_id not in self._expected

    @property
    def owner_ids(self) -> frozenset[GlobalId]:
        """The values that live here, or are expected."""
        return frozenset(self._values)

    @property
    def empty(self) -> bool:
        """Nothing is left: no value, no fork, nothing that waits."""
        return not any(self.counts().values())

    def counts(self) -> dict[str, int]:
        """How much of everything there is, for the debug view."""
        return {
            "values": len(self._values),
            "values_with_forks": sum(bool(value.forks) for value in self._values.values()),
            "local_handles": sum(value.handles for value in self._values.values()),
            "forks_counted": sum(len(value.forks) for value in self._values.values()),
            "user_forks": len(self._forks),
            "leaving_forks": sum(not self.is_held(fork_id) for fork_id in self._forks),
            "pending_forks": sum(fork.state in UNANSWERED for fork in self._forks.values()),
            "pending_children": len(self._children),
            "tombstones": len(self._tombstones),
        }

    def validate(self) -> None:
        """Check what must hold between any two events."""
        for rref_id, value in self._values.items():
            assert value.handles > 0 or (value.handles == 0 and value.forks), f"{rref_id} should be free: {value}"
            assert self._lost.isdisjoint(value.forks.values()), f"{rref_id} counts forks of lost workers: {value}"
            assert value.arrived or rref_id.created_on != self._me, f"{rref_id} is expected from ourselves"
        for fork_id, fork in self._forks.items():
            assert fork.state is not _S.GONE, f"{fork_id} is gone but stored"
            assert fork.state is not _S.CLOSING or fork.children, f"{fork_id} has nothing to wait for"
            assert fork.state is _S.BROKEN or fork.owner not in self._lost, f"{fork_id} outlived its owner: {fork}"
            assert fork.parent is None or fork.state in UNANSWERED, f"{fork_id}: parent waits: {fork}"
            assert all(self._children[child].of == fork_id for child in fork.children), f"{fork_id}: {fork}"
        for child_id, child in self._children.items():
            assert child_id in self._forks[child.of].children, f"{child_id} is not a child of {child.of}"
            assert child.to not in self._lost, f"{child_id} is on its way to worker {child.to}, which is lost"
        assert self._lost.isdisjoint(self._tombstones.values()), f"tombstones of lost workers: {self._tombstones}"

    def __repr__(self) -> str:
        values = (
            f"owns {rref_id}{'' if value.arrived else ' (expected)'}: {value.handles} handles, forks {value.forks}"
            for rref_id, value in self._values.items()
        )
        forks = (
            f"holds {fork_id} of {fork.rref_id}@{fork.owner}: {fork.state.name}"
            + (f", children {sorted(fork.children)}" if fork.children else "")
            for fork_id, fork in self._forks.items()
        )
        tombstones = (f"tombstone {fork_id}@{holder}" for fork_id, holder in self._tombstones.items())
        return f"<Ledger of worker {self._me}: {'; '.join([*values, *forks, *tombstones]) or 'empty'}>"
