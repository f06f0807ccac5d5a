"""Headers: every message comes back as it was; bytes that are no message raise ProtocolError and do nothing else."""

from __future__ import annotations

import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from telegrad._ids import GlobalId, PassId
from telegrad._wire import codec, messages
from telegrad._wire.messages import (
    Body,
    Call,
    Failure,
    Goodbye,
    InSegment,
    Node,
    Reply,
    SegmentReleased,
    TensorMeta,
)
from telegrad.errors import ProtocolError
from wire_trip import FUZZ_EXAMPLES

MESSAGES = typing.get_args(messages.Message)
INTERNAL = typing.get_args(messages.InternalMessage)

sizes = st.integers(0, 2**63 - 1)
numbers = st.integers(-(2**63), 2**63 - 1)
bytes_ = st.just(0)
shapes = st.lists(sizes, max_size=4).map(tuple)
ids = st.builds(GlobalId, sizes, sizes)
pass_ids = st.builds(PassId, sizes, sizes, sizes)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text() | st.builds(Ext, bytes_, st.binary()),
    lambda inner: st.builds(Node, numbers, st.lists(inner, max_size=4)),
    max_leaves=8,
)
metas = st.recursive(
    st.builds(TensorMeta, numbers, shapes, numbers, st.none() | shapes, sizes, numbers, numbers),
    lambda inner: st.builds(
        TensorMeta, numbers, shapes, parts=st.lists(inner, max_size=3).map(tuple), device=st.none() | st.text()
    ),
    max_leaves=4,
)
buffers = st.binary().map(bytearray) | sizes | st.builds(InSegment, sizes, sizes, sizes)
forks = st.builds(messages.RRefFork, ids, ids, sizes, sizes, st.text())
bodies = st.builds(
    Body,
    plain,
    numbers,
    shapes,
    st.lists(buffers, max_size=4).map(tuple),
    st.lists(metas, max_size=3).map(tuple),
    st.lists(forks, max_size=2).map(tuple),
    st.none() | st.lists(numbers | st.lists(numbers, max_size=3), max_size=3),
)
BY_TYPE = {
    int: numbers,
    bytes: st.binary(),
    str: st.text(),
    bool: st.booleans(),
    Body: bodies,
    GlobalId: ids,
    PassId: pass_ids,
}


def record(kind):
    """A strategy for all fields of a record, so that no message can be forgotten here."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: field(hints[name]) for name in kind.__struct_fields__})


def field(hint):
    if hint == messages.InternalMessage:
        return st.one_of([record(kind) for kind in INTERNAL])
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    match parts(hint):
        case "sizes", _:
            return sizes
        case "many", (item,):
            return st.lists(field(item), max_size=3).map(tuple)
        case "several", items:
            return st.tuples(*map(field, items))
        case "perhaps", (item,):
            return st.none() | field(item)
    return record(hint)


def parts(hint):
    """What a type is made of that is no record."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return "sizes", ()
    if inner[1:] == (types.NoneType,):
        return "perhaps", inner[:1]
    if typing.get_origin(hint) is tuple:
        return ("many", inner[:1]) if inner[1:] == (...,) else ("several", inner)
    return "record", ()


EXAMPLES = {
    int: 7,
    bytes: b"\x00bytes",
    str: "naïve",
    bool: True,
    GlobalId: GlobalId(3, 4),
    PassId: PassId(3, 4, 5),
    Body: Body(
        Node(0, [1, "a", None, Ext(0, b"b"), Node(1, [2.5])]),
        1,
        (2,),
        (bytearray(b"x"), 9000, InSegment(1 << 63, 7, 5)),
        (TensorMeta(0, (2, 3), 0, (3, 1), 4, 1, 1, (TensorMeta(1, ()),), (0.5,), "cuda:0"),),
        (messages.RRefFork(GlobalId(0, 1), GlobalId(0, 2), 0, 1, "Tensor"),),
        [1, 2],
    ),
    messages.InternalMessage: messages.UserDelete(GlobalId(1, 2), GlobalId(3, 4)),
}


def filled(kind):
    """One record with something in every field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})


def example(hint):
    if hint in EXAMPLES:
        return EXAMPLES[hint]
    match parts(hint):
        case "sizes", _:
            return 7
        case "perhaps", (item,):
            return example(item)
        case (("many" | "several"), items):
            return tuple(map(example, items))
    return filled(hint)


CORPUS = [codec.encode(filled(kind)) for kind in MESSAGES]


# --- round trips ----------------------------------------------------------------------------------------------------


def test_every_record_with_a_tag_is_a_message():
    records = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages._Record) and value.__struct_config__.tag is not None
    }
    assert records == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_filled_message_comes_back(kind):
    message = filled(kind)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_any_message_comes_back(kind):
    @given(record(kind))
    @settings(max_examples=40)
    def check(message):
        decoded = codec.decode(codec.encode(message))
        assert decoded == message
        assert type(decoded) is kind

    check()


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_header_may_be_any_memory(wrap):
    assert codec.decode(wrap(codec.encode(Goodbye()))) == Goodbye()


def test_a_request_goes_one_way_and_its_answer_the_other():
    from_dialler, from_dialled = messages.FROM_DIALLER, messages.FROM_DIALLED
    assert from_dialler | from_dialled == set(MESSAGES)
    assert from_dialler - from_dialled == {Call, messages.RemoteCall, messages.Fetch, messages.Barrier, *INTERNAL}
    assert from_dialled - from_dialler == {Reply, Failure}


def test_a_tag_is_used_once():
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags)


# --- buffers --------------------------------------------------------------------------------------------------------


def test_stream_sizes_are_the_buffers_that_follow():
    assert codec.stream_sizes(Reply(1, Body(buffers=(b"x", 5, InSegment(1, 2, 3), 7)))) == [5, 7]
    assert codec.stream_sizes(Goodbye()) == []


def test_a_segment_that_is_not_kept_is_given_back():
    assert codec.decode(codec.encode(SegmentReleased(5))) == SegmentReleased(5, kept=False)
    assert codec.decode(codec.encode(SegmentReleased(5, kept=True))).kept


def test_complete_puts_the_buffers_in_order():
    body = Body(buffers=(bytearray(b"in"), 5, InSegment(1, 2, 3), 7))
    assert codec.complete(body, ["s1", "s2"], ["p1"]) == [b"in", "s1", "p1", "s2"]
    assert codec.complete(Body(buffers=(bytearray(b"in"),)), [], []) == [b"in"]


@pytest.mark.parametrize(("streamed", "borrowed"), [([], ["p"]), (["s"], [])])
def test_complete_says_when_buffers_are_missing(streamed, borrowed):
    with pytest.raises(ProtocolError, match="more buffers than came"):
        codec.complete(Body(buffers=(5, InSegment(1, 2, 3))), streamed, borrowed)


# --- what is no message ---------------------------------------------------------------------------------------------


def malformed(*fields):
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        malformed(),
        malformed(99),
        malformed("7"),
        malformed(4),
        malformed(4, "1"),
        malformed(4, 2**64 - 1, [None, 0, 0]),
        malformed(9, "too", "many"),
        malformed(1, 1, 5),
        malformed(30, 1, 0, [99, [0, 1]]),
        malformed(4, 1, [None, -1, [], [-1]]),
        malformed(4, 1, [None, -1, [], [[-1, 5, 5]]]),
        malformed(4, 1, [None, -1, [], [[5, -1, 5]]]),
        malformed(4, 1, [None, -1, [], [[5, 5, -1]]]),
        malformed(4, 1, [None, -1, [], [[5, 5]]]),
        malformed(6, 1, 2),
        malformed(6, "1"),
        malformed(6),
        malformed(4, 1, [None, -1, [], [], [[0, [-1]]]]),
        malformed(4, 1, [None, -1, [], [], [[0, [1], 0, [-1]]]]),
        malformed(4, 1, [None, -1, [], [], [[0, [1], 0, [1], -1]]]),
        codec.encode(Goodbye()) + b"\x00",
        b"\x91" * 100_000,  # nested too deep
        b"\x93\x04\x01\x91" + b"\x91" * 100_000,
        b"\x93\x04\x01\x91\xdd\xff\xff\xff\xff",  # announces four billion items
        b"\x93\x04\x01\x91\xc6\xff\xff\xff\xff",  # ... bytes
        b"\x93\x04\x01\x91\xdf\xff\xff\xff\xff",  # ... keys
        b"\x93\x04\x01\x91\x81\x80\x80",  # a map for a key
        b"\x93\x04\x01\x91\xa1\xff",  # no UTF-8
        b"\x93\x04\x01\x91\xc4\x01x",  # bytes as such, which the tree writes otherwise
    ],
    ids=lambda header: header[:12].hex(),
)
def test_what_is_no_message_raises(header):
    with pytest.raises(ProtocolError, match="is not a message"):
        codec.decode(header)


def test_an_empty_failure_keeps_its_texts():
    failure = Failure(1, "worker1", "builtins:KeyError", "'x'")
    assert codec.decode(codec.encode(failure)) == failure


def test_a_call_without_a_body_is_small():
    assert len(codec.encode(Call(1, "math:sqrt"))) < 40


# --- fuzz -----------------------------------------------------------------------------------------------------------


def decode_or_refuse(header: bytes) -> None:
    try:
        message = codec.decode(header)
    except ProtocolError:
        return
    assert isinstance(message, MESSAGES)
    codec.stream_sizes(message)


@given(st.binary(max_size=100))
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_random_bytes(data):
    decode_or_refuse(data)


@given(
    st.sampled_from(CORPUS),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=5),
    st.integers(0, 250),
    st.binary(max_size=8),
)
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_mutated_headers(header, edits, cut, tail):
    data = bytearray(header)
    for position, byte in edits:
        data[position % len(data)] = byte
    decode_or_refuse(bytes(data[:cut]) + tail)
