"""The owner's side of the ledger: which handles and forks exist of the values of one worker.

A value is freed when it has no local handle and no fork; the methods that may free it return whether they did.  The
protocol is described in ``ledger``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from telegrad._ids import GlobalId, WorkerId
from telegrad.errors import ProtocolError, UsageError

#: How many deleted forks the owner remembers.  After a loss, a worker may ask for a fork of a value that is freed
#: already: if the deletion of its creator's fork is remembered, the value is not expected again.
ENDED_FORKS_REMEMBERED: Final = 4096

#: How many values that have yet to come one worker may make the owner expect.
MOST_EXPECTED: Final = 10_000


@dataclass(slots=True)
class _Holders:
    """Of one value: the number of local handles, and the user that holds each fork."""

    handles: int = 0
    forks: dict[GlobalId, WorkerId] = field(default_factory=dict)


class OwnerCounts:
    """``lost``: the workers that are lost, kept by the ledger."""

    def __init__(self, me: WorkerId, lost: set[WorkerId]) -> None:
        self._me = me
        self._lost = lost
        self._values: dict[GlobalId, _Holders] = {}
        # Values whose RemoteCall has yet to come, and the live workers that named them; none: it is given up.
        self._expected: dict[GlobalId, set[WorkerId]] = {}
        self._tombstones: set[GlobalId] = set()  # creations that were deleted before their RemoteCall came
        self._ended: dict[tuple[GlobalId, WorkerId], None] = {}  # deleted forks and their holders, oldest first

    def has(self, rref_id: GlobalId) -> bool:
        return rref_id in self._values

    def add(self, rref_id: GlobalId) -> None:
        """A value of our own, with one local handle."""
        self._values[rref_id] = _Holders(handles=1)

    def call_arrived(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> bool:
        """The RemoteCall came that makes the value.  Its creator may be gone already."""
        unwanted = holder in self._lost or self._has_ended(fork_id, holder)
        self._tombstones.discard(fork_id)
        self._expected.pop(rref_id, None)
        value = self._values.setdefault(rref_id, _Holders())
        if not unwanted:
            value.forks[fork_id] = holder
        return self._free_if_unheld(rref_id)

    def release(self, rref_id: GlobalId) -> bool:
        """A local handle is gone."""
        self._held_here(rref_id, "release").handles -= 1
        return self._free_if_unheld(rref_id)

    def share(self, rref_id: GlobalId, fork_id: GlobalId, to: WorkerId) -> None:
        """A handle of ours is sent to ``to``, as this fork."""
        self._held_here(rref_id, "share").forks[fork_id] = to

    def receive(self, rref_id: GlobalId, fork_id: GlobalId, sender: WorkerId) -> bool:
        """A user, or we, sent a handle here.  False if the value is freed, after a loss."""
        value = self._known_or_expected(rref_id, sender)
        if value is None:
            return False
        if value.forks.get(fork_id) == self._me:
            del value.forks[fork_id]  # we sent it to ourselves
        value.handles += 1
        return True

    def accept(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> bool:
        """A user received a fork.  False if it is not counted: the value is freed, or another user has the fork."""
        value = None if self._has_ended(fork_id, holder) else self._known_or_expected(rref_id, holder)
        return value is not None and value.forks.setdefault(fork_id, holder) == holder

    def delete(self, rref_id: GlobalId, fork_id: GlobalId, holder: WorkerId) -> bool:
        """A user dropped its fork; a message of any other worker than its holder changes nothing."""
        value = self._values.get(rref_id)
        if self._has_ended(fork_id, holder) or (value is not None and value.forks.get(fork_id, holder) != holder):
            return False
        if fork_id == rref_id and (value is None or rref_id in self._expected):
            if holder != rref_id.created_on:
                return False
            self._tombstones.add(fork_id)
        self._ended[fork_id, holder] = None
        if len(self._ended) > ENDED_FORKS_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return self.uncount(rref_id, fork_id)

    def uncount(self, rref_id: GlobalId, fork_id: GlobalId) -> bool:
        """A fork is gone, or was never sent."""
        value = self._values.get(rref_id)
        return value is not None and value.forks.pop(fork_id, None) is not None and self._free_if_unheld(rref_id)

    def lose(self, worker: WorkerId) -> tuple[list[GlobalId], list[GlobalId]]:
        """The values that are freed since a worker is lost, and those that are held but will not come.

        A value that only lost workers named is no longer expected: its RemoteCall, if there is one, begins anew.
        """
        self._tombstones = {each for each in self._tombstones if each.created_on != worker}
        freed, given_up = [], []
        for rref_id, value in list(self._values.items()):
            value.forks = {fork_id: holder for fork_id, holder in value.forks.items() if holder != worker}
            sources = self._expected.get(rref_id)
            if sources is not None:
                sources.discard(worker)
                if not sources:
                    value.forks.pop(rref_id, None)
            if self._free_if_unheld(rref_id):
                freed.append(rref_id)
            elif sources is not None and (not sources or rref_id.created_on == worker):
                given_up.append(rref_id)
        return freed, given_up

    def expects(self, rref_id: GlobalId, source: WorkerId) -> bool:
        """Whether the value, which ``source`` asks for, is here or will come with a RemoteCall."""
        return self._known_or_expected(rref_id, source) is not None

    def _known_or_expected(self, rref_id: GlobalId, source: WorkerId) -> _Holders | None:
        """The value; one that a RemoteCall on its way will bring; or None, after a loss, when it was freed.

        ``source``: the worker whose message names it.
        """
        value = self._values.get(rref_id)
        if self._expected.get(rref_id):
            self._expected[rref_id].add(source)
        creator = WorkerId(rref_id.created_on)
        if value is not None or creator == self._me or creator in self._lost or self._has_ended(rref_id, creator):
            return value
        if sum(source in sources for sources in self._expected.values()) >= MOST_EXPECTED:
            raise ProtocolError(f"worker {source} has named more than {MOST_EXPECTED:,} values that have not come")
        self._expected[rref_id] = {source}
        value = self._values[rref_id] = _Holders(forks={rref_id: creator})
        return value

    def _has_ended(self, fork_id: GlobalId, holder: WorkerId) -> bool:
        return (fork_id, holder) in self._ended or (fork_id in self._tombstones and fork_id.created_on == holder)

    def _held_here(self, rref_id: GlobalId, event: str) -> _Holders:
        value = self._values.get(rref_id)
        if value is None or value.handles == 0:
            raise UsageError(f"illegal event: {event} of {rref_id} on worker {self._me} as owner: no local handle")
        return value

    def _free_if_unheld(self, rref_id: GlobalId) -> bool:
        value = self._values[rref_id]
        if value.handles or value.forks:
            return False
        del self._values[rref_id]
        self._expected.pop(rref_id, None)
        return True

    # --- what is there ----------------------------------------------------------------------------------------

    @property
    def ids(self) -> frozenset[GlobalId]:
        """The values that live here, or are expected."""
        return frozenset(self._values)

    def counts(self) -> dict[str, int]:
        values = self._values.values()
        return {
            "values": len(values),
            "values_with_forks": sum(bool(value.forks) for value in values),
            "local_handles": sum(value.handles for value in values),
            "forks_counted": sum(len(value.forks) for value in values),
            "tombstones": len(self._tombstones),
        }

    def validate(self) -> None:
        """Check what must hold between any two events."""
        for rref_id, value in self._values.items():
            assert value.handles > 0 or (value.handles == 0 and value.forks), f"{rref_id} should be free: {value}"
            assert self._lost.isdisjoint(value.forks.values()), f"{rref_id} counts forks of lost workers: {value}"
        for rref_id in self._expected:
            assert rref_id in self._values, f"{rref_id} is expected but not counted"
            assert rref_id.created_on != self._me, f"{rref_id} is expected from ourselves"
        for rref_id in self._tombstones:
            assert rref_id.created_on not in self._lost, f"tombstone of a lost worker: {rref_id}"

    def describe(self) -> Iterator[str]:
        for rref_id, value in self._values.items():
            note = " (expected)" if rref_id in self._expected else ""
            yield f"owns {rref_id}{note}: {value.handles} handles, forks {value.forks}"
        for rref_id in self._tombstones:
            yield f"tombstone {rref_id}@{rref_id.created_on}"
