"""A turn and its letters: what goes into one, in which order it comes out, and what may wait for what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from telegrad._ids import PassId
from telegrad._wire import codec
from telegrad._wire.frames import FrameReader, prefix
from telegrad._wire.messages import EndPass, Finished, Gradients, Note, PassHead, PlanWanted, Report
from telegrad._wire.tensors import INLINE_LIMIT
from telegrad._wire.values import Bundle, Route
from telegrad.autograd import turn as module
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.context import Context
from telegrad.autograd.graph import Unit
from telegrad.autograd.local_pass import ROOT, Job, State
from telegrad.autograd.turn import GradientBatch, Turn, unpack
from telegrad.errors import ProtocolError
from wire_trip import Neighbours, feed, receive

ME, LEFT, RIGHT = 1, 2, 3
HEAD = PassHead(PassId(LEFT, 5, 12345), 77, False, False, False, 5)
FLOATS_INLINE = INLINE_LIMIT // 4

Wanted = dict[int, dict[int, Tensor | None]]


def a_pass(came: Iterable[int] = ()) -> Pass:
    """A pass in which these messages have got their gradients."""
    this = Pass(ME, HEAD, Context(HEAD.context_id), str)
    this.gradients = {message_id: {0: torch.ones(2)} for message_id in came}
    return this


def a_letter(counted: bool = True, to_segment: Any = None) -> GradientBatch:
    return GradientBatch(counted, Bundle(Route(LEFT), to_segment))


def sent(letter: GradientBatch, neighbours: Neighbours | None = None) -> tuple[Gradients, list[Tensor]]:
    """What the other side reads: the note, and the tensors that came with it."""
    packed = letter.bundle.packed()
    header = codec.encode(Note(1, 1, letter.payload(a_pass()), (), packed.body))
    reader = FrameReader(codec.decode, codec.stream_sizes, lambda size: np.empty(size, np.uint8))
    ((note, streamed),) = feed(
        reader, b"".join([prefix(len(header), sum(map(len, packed.stream))), header, *packed.stream])
    )
    borrowed = neighbours.borrow(note.body) if neighbours is not None else ()
    return note.payload, receive(note.body, streamed, borrowed=borrowed)[0]


def opened(letter: GradientBatch) -> Wanted:
    payload, tensors = sent(letter)
    return unpack(payload.messages, tensors)


def full(value: float, size: int = 3) -> Tensor:
    return torch.full((size,), float(value))


def assert_same(found: Wanted, expected: Wanted) -> None:
    assert list(found) == list(expected), "in the order in which they were added"
    for message_id, gradients in expected.items():
        assert found[message_id].keys() == gradients.keys()
        for part, gradient in gradients.items():
            got = found[message_id][part]
            assert (got is None) == (gradient is None), (message_id, part)
            if gradient is not None:
                assert got is not None
                assert got.dtype is gradient.dtype
                assert torch.equal(got, gradient), (message_id, part)


# --- letters ----------------------------------------------------------------------------------------------------


def test_a_letter_names_its_messages_in_the_order_in_which_they_were_added() -> None:
    letter = a_letter()
    letter.add(9, {0: full(1)})
    letter.add(4, {1: full(2), 0: full(3)})
    letter.add(6, {2: full(4)})
    payload, tensors = sent(letter)
    assert payload.messages == ((9, (0,), ()), (4, (1, 0), ()), (6, (2,), ()))
    assert [tensor[0].item() for tensor in tensors] == [1.0, 2.0, 3.0, 4.0]
    assert_same(unpack(payload.messages, tensors), {9: {0: full(1)}, 4: {0: full(3), 1: full(2)}, 6: {2: full(4)}})


def test_undefined_gradients_are_named_and_take_no_place_among_the_tensors() -> None:
    letter = a_letter()
    letter.add(9, {0: None, 1: full(1), 2: None})
    letter.add(4, {3: full(2)})
    payload, tensors = sent(letter)
    assert payload.messages == ((9, (1,), (0, 2)), (4, (3,), ()))
    assert len(tensors) == 2
    assert_same(unpack(payload.messages, tensors), {9: {0: None, 1: full(1), 2: None}, 4: {3: full(2)}})


def test_a_letter_of_undefined_gradients_alone_has_no_tensors() -> None:
    letter = a_letter()
    letter.add(9, {1: None, 0: None})
    letter.add(4, {0: None})
    payload, tensors = sent(letter)
    assert payload.messages == ((9, (), (1, 0)), (4, (), (0,)))
    assert tensors == []
    assert_same(unpack(payload.messages, []), {9: {0: None, 1: None}, 4: {0: None}})


def test_a_letter_says_of_which_pass_it_is_and_whether_it_counts() -> None:
    for counted in (True, False):
        letter = a_letter(counted)
        letter.add(9, {0: full(1)})
        payload = letter.payload(a_pass())
        assert payload == Gradients(HEAD, ((9, (0,), ()),), counted, None)
        letter.finished = finished(3)
        assert sent(letter)[0] == Gradients(HEAD, ((9, (0,), ()),), counted, finished(3))


def test_a_gradient_is_packed_when_it_is_added() -> None:
    buffer, letter = full(1), a_letter()
    letter.add(9, {0: buffer})
    letter.add(4, {0: buffer.fill_(2)})
    buffer.fill_(3)
    assert_same(opened(letter), {9: {0: full(1)}, 4: {0: full(2)}})


def test_one_gradient_of_two_messages_becomes_two() -> None:
    """Each of them goes its own way over there, and may be changed."""
    gradient, letter = full(1), a_letter()
    letter.add(9, {0: gradient})
    letter.add(4, {0: gradient})
    found = opened(letter)
    one, other = found[9][0], found[4][0]
    assert one is not None
    assert other is not None
    one.fill_(5)
    assert torch.equal(other, full(1))


@pytest.mark.parametrize("came", [0, 2, 4], ids="{} tensors".format)
def test_a_letter_that_speaks_of_more_or_fewer_tensors_than_came_is_refused(came: int) -> None:
    messages = ((9, (0, 1), ()), (4, (0,), (1,)))
    with pytest.raises(ProtocolError, match=f"{came} gradients came with a letter that speaks of others"):
        unpack(messages, [full(number) for number in range(came)])
    assert len(unpack(messages, [full(number) for number in range(3)])) == 2


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
letters = st.dictionaries(
    st.integers(1, 2**40),
    st.dictionaries(st.integers(0, 9), st.none() | st.tuples(st.sampled_from(DTYPES), st.integers(0, 20)), min_size=1),
    max_size=8,
)


@settings(max_examples=200)
@given(letters)
def test_what_comes_out_of_any_letter_is_what_went_in(content: dict[int, dict[int, Any]]) -> None:
    added: Wanted = {}
    for message_id, parts in content.items():
        added[message_id] = {
            part: kind and torch.full((kind[1],), 1000 * len(added) + part, dtype=kind[0])
            for part, kind in parts.items()
        }
    letter = a_letter()
    for message_id, gradients in added.items():
        letter.add(message_id, gradients)
    assert_same(opened(letter), added)


# --- how long it may wait ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [full(1), None], ids=["defined", "undefined"])
def test_a_letter_of_thirty_two_messages_is_full(gradient: Tensor | None) -> None:
    assert module._FULL == 32
    letter = a_letter()
    for number in range(32):
        assert letter.may_grow, number
        letter.add(number, {0: gradient, 1: gradient})
    assert not letter.may_grow


def test_a_letter_counts_messages_and_not_tensors() -> None:
    letter = a_letter()
    letter.add(1, {part: full(part) for part in range(40)})
    assert letter.may_grow


def test_a_gradient_that_goes_beside_the_header_does_not_wait() -> None:
    letter = a_letter()
    letter.add(1, {0: full(1, FLOATS_INLINE)})
    assert letter.may_grow
    letter.add(2, {0: full(2, FLOATS_INLINE + 1)})
    assert not letter.may_grow
    letter.add(3, {0: full(3)})
    assert not letter.may_grow, "what is in it stays in it"
    assert_same(opened(letter), {1: {0: full(1, FLOATS_INLINE)}, 2: {0: full(2, FLOATS_INLINE + 1)}, 3: {0: full(3)}})


def test_a_gradient_that_goes_through_shared_memory_does_not_wait() -> None:
    neighbours = Neighbours(limit=INLINE_LIMIT + 1)
    letter = a_letter(to_segment=neighbours.to_segment)
    letter.add(1, {0: full(1, FLOATS_INLINE)})
    assert letter.may_grow
    letter.add(2, {0: None, 1: full(2, 2 * FLOATS_INLINE)})
    assert not letter.may_grow
    assert len(neighbours.pool._segments) == 1
    payload, tensors = sent(letter, neighbours)
    assert_same(
        unpack(payload.messages, tensors), {1: {0: full(1, FLOATS_INLINE)}, 2: {0: None, 1: full(2, 2 * FLOATS_INLINE)}}
    )


# --- mail -------------------------------------------------------------------------------------------------------


def finished(count: int) -> Finished:
    return Finished(HEAD.pass_id, count, 0, (Report(ME, 1, count),))


def a_turn(*jobs: Job, came: Iterable[int] = (), letters_to: Iterable[int] = ()) -> Turn:
    turn = Turn(a_pass(came), jobs)
    for to in letters_to:
        turn.letters[to] = a_letter()
    return turn


def test_an_answer_rides_along_with_gradients_for_the_same_worker() -> None:
    turn = a_turn(letters_to=[LEFT, RIGHT])
    turn.notes = [(LEFT, finished(1))]
    notes, letters = turn.take_mail()
    assert notes == []
    assert letters[LEFT].finished == finished(1)
    assert letters[RIGHT].finished is None


@pytest.mark.parametrize("second", [finished(2), finished(1)], ids=["another", "an equal one"])
def test_a_second_answer_to_that_worker_stays_a_note_of_its_own(second: Finished) -> None:
    turn = a_turn(letters_to=[LEFT])
    turn.notes = [(LEFT, finished(1)), (LEFT, second)]
    notes, letters = turn.take_mail()
    assert notes == [(LEFT, second)]
    assert letters[LEFT].finished == finished(1)


def test_notes_to_others_and_of_other_kinds_stay_notes_in_their_order() -> None:
    turn = a_turn(letters_to=[LEFT])
    ended = EndPass(HEAD.pass_id, HEAD.context_id, "why")
    wanted = PlanWanted(HEAD.pass_id)
    turn.notes = [(LEFT, wanted), (RIGHT, finished(1)), (LEFT, finished(2)), (LEFT, ended), (RIGHT, wanted)]
    notes, letters = turn.take_mail()
    assert notes == [(LEFT, wanted), (RIGHT, finished(1)), (LEFT, ended), (RIGHT, wanted)]
    assert letters[LEFT].finished == finished(2)


def test_each_letter_takes_the_answer_to_its_own_receiver() -> None:
    turn = a_turn(letters_to=[LEFT, RIGHT])
    turn.notes = [(RIGHT, finished(1)), (LEFT, finished(2))]
    notes, letters = turn.take_mail()
    assert notes == []
    assert (letters[LEFT].finished, letters[RIGHT].finished) == (finished(2), finished(1))


def test_mail_is_taken_once() -> None:
    turn = a_turn(letters_to=[LEFT])
    letter = turn.letters[LEFT]
    turn.notes = [(RIGHT, finished(1))]
    notes, letters = turn.take_mail()
    assert (notes, letters) == ([(RIGHT, finished(1))], {LEFT: letter})
    assert turn.take_mail() == ([], {})
    turn.notes += [(LEFT, finished(2))]
    turn.letters[RIGHT] = later = a_letter()
    assert notes == [(RIGHT, finished(1))], "what was taken does not change any more"
    assert letters == {LEFT: letter}
    assert letter.finished is None, "it has left, and cannot take an answer along"
    assert turn.take_mail() == ([(LEFT, finished(2))], {RIGHT: later})


def test_answers_without_letters_are_notes() -> None:
    turn = a_turn()
    turn.notes = [(LEFT, finished(1)), (RIGHT, finished(2))]
    assert turn.take_mail() == ([(LEFT, finished(1)), (RIGHT, finished(2))], {})


# --- which units run together -----------------------------------------------------------------------------------


def a_job(*sources: int, quick: bool = True) -> Job:
    return Job(Unit(list(sources), is_quick=quick), State.RUNNING, list(sources))


def groups(turn: Turn) -> list[list[Job]]:
    found = []
    while turn.todo:
        found.append(turn.next_jobs())
    return found


def test_quick_units_that_have_all_they_need_run_together() -> None:
    jobs = [a_job(4), a_job(3), a_job(2, 1)]
    assert groups(a_turn(*jobs, came=[1, 2, 3, 4])) == [jobs]


def test_the_roots_need_nothing_to_come() -> None:
    jobs = [a_job(ROOT), a_job(2)]
    assert groups(a_turn(*jobs, came=[2])) == [jobs]


@pytest.mark.parametrize("why", ["not quick", "nothing came", "not all came"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_unit_that_is_not_quick_or_not_complete_stays_alone(why: str, place: int) -> None:
    jobs = [a_job(1), a_job(2)]
    came = {1, 2, 10, 11} - {"not quick": set(), "nothing came": {10, 11}, "not all came": {10}}[why]
    jobs.insert(place, odd := a_job(11, 10, quick=why != "not quick"))
    found = groups(a_turn(*jobs, came=came))
    assert [odd] in found
    assert [job for group in found for job in group] == jobs, "in their order"
    assert len(found) == (3 if place == 1 else 2), "the others still run together where they are neighbours"


def test_one_unit_is_taken_whatever_it_is_like() -> None:
    for job in (a_job(1), a_job(1, quick=False), a_job(1, 2)):
        turn = a_turn(job, came=[1])
        assert turn.next_jobs() == [job]
        assert not turn.todo


def test_a_gradient_that_comes_during_the_turn_counts() -> None:
    jobs = [a_job(1), a_job(2), a_job(3)]
    turn = a_turn(*jobs, came=[1, 3])
    assert turn.next_jobs() == jobs[:1]
    turn.this.gradients[2] = {0: None}
    assert turn.next_jobs() == jobs[1:]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_neighbours_run_together_if_and_only_if_both_may(kinds: list[tuple[bool, bool, bool]]) -> None:
    jobs, may, came = [], {}, []
    for number, (quick, complete, two) in enumerate(kinds):
        sources = [2 * number + 1, 2 * number + 2] if two else [2 * number + 1]
        jobs.append(a_job(*sources, quick=quick))
        may[id(jobs[-1])] = quick and complete
        came += sources if complete else sources[1:]
    found = groups(a_turn(*jobs, came=came))
    assert [job for group in found for job in group] == jobs
    assert all(len(group) == 1 or all(may[id(job)] for job in group) for group in found)
    assert not any(may[id(one[-1])] and may[id(other[0])] for one, other in itertools.pairwise(found)), (
        "they could have run together"
    )
