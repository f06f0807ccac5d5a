"""The fork protocol: single steps, and random programs.

In these, messages come in any order, or twice, workers die, and pairs of workers are cut from each other.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from telegrad._ids import GlobalId, WorkerId
from telegrad._rref import owner_counts
from telegrad._rref.ledger import Broken, Free, GiveUp, Instruction, Ledger, Send
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

STRANGER = WorkerId(99)
MESSAGES = (ForkRequest, ForkAccepted, ForkRefused, ChildConfirmed, UserDelete)
A, B, C, O = (WorkerId(number) for number in range(4))  # noqa: E741


def ledgers() -> tuple[Ledger, Ledger, Ledger, Ledger]:
    return Ledger(A), Ledger(B), Ledger(C), Ledger(O)


def confirmed_remote(a: Ledger, o: Ledger) -> GlobalId:
    """A value on O whose only fork is A's."""
    rref_id, fork_id = a.create_remote(O)
    assert o.remote_arrived(rref_id, fork_id, A) == []
    assert a.creation_confirmed(fork_id) == []
    assert a.is_confirmed(fork_id)
    return rref_id


# --- single steps -----------------------------------------------------------------------------------------------


def test_a_remote_value_lives_until_its_creator_drops_it() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    assert o.owned.ids == {x}
    assert a.drop(x) == [Send(O, UserDelete(x, x))]
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]
    assert a.empty
    assert o.empty


def test_a_drop_before_the_confirmation_waits_for_it() -> None:
    a, _, _, _ = ledgers()
    x, fork = a.create_remote(O)
    assert a.drop(fork) == []
    assert not a.empty
    assert a.creation_confirmed(fork) == [Send(O, UserDelete(x, fork))]
    assert a.empty


def test_local_handles_are_counted() -> None:
    o = Ledger(O)
    x = o.create_local()
    assert o.receive(o.share(x, None, O)) == (None, [])
    assert o.release(x) == []
    assert o.release(x) == [Free(x)]
    with pytest.raises(UsageError, match="release of 3:0 on worker 3 as owner"):
        o.release(x)


def test_the_owner_counts_what_it_shares_at_once() -> None:
    a, _, _, o = ledgers()
    x = o.create_local()
    fork = o.share(x, None, A)
    assert fork == RRefFork(x, fork.fork_id, O, O)
    assert o.release(x) == []
    assert a.receive(fork) == (fork.fork_id, [])
    assert a.is_confirmed(fork.fork_id)
    assert a.drop(fork.fork_id) == [Send(O, UserDelete(x, fork.fork_id))]
    assert o.on_message(A, UserDelete(x, fork.fork_id)) == [Free(x)]


def test_user_to_user_follows_the_numbered_steps() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C)  # 1
    child, out = c.receive(fork)  # 3
    assert child == fork.fork_id
    assert not c.is_confirmed(child)
    assert a.drop(x) == []  # 4
    assert out == [Send(O, ForkRequest(x, child))]  # 5
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkAccepted(child))]  # 6, 7
    assert c.on_message(O, ForkAccepted(child)) == [Send(A, ChildConfirmed(child))]  # 8
    assert c.is_confirmed(child)
    assert a.on_message(C, ChildConfirmed(child)) == [Send(O, UserDelete(x, x))]  # 9
    assert o.on_message(A, UserDelete(x, x)) == []  # 10
    assert c.drop(child) == [Send(O, UserDelete(x, child))]  # 11, 12
    assert o.on_message(C, UserDelete(x, child)) == [Free(x)]  # 13
    assert a.empty
    assert c.empty
    assert o.empty


def test_a_pending_child_that_was_dropped_is_deleted_once_accepted() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    assert c.drop(child) == []
    assert c.on_message(O, ForkAccepted(child)) == [Send(A, ChildConfirmed(child)), Send(O, UserDelete(x, child))]
    assert c.empty


def test_all_children_must_be_confirmed_before_the_parent_goes() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    first, second = a.share(x, x, B), a.share(x, x, C)
    assert a.drop(x) == []
    assert a.on_message(B, ChildConfirmed(first.fork_id)) == []
    assert a.on_message(C, ChildConfirmed(second.fork_id)) == [Send(O, UserDelete(x, x))]


def test_user_to_owner_becomes_a_local_handle() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, O)
    assert o.receive(fork) == (None, [Send(A, ChildConfirmed(fork.fork_id))])
    assert a.on_message(O, ChildConfirmed(fork.fork_id)) == []
    a.drop(x)
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.release(x) == [Free(x)]


def test_a_request_lends_to_the_owner_and_nothing_follows() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, O, answered=True)
    assert (fork.fork_id, fork.lent) == (x, True)
    assert o.receive(fork) == (None, [])
    assert a.counts()["pending_children"] == 0
    assert a.drop(x) == [Send(O, UserDelete(x, x))]  # after the answer
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.release(x) == [Free(x)]


def test_a_request_to_another_than_the_owner_shares() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C, answered=True)
    assert not fork.lent
    assert fork.fork_id != x


def test_what_was_lent_and_not_sent_needs_nothing() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    assert a.unshare(a.share(x, x, O, answered=True)) == []


def test_only_the_owner_can_be_lent_to() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    with pytest.raises(ProtocolError, match="lent a reference of worker 3 to worker 2"):
        c.receive(a.share(x, x, O, answered=True))


def test_the_owner_shares_with_itself() -> None:
    o = Ledger(O)
    x = o.create_local()
    fork = o.share(x, None, O)
    assert o.release(x) == []
    assert o.receive(fork) == (None, [])
    assert o.release(x) == [Free(x)]


def test_a_user_shares_with_itself() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    child, out = a.receive(a.share(x, x, A))
    assert child is not None
    assert out == [Send(O, ForkRequest(x, child))]
    assert a.drop(x) == []
    assert o.on_message(A, ForkRequest(x, child)) == [Send(A, ForkAccepted(child))]
    assert a.on_message(O, ForkAccepted(child)) == [Send(O, UserDelete(x, x))]  # no message to oneself
    assert a.drop(child) == [Send(O, UserDelete(x, child))]
    assert a.empty


def test_a_message_that_was_never_sent_is_unshared() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C)
    assert a.drop(x) == []
    assert a.unshare(fork) == [Send(O, UserDelete(x, x))]
    assert a.unshare(fork) == []
    y = o.create_local()
    mine = o.share(y, None, C)
    o.release(y)
    assert o.unshare(mine) == [Free(y)]
    assert o.unshare(mine) == []


# --- notes that overtake the RemoteCall -------------------------------------------------------------------------


def test_a_fork_request_overtakes_the_remote_call() -> None:
    a, _, c, o = ledgers()
    x, _ = a.create_remote(O)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkAccepted(child))]
    assert "(expected)" in repr(o)
    assert o.on_message(C, UserDelete(x, child)) == []  # the creator's fork counts already
    assert o.remote_arrived(x, x, A) == []
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]
    assert o.empty


def test_a_shared_handle_reaches_the_owner_before_the_remote_call() -> None:
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    fork = a.share(x, x, O)
    assert o.receive(fork) == (None, [Send(A, ChildConfirmed(fork.fork_id))])
    assert o.release(x) == []
    assert o.remote_arrived(x, x, A) == []
    assert o.owned.ids == {x}


def test_a_user_delete_overtakes_the_remote_call() -> None:
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    assert a.creation_timed_out(x) == []
    assert not a.is_confirmed(x)
    assert a.drop(x) == [Send(O, UserDelete(x, x))]
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.counts()["tombstones"] == 1
    assert "tombstone 0:0@0" in repr(o)
    assert o.remote_arrived(x, x, A) == [Free(x)]
    assert o.empty
    assert o.on_message(A, UserDelete(x, x)) == []  # repeated: must not dig a second grave
    assert o.empty


def test_the_late_call_still_serves_those_who_hold_its_value() -> None:
    a, _, c, o = ledgers()
    x, _ = a.create_remote(O)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    o.on_message(C, ForkRequest(x, child))
    assert o.on_message(A, UserDelete(x, x)) == []  # A timed out and dropped
    assert o.remote_arrived(x, x, A) == []
    assert o.on_message(C, UserDelete(x, child)) == [Free(x)]
    assert o.empty


def test_a_tombstone_outlives_any_number_of_other_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_counts, "ENDED_FORKS_REMEMBERED", 2)
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    o.on_message(A, UserDelete(x, x))
    for _ in range(5):
        y = confirmed_remote(a, o)
        assert o.on_message(A, UserDelete(y, y)) == [Free(y)]
    assert o.remote_arrived(x, x, A) == [Free(x)]
    assert o.empty


def test_a_dropped_creation_that_times_out_is_deleted() -> None:
    a, _, _, _ = ledgers()
    x, _ = a.create_remote(O)
    assert a.drop(x) == []
    assert a.creation_timed_out(x) == [Send(O, UserDelete(x, x))]
    assert a.creation_confirmed(x) == []
    assert a.empty


def test_a_late_answer_after_the_timeout_confirms() -> None:
    a, _, _, _ = ledgers()
    x, _ = a.create_remote(O)
    a.creation_timed_out(x)
    assert a.creation_confirmed(x) == []
    assert a.is_confirmed(x)


def test_a_call_that_never_left_breaks_its_handle_and_sends_nothing() -> None:
    a, _, _, _ = ledgers()
    x, _ = a.create_remote(O)
    assert a.creation_failed(x) == [Broken(x)]
    with pytest.raises(WorkerLostError, match="SHARE of fork 0:0 on worker 0 as user: it is BROKEN"):
        a.share(x, x, C)
    assert a.drop(x) == []
    assert a.empty


def test_a_call_that_never_left_but_was_shared_tells_the_owner() -> None:
    a, _, c, o = ledgers()
    x, _ = a.create_remote(O)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    o.on_message(C, ForkRequest(x, child))
    assert a.creation_failed(x) == [Broken(x)]
    a.on_message(C, ChildConfirmed(child))
    assert a.drop(x) == [Send(O, UserDelete(x, x))]
    o.on_message(A, UserDelete(x, x))
    assert o.on_message(C, UserDelete(x, child)) == [Free(x)]


# --- late events, and messages that a worker sends twice ---------------------------------------------------------


def test_repeated_messages_change_nothing() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    o.on_message(C, ForkRequest(x, child))
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkAccepted(child))]
    c.on_message(O, ForkAccepted(child))
    assert c.on_message(O, ForkAccepted(child)) == []
    assert c.on_message(O, ForkRefused(child)) == []
    a.on_message(C, ChildConfirmed(child))
    assert a.on_message(C, ChildConfirmed(child)) == []
    c.drop(child)
    assert o.on_message(C, UserDelete(x, child)) == []
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkRefused(child))]  # ended: never counted again
    assert c.on_message(O, ForkRefused(child)) == []
    a.drop(x)
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.empty


def test_a_fork_is_received_once() -> None:
    """It is one handle: the drop of a second one would find it gone."""
    a, _, _, o = ledgers()
    x = o.create_local()
    fork = o.share(x, None, A)
    assert a.receive(fork) == (fork.fork_id, [])
    with pytest.raises(ProtocolError, match="twice"):
        a.receive(fork)
    assert a.counts()["user_forks"] == 1


def test_illegal_events_name_event_role_and_state() -> None:
    a, _, _, _ = ledgers()
    x, _ = a.create_remote(O)
    a.drop(x)
    with pytest.raises(UsageError, match="DROP of fork 0:0 on worker 0 as user: it is LEAVING"):
        a.drop(x)
    with pytest.raises(UsageError, match="DROP of fork 9:9 on worker 0 as user: it is GONE"):
        a.drop(GlobalId(9, 9 << 48))
    with pytest.raises(UsageError, match="share of 9:9 on worker 0 as owner"):
        a.share(GlobalId(9, 9 << 48), None, B)
    with pytest.raises(UsageError, match="itself"):
        a.worker_lost(A)
    a.validate()


def test_release_needs_a_local_handle() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    with pytest.raises(UsageError, match="no local handle"):
        o.release(x)


# --- losses -----------------------------------------------------------------------------------------------------


def test_losing_a_holder_frees() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    assert o.worker_lost(A) == [Free(x)]
    assert o.worker_lost(A) == []
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.on_message(A, ForkRequest(x, GlobalId(0, 9))) == []
    assert o.remote_arrived(x, x, A) == [Free(x)]
    assert o.empty


def test_losing_the_owner_breaks() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C)
    assert a.worker_lost(O) == [Broken(x)]
    assert c.worker_lost(O) == []
    child, out = c.receive(fork)
    assert child is not None
    assert out == [Send(A, ChildConfirmed(child)), Broken(child)]
    assert a.on_message(C, ChildConfirmed(child)) == []
    assert a.drop(x) == c.drop(child) == []
    assert a.empty
    assert c.empty
    with pytest.raises(WorkerLostError, match="worker 3 is lost"):
        a.create_remote(O)


@pytest.mark.parametrize("received_first", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_a_child_that_is_cut_from_the_owner_releases_its_parent(received_first: bool, dropped: bool) -> None:
    """All workers live; only C and O have lost each other."""
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C)
    assert a.drop(x) == []
    if received_first:
        c.receive(fork)
        if dropped:
            assert c.drop(fork.fork_id) == []
        out = c.worker_lost(O)
    else:
        c.worker_lost(O)
        out = c.receive(fork)[1]
    assert o.worker_lost(C) == []
    broken = [] if received_first and dropped else [Broken(fork.fork_id)]
    assert out == [Send(A, ChildConfirmed(fork.fork_id)), *broken]
    assert a.on_message(C, ChildConfirmed(fork.fork_id)) == [Send(O, UserDelete(x, x))]
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]
    if broken:
        assert c.drop(fork.fork_id) == []
    assert a.empty
    assert c.empty
    assert o.empty


@pytest.mark.parametrize("dropped", ["never", "before", "after"])
def test_a_fork_that_is_cut_from_the_owner_keeps_its_parent_for_its_children(dropped: str) -> None:
    """Only C and O have lost each other.  A request of C's child is on its way to O, where A's fork keeps the value."""
    a, b, c, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, C)
    c.receive(fork)
    child = c.share(x, fork.fork_id, B)
    _, (request,) = b.receive(child)
    assert a.drop(x) == []
    if dropped == "before":
        assert c.drop(fork.fork_id) == []
    broken = [] if dropped == "before" else [Broken(fork.fork_id)]
    assert c.worker_lost(O) == broken
    assert o.worker_lost(C) == []
    if dropped == "after":
        assert c.drop(fork.fork_id) == []
    assert isinstance(request, Send)
    (accepted,) = o.on_message(B, request.message)
    assert isinstance(accepted, Send)
    assert b.on_message(O, accepted.message) == [Send(C, ChildConfirmed(child.fork_id))]
    assert c.on_message(B, ChildConfirmed(child.fork_id)) == [Send(A, ChildConfirmed(fork.fork_id))]
    assert a.on_message(C, ChildConfirmed(fork.fork_id)) == [Send(O, UserDelete(x, x))]
    assert o.on_message(A, UserDelete(x, x)) == []
    assert a.empty
    if dropped == "never":
        assert c.drop(fork.fork_id) == []
    assert c.empty


def test_losing_the_receiver_releases_the_child() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    a.share(x, x, C)
    a.drop(x)
    assert a.worker_lost(C) == [Send(O, UserDelete(x, x))]
    y = a.create_local()
    with pytest.raises(WorkerLostError, match="share: worker 2 is lost"):
        a.share(y, None, C)


def test_a_lost_parent_hears_nothing_and_a_freed_value_is_refused() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    c.worker_lost(A)
    assert o.worker_lost(A) == [Free(x)]
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkRefused(child))]
    assert c.on_message(O, ForkRefused(child)) == [Broken(child)]
    assert c.drop(child) == []
    assert c.empty


def test_a_refused_child_still_releases_its_parent() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    assert c.on_message(O, ForkRefused(child)) == [Send(A, ChildConfirmed(child)), Broken(child)]


def test_the_owner_receives_a_value_that_it_freed_after_a_loss() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    fork = a.share(x, x, O)
    assert o.worker_lost(A) == [Free(x)]
    assert o.receive(fork) == (fork.fork_id, [Broken(fork.fork_id)])
    assert o.drop(fork.fork_id) == []
    assert o.empty


def test_an_expected_value_is_given_up_with_its_creator() -> None:
    a, _, c, o = ledgers()
    x, _ = a.create_remote(O)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    o.on_message(C, ForkRequest(x, child))
    assert o.worker_lost(A) == [GiveUp(x, A)]
    assert o.on_message(C, UserDelete(x, child)) == [Free(x)]


def test_a_tombstone_goes_with_its_holder() -> None:
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    o.on_message(A, UserDelete(x, x))
    assert not o.empty
    o.worker_lost(A)
    assert o.empty


def test_repr_shows_what_is_there() -> None:
    a, _, _, o = ledgers()
    assert repr(a) == "<Ledger of worker 0: empty>"
    x = confirmed_remote(a, o)
    a.share(x, x, C)
    assert repr(a) == "<Ledger of worker 0: holds 0:0 of 0:0@3: CONFIRMED, children [0:1]>"
    assert repr(o) == "<Ledger of worker 3: owns 0:0: 0 handles, forks {0:0: 0}>"


# --- workers that speak of what is not theirs -------------------------------------------------------------------


def test_only_its_holder_deletes_a_fork() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    o.on_message(C, ForkRequest(x, child))
    for sender, fork_id in ((B, x), (C, x), (A, child), (B, child)):
        assert o.on_message(sender, UserDelete(x, fork_id)) == []
    assert o.on_message(A, UserDelete(x, x)) == []
    assert o.on_message(C, UserDelete(x, child)) == [Free(x)]


def test_a_foreign_deletion_does_not_count_as_the_end_of_a_fork() -> None:
    """It came before the owner had heard of the fork."""
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    assert o.on_message(B, UserDelete(x, child)) == []
    assert o.on_message(C, ForkRequest(x, child)) == [Send(C, ForkAccepted(child))]


def test_a_foreign_deletion_leaves_no_tombstone() -> None:
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    assert o.on_message(B, UserDelete(x, x)) == []
    assert o.counts()["tombstones"] == 0
    assert o.remote_arrived(x, x, A) == []
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_fork_cannot_be_taken_over(arrived: bool) -> None:
    a, _, _, o = ledgers()
    x, _ = a.create_remote(O)
    if arrived:
        o.remote_arrived(x, x, A)
    assert o.on_message(B, ForkRequest(x, x)) == [Send(B, ForkRefused(x))]
    assert o.on_message(B, UserDelete(x, x)) == []
    if not arrived:
        assert o.remote_arrived(x, x, A) == []
    assert o.worker_lost(B) == []
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]


def test_only_the_owner_confirms_or_refuses_a_fork() -> None:
    a, _, c, o = ledgers()
    x = confirmed_remote(a, o)
    child, _ = c.receive(a.share(x, x, C))
    assert child is not None
    for sender in (A, B):
        assert c.on_message(sender, ForkAccepted(child)) == c.on_message(sender, ForkRefused(child)) == []
        assert not c.is_confirmed(child)
    assert c.on_message(O, ForkAccepted(child)) == [Send(A, ChildConfirmed(child))]
    assert c.on_message(B, ForkRefused(child)) == []
    assert c.is_confirmed(child)


def test_only_the_child_confirms_itself_to_its_parent() -> None:
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    child = a.share(x, x, C).fork_id
    assert a.drop(x) == []
    for sender in (B, O):
        assert a.on_message(sender, ChildConfirmed(child)) == []
    assert a.on_message(C, ChildConfirmed(child)) == [Send(O, UserDelete(x, x))]


@pytest.mark.parametrize("ids", ["rref", "fork"])
def test_a_value_cannot_be_made_under_an_id_of_another_worker(ids: str) -> None:
    a, b, _, o = ledgers()
    theirs, mine = a.create_remote(O)[0], b.create_remote(O)[0]
    rref_id, fork_id = (theirs, mine) if ids == "rref" else (mine, theirs)
    with pytest.raises(ProtocolError, match=f"worker 1 makes a reference with an id of worker {rref_id.created_on}"):
        o.remote_arrived(rref_id, fork_id, B)
    assert o.empty


def test_one_fork_cannot_be_of_two_references() -> None:
    a, _, _, o = ledgers()
    x, y = o.create_local(), o.create_local()
    fork = o.share(x, None, A)
    a.receive(fork)
    with pytest.raises(ProtocolError, match=r"sent fork .* twice"):
        a.receive(RRefFork(y, fork.fork_id, O, O))
    with pytest.raises(ProtocolError, match=r"sent fork .* twice"):
        a.receive(RRefFork(x, fork.fork_id, B, O))


def give(ledger: Ledger, fork: RRefFork) -> bool:
    """Whether a worker takes the fork that it is sent; if so, it lets go of its handle at once."""
    try:
        received, _ = ledger.receive(fork)
    except ProtocolError:
        return False
    if received is None:
        assert ledger.release(fork.rref_id) == []
    else:
        ledger.drop(received)
    return True


def test_a_worker_cannot_return_the_fork_of_another_to_the_owner() -> None:
    """C was given a reference, so it knows the reference's id, which is that of its creator's fork, too."""
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    give(o, RRefFork(x, x, O, C))
    assert o.owned.ids == {x}
    assert o.on_message(A, UserDelete(x, x)) == [Free(x)]


def test_a_worker_cannot_return_to_the_owner_what_it_gave_to_another() -> None:
    a, b, c, o = ledgers()
    x = confirmed_remote(a, o)
    given = a.share(x, x, C)
    c.receive(given)
    o.on_message(C, ForkRequest(x, given.fork_id))
    c.on_message(O, ForkAccepted(given.fork_id))
    passed_on = c.share(x, given.fork_id, B)
    b.receive(passed_on)
    o.on_message(B, ForkRequest(x, passed_on.fork_id))
    o.on_message(A, UserDelete(x, x))
    o.on_message(C, UserDelete(x, given.fork_id))
    give(o, passed_on)
    assert o.owned.ids == {x}, "B holds it"
    assert o.on_message(B, UserDelete(x, passed_on.fork_id)) == [Free(x)]


def test_a_worker_cannot_make_another_drop_its_own_fork() -> None:
    """C sends A a fork with the id of A's own: the handle of it and that of A would be one fork."""
    a, _, _, o = ledgers()
    x = confirmed_remote(a, o)
    give(a, RRefFork(x, x, O, C))
    assert a.is_held(x)
    assert a.drop(x) == [Send(O, UserDelete(x, x))]


# --- random programs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle:
    worker: WorkerId
    rref_id: GlobalId
    fork_id: GlobalId | None  # None: on the owner
    serial: int


@dataclass(frozen=True)
class RemoteCalled:
    rref_id: GlobalId


@dataclass(frozen=True)
class RemoteAnswered:
    fork_id: GlobalId


@dataclass(frozen=True)
class Answered:
    """A request that had lent a fork."""

    fork_id: GlobalId


@dataclass(frozen=True)
class Died:
    worker: WorkerId


Content = RemoteCalled | RemoteAnswered | Answered | RRefFork | InternalMessage | Died


@dataclass
class Packet:
    source: WorkerId
    to: WorkerId
    content: Content
    repeats: int = 2  # how often a message may come once more


class World:
    """Workers, a network with no order at all, and a bookkeeper that knows what every ledger should only infer.

    A connection keeps the order of its messages, but they are handled on several threads; and a worker that misbehaves
    may send one twice.
    """

    def __init__(self, workers: int = 4) -> None:
        self.ledgers = {WorkerId(n): Ledger(WorkerId(n)) for n in range(workers)}
        self.killed: set[WorkerId] = set()
        self.cuts: set[frozenset[WorkerId]] = set()
        self.network: list[Packet] = []
        self.handles: list[Handle] = []
        self.owner: dict[GlobalId, WorkerId] = {}
        self.holder: dict[GlobalId, WorkerId] = {}  # of every fork ever
        self.parent: dict[GlobalId, GlobalId | None] = {}  # None: the owner, or a creation
        self.sharer: dict[GlobalId, WorkerId] = {}
        self.confirmed: set[GlobalId] = set()  # ever
        self.arrived: set[GlobalId] = set()
        self.freed: set[GlobalId] = set()
        self.failed: set[GlobalId] = set()  # their RemoteCall never left
        self.late: set[GlobalId] = set()  # their RemoteCall timed out
        self.frees: Counter[GlobalId] = Counter()  # of values that had arrived
        self.lent: Counter[GlobalId] = Counter()  # requests under way that keep the handle of this fork
        self.kept: dict[GlobalId, Handle] = {}  # nobody else keeps these any more
        self.closing = False  # handles are dropped as they come
        self.serial = 0

    @property
    def alive(self) -> list[WorkerId]:
        return [worker for worker in self.ledgers if worker not in self.killed]

    def apart(self, one: WorkerId, other: WorkerId) -> bool:
        """Whether each of the two takes the other for lost, or will."""
        return one in self.killed or other in self.killed or frozenset((one, other)) in self.cuts

    # the program

    def create_remote(self, worker: WorkerId, owner: WorkerId) -> None:
        ledger = self.ledgers[worker]
        try:
            rref_id, fork_id = ledger.create_remote(owner)
        except WorkerLostError:
            assert self.apart(worker, owner)
            return
        self.owner[rref_id] = owner
        self.holder[fork_id], self.parent[fork_id] = worker, None
        self.add_handle(worker, rref_id, fork_id)
        self.post(worker, owner, RemoteCalled(rref_id))

    def create_local(self, worker: WorkerId) -> None:
        rref_id = self.ledgers[worker].create_local()
        self.owner[rref_id] = worker
        self.arrived.add(rref_id)
        self.add_handle(worker, rref_id, None)

    def share(self, handle: Handle, to: WorkerId) -> None:
        try:
            fork = self.ledgers[handle.worker].share(handle.rref_id, handle.fork_id, to)
        except WorkerLostError:
            assert self.apart(handle.worker, to) or handle.fork_id is not None
            return
        self.holder[fork.fork_id], self.parent[fork.fork_id] = to, handle.fork_id
        self.sharer[fork.fork_id] = handle.worker
        self.post(handle.worker, to, fork)

    def lend(self, handle: Handle) -> None:
        """A request to the owner takes the handle along."""
        if handle.fork_id is None or handle.rref_id not in self.owner:
            return
        owner = self.owner[handle.rref_id]
        try:
            fork = self.ledgers[handle.worker].share(handle.rref_id, handle.fork_id, owner, answered=True)
        except WorkerLostError:
            assert self.killed or self.cuts or handle.fork_id in self.failed
            return
        assert fork.lent
        assert fork.fork_id == handle.fork_id
        self.lent[fork.fork_id] += 1
        self.post(handle.worker, owner, fork)

    def answered(self, fork_id: GlobalId, times: int = 1) -> None:
        self.lent[fork_id] -= times
        if not self.lent[fork_id] and fork_id in self.kept:
            self.really_drop(self.kept.pop(fork_id))

    def drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        if handle.fork_id is not None and self.lent[handle.fork_id]:
            self.kept[handle.fork_id] = handle
        else:
            self.really_drop(handle)

    def really_drop(self, handle: Handle) -> None:
        ledger = self.ledgers[handle.worker]
        if handle.fork_id is None:
            self.obey(handle.worker, ledger.release(handle.rref_id))
        else:
            self.obey(handle.worker, ledger.drop(handle.fork_id))

    # faults

    def forge(self, victim: WorkerId, rref_id: GlobalId, fork_id: GlobalId) -> None:
        """A worker that holds nothing says all that could do harm: nothing follows, and ``check`` holds as before."""
        ledger = self.ledgers[victim]
        assert ledger.on_message(STRANGER, UserDelete(rref_id, fork_id)) == []
        for kind in (ForkAccepted, ForkRefused, ChildConfirmed):
            assert ledger.on_message(STRANGER, kind(fork_id)) == []
        if victim == self.owner[rref_id] and rref_id in ledger.owned.ids:
            # The id of a reference is that of its creator's fork, which may be gone already.
            assert ledger.on_message(STRANGER, ForkRequest(rref_id, rref_id)) in (
                [Send(STRANGER, ForkRefused(rref_id))],
                [Send(STRANGER, ForkAccepted(rref_id))],
            )
            assert ledger.on_message(STRANGER, UserDelete(rref_id, rref_id)) == []

    def give_up(self, packet: Packet, never_left: bool = False) -> None:
        """The caller stops waiting (its call or the answer is still under way), or could not send a message at all."""
        match packet.content:
            case RemoteCalled(rref_id) if never_left and rref_id not in {*self.late, *self.parent.values(), *self.lent}:
                self.network.remove(packet)
                self.failed.add(rref_id)
                self.obey(packet.source, self.ledgers[packet.source].creation_failed(rref_id))
            case RemoteCalled(rref_id):
                self.late.add(rref_id)
                self.obey(packet.source, self.ledgers[packet.source].creation_timed_out(rref_id))
            case RemoteAnswered(fork_id):
                self.obey(packet.to, self.ledgers[packet.to].creation_timed_out(fork_id))
            case RRefFork() as fork:
                self.network.remove(packet)
                self.obey(packet.source, self.ledgers[packet.source].unshare(fork))
                if fork.lent:
                    self.answered(fork.fork_id)

    def kill(self, worker: WorkerId) -> None:
        self.killed.add(worker)
        self.handles = [handle for handle in self.handles if handle.worker != worker]
        self.kept = {fork_id: handle for fork_id, handle in self.kept.items() if handle.worker != worker}
        self.network = [packet for packet in self.network if packet.to != worker]
        for other in self.alive:
            self.network.append(Packet(worker, other, Died(worker)))

    def cut(self, one: WorkerId, other: WorkerId, all_is_lost: bool) -> None:
        """Both live on.  What is on its way between them is lost, or waits for a thread and is handled later."""
        pair = frozenset((one, other))
        self.cuts.add(pair)
        if all_is_lost:
            self.network = [packet for packet in self.network if {packet.source, packet.to} != pair]
        self.network += [Packet(one, other, Died(one)), Packet(other, one, Died(other))]

    # the network

    def post(self, source: WorkerId, to: WorkerId, content: Content) -> None:
        if not self.apart(source, to) or (source in self.killed and to not in self.killed):
            self.network.append(Packet(source, to, content))

    def deliver(self, packet: Packet, again: bool = False) -> None:
        ledger = self.ledgers[packet.to]
        repeat = again and packet.repeats > 0 and isinstance(packet.content, MESSAGES)
        if repeat:
            packet.repeats -= 1
        else:
            self.network.remove(packet)
        match packet.content:
            case RemoteCalled(rref_id):
                self.arrived.add(rref_id)
                self.obey(packet.to, ledger.remote_arrived(rref_id, rref_id, packet.source))
                self.post(packet.to, packet.source, RemoteAnswered(rref_id))
            case RemoteAnswered(fork_id):
                self.obey(packet.to, ledger.creation_confirmed(fork_id))
            case RRefFork() as fork:
                received, instructions = ledger.receive(fork)
                if fork.lent:
                    self.post(packet.to, packet.source, Answered(fork.fork_id))
                if fork.lent and received is not None:  # broken: only after the loss of the lender
                    self.holder[received], self.parent[received] = packet.to, fork.fork_id
                    self.sharer[received] = packet.source
                self.add_handle(packet.to, fork.rref_id, received)
                self.obey(packet.to, instructions)
            case Answered(fork_id):
                if self.lent[fork_id]:
                    self.answered(fork_id)
            case Died(worker):
                self.obey(packet.to, ledger.worker_lost(worker))
                for fork_id in [fork_id for fork_id, times in self.lent.items() if times]:
                    if self.holder[fork_id] == packet.to and self.owner_of_fork(fork_id) == worker:
                        self.answered(fork_id, self.lent[fork_id])
            case message:
                self.obey(packet.to, ledger.on_message(packet.source, message))

    def obey(self, worker: WorkerId, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    assert to != worker, "a message to oneself"
                    self.post(worker, to, message)
                case Free(rref_id):
                    assert self.owner[rref_id] == worker
                    if rref_id in self.arrived:  # else it was expected, and its call, if it comes, begins anew
                        self.freed.add(rref_id)
                        self.frees[rref_id] += 1
                case GiveUp(rref_id, lost):
                    assert self.apart(worker, lost)
                    assert rref_id not in self.arrived
                case Broken(fork_id):
                    if fork_id in self.failed:
                        continue
                    assert self.killed or self.cuts, f"{fork_id} is broken though no worker is lost"
                    if fork_id in self.holder and self.holder[fork_id] == worker:
                        assert not self.protected(fork_id), f"{fork_id} is broken"

    def owner_of_fork(self, fork_id: GlobalId) -> WorkerId:
        while (parent := self.parent[fork_id]) is not None:
            fork_id = parent
        return self.owner[fork_id] if fork_id in self.owner else self.sharer[fork_id]

    def add_handle(self, worker: WorkerId, rref_id: GlobalId, fork_id: GlobalId | None) -> None:
        self.serial += 1
        handle = Handle(worker, rref_id, fork_id, self.serial)
        self.handles.append(handle)
        if self.closing:
            self.drop(handle)

    # what must hold

    def protected(self, fork_id: GlobalId) -> bool:
        """Whether the protocol vouches for this fork: it was confirmed, or all are alive who vouch that it will be."""
        holder, parent = self.holder[fork_id], self.parent[fork_id]
        if self.apart(holder, self.owner_of_fork(fork_id)):
            return False
        if fork_id in self.confirmed:
            return True
        if self.apart(holder, self.sharer.get(fork_id, holder)):
            return False
        return parent is None or self.protected(parent)

    def check(self) -> None:
        for worker in self.alive:
            self.ledgers[worker].validate()
            repr(self.ledgers[worker])
        for handle in (*self.handles, *self.kept.values()):
            if handle.fork_id is not None and self.ledgers[handle.worker].is_confirmed(handle.fork_id):
                self.confirmed.add(handle.fork_id)
        for handle in (*self.handles, *self.kept.values()):
            if handle.fork_id is None:
                assert handle.rref_id in self.ledgers[handle.worker].owned.ids, f"{handle} has no value"
            elif self.protected(handle.fork_id):
                assert handle.rref_id not in self.freed, f"{handle} was freed"
        for packet in self.network:
            if not isinstance(packet.content, RRefFork):
                continue
            if packet.content.lent and self.apart(packet.source, packet.to):
                continue  # what a lost worker has lent may be freed
            if self.protected(packet.content.fork_id):
                assert packet.content.rref_id not in self.freed, f"{packet} was freed"
        assert not self.frees or max(self.frees.values()) <= 1, f"freed twice: {self.frees}"

    def finish(self, rng: random.Random) -> None:
        """Drop all handles, drain the network in a random order; nothing may be left."""
        self.closing = True
        while self.handles or self.network:
            choice = rng.randrange(len(self.handles) + len(self.network))
            if choice < len(self.handles):
                self.drop(self.handles[choice])
            else:
                self.deliver(self.network[choice - len(self.handles)], again=rng.random() < 0.2)
            self.check()
        assert not self.kept
        for worker in self.alive:
            assert self.ledgers[worker].empty, self.ledgers[worker]
        for rref_id in self.arrived:
            if self.owner[rref_id] not in self.killed:
                assert self.frees[rref_id] == 1, f"{rref_id} was freed {self.frees[rref_id]} times"


def run_random_program(seed: int, max_kills: int, max_cuts: int, steps: int = 60) -> None:
    rng = random.Random(seed)
    world = World(rng.choice([3, 4]))
    for _ in range(steps):
        move = rng.random()
        if move < 0.10:
            worker, owner = rng.choice(world.alive), rng.choice(list(world.ledgers))
            if worker == owner:
                world.create_local(worker)
            else:
                world.create_remote(worker, owner)
        elif move < 0.18 and world.handles:
            world.lend(rng.choice(world.handles))
        elif move < 0.35 and world.handles:
            world.share(rng.choice(world.handles), rng.choice(list(world.ledgers)))
        elif move < 0.50 and world.handles:
            world.drop(rng.choice(world.handles))
        elif move < 0.52 and len(world.cuts) < max_cuts and len(world.alive) > 1:
            world.cut(*rng.sample(world.alive, 2), all_is_lost=rng.random() < 0.5)
        elif move < 0.58 and world.network:
            packet = rng.choice(world.network)
            if packet.source not in world.killed:
                world.give_up(packet, never_left=rng.random() < 0.3)
        elif move < 0.60 and len(world.killed) < max_kills:
            world.kill(rng.choice(world.alive))
        elif move < 0.65 and world.arrived and world.holder:
            world.forge(rng.choice(world.alive), rng.choice(sorted(world.arrived)), rng.choice(sorted(world.holder)))
        elif world.network:
            world.deliver(rng.choice(world.network), again=rng.random() < 0.3)
        world.check()
    world.finish(rng)


@pytest.mark.parametrize(("max_kills", "max_cuts"), [(0, 0), (1, 0), (2, 0), (0, 1), (0, 3), (1, 1)])
def test_random_programs(max_kills: int, max_cuts: int) -> None:
    for seed in range(600):
        try:
            run_random_program(seed, max_kills, max_cuts)
        except Exception as error:
            error.add_note(f"run_random_program({seed=}, {max_kills=}, {max_cuts=})")
            raise


NUMBERS = st.integers(0, 1 << 16)  # an index, modulo what there is: it shrinks towards the oldest


class LedgerMachine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shrinks a failure to a short story."""

    @initialize(seed=NUMBERS)
    def start(self, seed: int) -> None:
        self.world = World(3)
        self.rng = random.Random(seed)

    def worker(self, number: int) -> WorkerId:
        return self.world.alive[number % len(self.world.alive)]

    def handle(self, number: int) -> Handle:
        return self.world.handles[number % len(self.world.handles)]

    def packet(self, number: int) -> Packet:
        return self.world.network[number % len(self.world.network)]

    @rule(worker=NUMBERS, owner=st.integers(0, 2))
    def create(self, worker: int, owner: int) -> None:
        creator = self.worker(worker)
        if creator == owner:
            self.world.create_local(creator)
        else:
            self.world.create_remote(creator, WorkerId(owner))

    @precondition(lambda self: self.world.handles)
    @rule(number=NUMBERS, to=st.integers(0, 2))
    def share(self, number: int, to: int) -> None:
        self.world.share(self.handle(number), WorkerId(to))

    @precondition(lambda self: self.world.handles)
    @rule(number=NUMBERS)
    def lend(self, number: int) -> None:
        self.world.lend(self.handle(number))

    @precondition(lambda self: self.world.handles)
    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.world.drop(self.handle(number))

    @precondition(lambda self: self.world.network)
    @rule(number=NUMBERS, again=st.booleans())
    def deliver(self, number: int, again: bool) -> None:
        self.world.deliver(self.packet(number), again)

    @precondition(lambda self: self.world.network)
    @rule(number=NUMBERS, never_left=st.booleans())
    def give_up(self, number: int, never_left: bool) -> None:
        packet = self.packet(number)
        if packet.source not in self.world.killed:
            self.world.give_up(packet, never_left)

    @precondition(lambda self: len(self.world.killed) < 1)
    @rule(number=NUMBERS)
    def kill(self, number: int) -> None:
        self.world.kill(self.worker(number))

    @precondition(lambda self: not self.world.cuts and len(self.world.alive) > 1)
    @rule(number=NUMBERS, step=st.booleans(), all_is_lost=st.booleans())
    def cut(self, number: int, step: bool, all_is_lost: bool) -> None:
        one, other = self.worker(number), self.worker(number + 1 + step)
        if one != other:
            self.world.cut(one, other, all_is_lost)

    @precondition(lambda self: self.world.arrived and self.world.holder)
    @rule(victim=NUMBERS, rref=NUMBERS, fork=NUMBERS)
    def forge(self, victim: int, rref: int, fork: int) -> None:
        rref_ids, fork_ids = sorted(self.world.arrived), sorted(self.world.holder)
        self.world.forge(self.worker(victim), rref_ids[rref % len(rref_ids)], fork_ids[fork % len(fork_ids)])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish(self.rng)


LedgerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLedgerMachine = LedgerMachine.TestCase
