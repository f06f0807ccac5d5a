"""A batch of gradients for one worker: what goes in comes out, and when it may wait for more."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from telegrad._ids import PassId
from telegrad._wire import codec
from telegrad._wire.frames import FrameReader, prefix
from telegrad._wire.messages import Body, Finished, Gradients, PassHead, Report
from telegrad._wire.tensors import INLINE_LIMIT
from telegrad._wire.values import Bundle, Route
from telegrad.autograd import run
from telegrad.autograd.run import GradientBatch, unpack
from telegrad.errors import ProtocolError
from wire_trip import Neighbours, feed, receive

ME, LEFT = 1, 2
HEAD = PassHead(PassId(LEFT, 5, 12345), 77, False, False, False, 5)
FLOATS_INLINE = INLINE_LIMIT // 4

Wanted = dict[int, dict[int, Tensor | None]]


def a_batch(counted: bool = True, to_segment: Any = None) -> GradientBatch:
    return GradientBatch(counted, Bundle(Route(LEFT), to_segment))


def sent(batch: GradientBatch, neighbours: Neighbours | None = None) -> tuple[Gradients, list[Tensor]]:
    """What the other side reads: the message, and the tensors that came with it."""
    packed = batch.tensors.packed()
    message = Gradients(HEAD, tuple(batch.messages), batch.counted, batch.finished, packed.body)
    header = codec.encode(message)
    reader = FrameReader(codec.decode, codec.stream_sizes, lambda size: np.empty(size, np.uint8))
    ((message, streamed),) = feed(
        reader, b"".join([prefix(len(header), sum(map(len, packed.stream))), header, *packed.stream])
    )
    borrowed = neighbours.borrow(message.body) if neighbours is not None else ()
    return message, receive(message.body, streamed, borrowed=borrowed)[0]


def opened(batch: GradientBatch) -> Wanted:
    payload, tensors = sent(batch)
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


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_a_batch_names_its_messages_in_the_order_in_which_they_were_added() -> None:
    batch = a_batch()
    batch.add(9, {0: full(1)})
    batch.add(4, {1: full(2), 0: full(3)})
    batch.add(6, {2: full(4)})
    payload, tensors = sent(batch)
    assert payload.messages == ((9, (0,), ()), (4, (1, 0), ()), (6, (2,), ()))
    assert [tensor[0].item() for tensor in tensors] == [1.0, 2.0, 3.0, 4.0]
    assert_same(unpack(payload.messages, tensors), {9: {0: full(1)}, 4: {0: full(3), 1: full(2)}, 6: {2: full(4)}})


def test_undefined_gradients_are_named_and_take_no_place_among_the_tensors() -> None:
    batch = a_batch()
    batch.add(9, {0: None, 1: full(1), 2: None})
    batch.add(4, {3: full(2)})
    payload, tensors = sent(batch)
    assert payload.messages == ((9, (1,), (0, 2)), (4, (3,), ()))
    assert len(tensors) == 2
    assert_same(unpack(payload.messages, tensors), {9: {0: None, 1: full(1), 2: None}, 4: {3: full(2)}})


def test_a_batch_of_undefined_gradients_alone_has_no_tensors() -> None:
    batch = a_batch()
    batch.add(9, {1: None, 0: None})
    batch.add(4, {0: None})
    payload, tensors = sent(batch)
    assert payload.messages == ((9, (), (1, 0)), (4, (), (0,)))
    assert tensors == []
    assert_same(unpack(payload.messages, []), {9: {0: None, 1: None}, 4: {0: None}})


def finished(count: int) -> Finished:
    return Finished(HEAD.pass_id, count, 0, (Report(ME, 1, count),))


def test_a_batch_says_whether_it_counts_and_takes_an_answer_along() -> None:
    for counted in (True, False):
        batch = a_batch(counted)
        batch.add(9, {0: full(1)})
        batch.finished = finished(3)
        came = msgspec.structs.replace(sent(batch)[0], body=Body())
        assert came == Gradients(HEAD, ((9, (0,), ()),), counted, finished(3))


def test_a_gradient_is_packed_when_it_is_added() -> None:
    buffer, batch = full(1), a_batch()
    batch.add(9, {0: buffer})
    batch.add(4, {0: buffer.fill_(2)})
    buffer.fill_(3)
    assert_same(opened(batch), {9: {0: full(1)}, 4: {0: full(2)}})


def test_one_gradient_of_two_messages_becomes_two() -> None:
    """Each of them goes its own way over there, and may be changed."""
    gradient, batch = full(1), a_batch()
    batch.add(9, {0: gradient})
    batch.add(4, {0: gradient})
    found = opened(batch)
    one, other = found[9][0], found[4][0]
    assert one is not None
    assert other is not None
    one.fill_(5)
    assert torch.equal(other, full(1))


@pytest.mark.parametrize("came", [0, 2, 4], ids="{} tensors".format)
def test_a_batch_that_speaks_of_more_or_fewer_tensors_than_came_is_refused(came: int) -> None:
    messages = ((9, (0, 1), ()), (4, (0,), (1,)))
    with pytest.raises(ProtocolError, match=f"names 3 gradients, but {came} came with it"):
        unpack(messages, [full(number) for number in range(came)])
    assert len(unpack(messages, [full(number) for number in range(3)])) == 2


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
batches = st.dictionaries(
    st.integers(1, 2**40),
    st.dictionaries(st.integers(0, 9), st.none() | st.tuples(st.sampled_from(DTYPES), st.integers(0, 20)), min_size=1),
    max_size=8,
)


@settings(max_examples=200)
@given(batches)
def test_what_comes_out_of_any_batch_is_what_went_in(content: dict[int, dict[int, Any]]) -> None:
    added: Wanted = {}
    for message_id, parts in content.items():
        added[message_id] = {
            part: kind and torch.full((kind[1],), 1000 * len(added) + part, dtype=kind[0])
            for part, kind in parts.items()
        }
    batch = a_batch()
    for message_id, gradients in added.items():
        batch.add(message_id, gradients)
    assert_same(opened(batch), added)


# --- how long it may wait ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [full(1), None], ids=["defined", "undefined"])
def test_a_batch_of_thirty_two_messages_is_full(gradient: Tensor | None) -> None:
    assert run._FULL == 32
    batch = a_batch()
    for number in range(32):
        assert batch.may_grow, number
        batch.add(number, {0: gradient, 1: gradient})
    assert not batch.may_grow


def test_a_batch_counts_messages_and_not_tensors() -> None:
    batch = a_batch()
    batch.add(1, {part: full(part) for part in range(40)})
    assert batch.may_grow


def test_a_gradient_that_goes_beside_the_header_does_not_wait() -> None:
    batch = a_batch()
    batch.add(1, {0: full(1, FLOATS_INLINE)})
    assert batch.may_grow
    batch.add(2, {0: full(2, FLOATS_INLINE + 1)})
    assert not batch.may_grow
    batch.add(3, {0: full(3)})
    assert not batch.may_grow, "what is in it stays in it"
    assert_same(opened(batch), {1: {0: full(1, FLOATS_INLINE)}, 2: {0: full(2, FLOATS_INLINE + 1)}, 3: {0: full(3)}})


def test_a_gradient_that_goes_by_shared_memory_does_not_wait() -> None:
    neighbours = Neighbours(limit=INLINE_LIMIT + 1)
    batch = a_batch(to_segment=neighbours.to_segment)
    batch.add(1, {0: full(1, FLOATS_INLINE)})
    assert batch.may_grow
    batch.add(2, {0: None, 1: full(2, 2 * FLOATS_INLINE)})
    assert not batch.may_grow
    assert len(neighbours.pool._segments) == 1
    payload, tensors = sent(batch, neighbours)
    assert_same(
        unpack(payload.messages, tensors), {1: {0: full(1, FLOATS_INLINE)}, 2: {0: None, 1: full(2, 2 * FLOATS_INLINE)}}
    )
