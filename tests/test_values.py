"""Values: plain data need no pickle, everything else goes through it, and a worker without pickle runs nothing."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import itertools
import math
import os
import pickle
import resource
import sys
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from telegrad._ids import GlobalId
from telegrad._wire import codec, values
from telegrad._wire.messages import Body, InSegment, Node, Reply, RRefFork, TensorMeta, Tree
from telegrad._wire.tensors import INLINE_BUDGET, INLINE_LIMIT
from telegrad._wire.unpack_tensors import unpack as unpack_tensors
from telegrad._wire.values import PACKED_NONE, Bundle, Route, pack, unpack
from telegrad.errors import ProtocolError, SerializationError, TelegradError, UsageError
from wire_trip import FUZZ_EXAMPLES, Neighbours, receive, trip


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    name: str
    tensor: torch.Tensor


@dataclasses.dataclass
class Shared:
    """Stands for an RRef."""

    number: int
    shared_with: list[int] = dataclasses.field(default_factory=list)

    def __telegrad_share__(self, to, answered):
        self.shared_with.append(to)
        return RRefFork(GlobalId(0, self.number), GlobalId(0, 1), 0, 0)


def twice(x):
    return 2 * x


def same(one, other):
    """Equal, with equal types all the way down, and with nan equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
            math.isnan(one) and math.isnan(other)
        )
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    return one == other


# --- plain data -----------------------------------------------------------------------------------------------------

PLAIN = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1.5,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    5e-324,
    "",
    "naïve ☃ 𝄞 \0",
    b"",
    b"\x00\xff",
    bytearray(b"bytes"),
    1 - 2j,
    complex(math.nan, -0.0),
    (),
    [],
    {},
    set(),
    frozenset(),
    (1, "a", None),
    [1, [2, [3, [4]]]],
    {"a": 1, None: 2, (1, 2): 3, 4: [5], b"k": {}, 1.5: True, frozenset({1}): ()},
    {1: "int", "1": "text"},
    {1, "a", None, (2, 3)},
    frozenset({1, b"2"}),
    slice(1, None, 2),
    slice("a", (1, 2)),
    ...,
    range(5),
    range(10, -10, -3),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    [0, 1, 2, 3, 4, 5, 6, 7, 8],  # looks like tags
    [[5, 0], (6, 0)],
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_need_no_pickle(value):
    done = trip(value, allow_pickle=False)
    assert done.packed.body.pickle == -1
    assert same(done.value, value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
)
# Without NaN, which no set can find again.
keys = st.recursive(
    scalars.filter(lambda scalar: scalar == scalar), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3
)
plain_data = st.recursive(
    scalars | st.builds(bytearray, st.binary()) | st.builds(slice, scalars, scalars, scalars),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=20,
)


def rebuilt(value):
    """A deep copy in which nothing is shared, for hypothesis may draw one object twice."""
    if isinstance(value, dict):
        return {key: rebuilt(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(rebuilt(part) for part in value)
    return type(value)(value) if isinstance(value, (bytearray, set)) else value


@given(plain_data)
@settings(max_examples=300)
def test_any_plain_data(value):
    value = rebuilt(value)
    done = trip(value)
    assert same(done.value, value)
    assert not done.pickled


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**1000, "\ud800 alone", ["\udfff"], {1: 10**40}], ids=repr)
def test_numbers_and_texts_that_the_header_cannot_write_are_pickled(value):
    done = trip(value)
    assert done.pickled
    assert done.value == value


def test_numbers_longer_than_python_prints():
    assert trip(1 << 100_000).value == 1 << 100_000


def test_a_tree_is_encoded_once():
    """When the value is packed; encoding the message copies the bytes."""
    packed = pack({"key": [1, 2, (3, "text")]}, Route(1))
    assert type(packed.body.tree) is msgspec.Raw
    assert bytes(packed.body.tree) in codec.encode(Reply(1, packed.body))


def test_plain_data_larger_than_a_header_go_beside_it(monkeypatch):
    monkeypatch.setattr(values, "MAX_HEADER", 100_000)
    value = {"blob": bytes(200_000), "tensor": torch.ones(3)}
    done = trip(value)
    assert len(codec.encode(Reply(1, done.packed.body))) < 10_000
    assert done.value["blob"] == value["blob"]
    with pytest.raises(SerializationError):
        trip(value, allow_pickle=False)


# --- objects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Point(1, "a"),
        Colour.RED,
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], 5),
        collections.Counter("abca"),
        np.float32(1.5),
        np.int64(7),
        torch.strided,
        torch.channels_last,
        int,
        Point,
        print,
        twice,
        torch.add,
        functools.partial(twice, 3),
        range(2**70),
        memoryview,
        GlobalId(1, 2),
        ValueError("x").args,
    ],
    ids=repr,
)
def test_objects(value):
    got = trip(value).value
    assert type(got) is type(value)
    assert getattr(got, "args", None) == getattr(value, "args", None)
    assert isinstance(value, functools.partial) or got == value


def test_a_subclass_of_a_plain_type_keeps_its_class():
    for value in (Point(1, 2), Colour.RED, collections.OrderedDict(a=1), True, np.float64(2.0)):
        assert type(trip([value]).value[0]) is type(value)


def test_a_dataclass_with_a_tensor():
    sent = Record("weights", torch.arange(5.0))
    done = trip([sent, sent, sent.tensor])
    first, second, tensor = done.value
    assert first is second
    assert tensor is first.tensor
    assert torch.equal(tensor, sent.tensor)
    assert len(done.tensors) == 1


def test_a_module_keeps_its_parameters_tied():
    sent = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    sent[1].weight = sent[0].weight
    done = trip(sent)
    assert done.value[1].weight is done.value[0].weight
    assert len(done.tensors) == 3
    x = torch.ones(1, 3)
    assert torch.equal(done.value(x), sent(x))


def test_an_exception_keeps_its_text():
    got = trip(KeyError("missing")).value
    assert type(got) is KeyError
    assert got.args == ("missing",)


# --- one object stays one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [[1], {1: 2}, {3}, bytearray(b"x")], ids=repr)
def test_a_shared_container_stays_one(shared):
    listed, (in_a_tuple,), mapped = trip([shared, (shared,), {"key": shared}]).value
    assert listed == shared
    assert in_a_tuple is listed
    assert mapped["key"] is listed


def test_cycles():
    value: list[Any] = [1]
    value.append({"self": value})
    got = trip(value).value
    assert got[1]["self"] is got


def test_equal_containers_that_are_not_one_stay_two():
    done = trip([[1], [1]])
    assert not done.pickled
    assert done.value[0] is not done.value[1]


@pytest.mark.parametrize("depth", [50, 150, 250])
def test_deep_nests(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    assert trip(value).value == value


def test_a_nest_without_end_is_refused():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError, match="list"):
        trip(value)
    while value:
        value = value.pop()  # to free it at once would overflow the stack


# --- numpy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5),
        np.arange(10_000.0),
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20)[::3],
        np.zeros((0, 3)),
        np.array(5),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([1, "x", None], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("shared_from", [None, 20_000], ids=["socket", "shared memory"])
def test_arrays(array, shared_from):
    got = trip(array, shared_from).value
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert np.array_equal(got, array)
    assert got.flags.writeable


def test_big_arrays_are_not_copied_into_the_pickle():
    array = np.arange(100_000)
    done = trip({"array": array, "same": array})
    assert len(done.packed.body.pickle_buffers) == 1
    assert len(done.packed.stream) == 1
    assert np.shares_memory(np.frombuffer(done.packed.stream[0], np.uint8), array)
    assert done.value["array"] is done.value["same"]


@pytest.mark.parametrize("size", [5, 10_000])
@pytest.mark.parametrize("shared_from", [None, 20_000], ids=["socket", "shared memory"])
def test_read_only_arrays_stay_read_only(size, shared_from):
    array = np.arange(size)
    array.flags.writeable = False
    got = trip(array, shared_from).value
    assert not got.flags.writeable
    assert np.array_equal(got, array)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_all_big_buffers_of_a_pickle_go_through_shared_memory():
    value = Record("x" * 50_000, torch.arange(50_000.0)), np.arange(50_000), {"bytes": bytearray(range(250)) * 400}
    done = trip(value, shared_from=20_000)
    assert done.pickled
    assert done.ways == {"shared memory"}
    assert [type(buffer) for buffer in done.packed.body.buffers] == [InSegment] * len(done.packed.segments)
    record, array, rest = done.value
    assert record.name == value[0].name
    assert torch.equal(record.tensor, value[0].tensor)
    assert np.array_equal(array, value[1])
    assert rest == value[2]


def test_an_array_through_shared_memory_is_a_snapshot():
    array = np.arange(50_000)
    neighbours = Neighbours(limit=20_000)
    packed = pack({"array": array}, Route(1), neighbours.to_segment)
    array[:] = 0
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    got = receive(body, [], borrowed=neighbours.borrow(body))[1]["array"]
    assert np.array_equal(got, np.arange(50_000))
    got[:] = 7
    assert not array.any()


class Subclass(torch.Tensor):
    pass


def test_a_first_attempt_that_failed_leaves_no_segment_behind():
    """The tensor was laid out already when the next one turned out to need a pickle."""
    neighbours = Neighbours(limit=20_000)
    plain, other = torch.arange(50_000.0), torch.ones(3).as_subclass(Subclass)
    packed = pack([plain, other], Route(1), neighbours.to_segment)
    assert packed.body.pickle >= 0
    assert len(packed.segments) == len(neighbours.pool._segments) == 1
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    _, (tensor, subclass) = receive(body, [], borrowed=neighbours.borrow(body))
    assert torch.equal(tensor, plain)
    assert type(subclass) is Subclass


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_a_value_that_cannot_be_sent_leaves_no_segment_behind(allow_pickle):
    neighbours = Neighbours(limit=20_000)
    for unsendable in (threading.Lock(), torch.ones(2).to_mkldnn()):
        value = [torch.arange(50_000.0), np.arange(50_000), unsendable]
        with pytest.raises(TelegradError):
            pack(value, Route(1, allow_pickle), neighbours.to_segment)
    gc.collect()
    assert len(neighbours.pool._segments) == 0


def test_shared_memory_that_is_full_in_the_middle_of_a_value():
    sent = [torch.full((20_000,), float(number)) for number in range(6)]
    neighbours = Neighbours(limit=20_000)

    def to_segment(address, size):
        return neighbours.to_segment(address, size) if len(neighbours.pool._segments) < 3 else None

    packed = pack(sent, Route(1), to_segment)
    assert [type(buffer) for buffer in packed.body.buffers] == [InSegment] * 3 + [int] * 3
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    streamed = [bytearray(memory) for memory in packed.stream]
    _, got = receive(body, streamed, borrowed=neighbours.borrow(body))
    assert all(torch.equal(one, other) for one, other in zip(got, sent, strict=True))


# --- bundles --------------------------------------------------------------------------------------------------------


def bundle_of(*batches, to_segment=None, **route):
    bundle = Bundle(Route(1, **route), to_segment)
    for batch in batches:
        bundle.add(batch)
    return bundle


def opened(bundle, neighbours=None):
    """What the other side makes of a bundle."""
    packed = bundle.packed()
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    streamed = [bytearray(memory) for memory in packed.stream]
    tensors, value = receive(body, streamed, borrowed=neighbours.borrow(body) if neighbours else ())
    assert len(value) == len(tensors)
    assert all(one is other for one, other in zip(value, tensors, strict=True))
    return value


def is_same(one, other):
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    return torch.equal(one.to_dense(), other.to_dense())


def filled(number, size):
    return torch.full((size,), float(number))


SMALL, BIG = 3, INLINE_LIMIT  # floats


@pytest.mark.parametrize(
    "sizes",
    [
        [[SMALL]],
        [[SMALL], [SMALL], [SMALL]],
        [[SMALL, SMALL], [SMALL], [SMALL, SMALL, SMALL]],
        [[BIG], [SMALL], [BIG]],
        [[SMALL, BIG, SMALL], [BIG, SMALL], [0, SMALL], [BIG, BIG]],
    ],
    ids=repr,
)
@pytest.mark.parametrize("shared", [False, True], ids=["socket", "shared memory"])
def test_a_bundle_opens_as_what_was_added_in_that_order(sizes, shared):
    neighbours = Neighbours(limit=INLINE_LIMIT + 1) if shared else None
    numbers = iter(range(100))
    batches = [[filled(next(numbers), size) for size in batch] for batch in sizes]
    bundle = bundle_of(*batches, to_segment=neighbours and neighbours.to_segment)
    sent = [tensor for batch in batches for tensor in batch]
    packed = bundle.packed()
    assert [meta.buffer for meta in packed.body.tensors] == list(range(len(sent))), "each add goes on counting"
    ways = {size: {0: bytes, SMALL: bytes, BIG: InSegment if shared else int}[size] for size in (0, SMALL, BIG)}
    assert [type(buffer) for buffer in packed.body.buffers] == [ways[tensor.numel()] for tensor in sent]
    got = opened(bundle, neighbours)
    assert len(got) == len(sent)
    assert all(map(is_same, got, sent))


def test_a_bundle_needs_neither_a_tree_nor_a_pickle():
    packed = bundle_of([torch.ones(2)], [torch.ones(3)], allow_pickle=False).packed()
    assert packed.body.tree is None
    assert packed.body.pickle == -1


def test_a_bundle_of_nothing_is_the_packed_none():
    assert bundle_of().packed() == bundle_of([]).packed()
    assert bundle_of().packed().body == PACKED_NONE.body
    assert bundle_of().is_small


def test_what_a_bundle_has_can_be_asked_for_before_it_grows():
    bundle = bundle_of([filled(1, SMALL)])
    first = bundle.packed()
    bundle.add([filled(2, SMALL)])
    assert len(first.body.tensors) == len(first.body.buffers) == 1
    assert [tensor[0].item() for tensor in opened(bundle)] == [1.0, 2.0]


def test_a_bundle_is_small_while_all_of_it_goes_inside_the_header():
    bundle = bundle_of([filled(1, INLINE_LIMIT // 4)])
    assert bundle.is_small
    bundle.add([filled(2, SMALL)])
    assert bundle.is_small
    bundle.add([filled(3, SMALL), filled(4, INLINE_LIMIT // 4 + 1)])
    assert not bundle.is_small
    bundle.add([filled(5, SMALL)])
    assert not bundle.is_small


def test_a_bundle_through_shared_memory_is_not_small():
    neighbours = Neighbours(limit=20_000)
    bundle = bundle_of([filled(1, SMALL)], to_segment=neighbours.to_segment)
    assert bundle.is_small
    bundle.add([filled(2, 20_000)])
    assert not bundle.is_small
    assert bundle.packed().stream == []


def test_very_many_small_tensors_do_not_make_a_small_bundle():
    """The budget is that of one header, however many adds share it."""
    whole = torch.ones(INLINE_LIMIT // 4)
    bundle = bundle_of()
    for _ in range(INLINE_BUDGET // INLINE_LIMIT):
        bundle.add([whole])
        assert bundle.is_small
    bundle.add([whole])
    assert not bundle.is_small
    assert sum(len(buffer) for buffer in bundle.packed().body.buffers if not isinstance(buffer, int)) == INLINE_BUDGET


def test_a_bundle_has_what_a_small_tensor_was_when_it_was_added():
    buffer = filled(1, SMALL)
    bundle = bundle_of([buffer])
    bundle.add([buffer.fill_(2)])
    buffer.fill_(3)
    assert [tensor[0].item() for tensor in opened(bundle)] == [1.0, 2.0]


def test_tensors_of_one_add_stay_aliases_and_those_of_two_do_not():
    base = torch.arange(6.0)
    bundle = bundle_of([base, base[2:4]], [base])
    whole, view, again = opened(bundle)
    whole.zero_()
    assert view.tolist() == [0.0, 0.0]
    assert torch.equal(again, base)


KINDS = {
    "small": lambda number: filled(number, 4),
    "big": lambda number: filled(number, BIG),
    "none": lambda number: torch.empty(0, 3),
    "scalar": lambda number: torch.tensor(number),
    "strided": lambda number: filled(number, 12).view(3, 4).t(),
    "sparse": lambda number: torch.sparse_coo_tensor([[0, 2, 2]], filled(number, 3), (4,), check_invariants=True),
    "compressed": lambda number: torch.eye(3).mul(number + 1).to_sparse_csr(),
    "half": lambda number: filled(number, 5).bfloat16(),
    "meta": lambda number: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@given(st.lists(st.lists(st.sampled_from(sorted(KINDS)), max_size=4), max_size=5), st.booleans())
@settings(max_examples=200)
def test_any_tensors_in_any_number_of_adds(kinds, shared):
    neighbours = Neighbours(limit=INLINE_LIMIT + 1) if shared else None
    numbers = iter(range(100))
    batches = [[KINDS[kind](next(numbers)) for kind in batch] for batch in kinds]
    sent = [tensor for batch in batches for tensor in batch]
    bundle = bundle_of(*batches, to_segment=neighbours and neighbours.to_segment)
    assert bundle.is_small == ("big" not in [kind for batch in kinds for kind in batch])
    if not sent:
        assert bundle.packed().body == Body()
        return
    got = opened(bundle, neighbours)
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert (one.device, one.stride() if one.layout is torch.strided else None) == (
            other.device,
            other.stride() if other.layout is torch.strided else None,
        )
        assert one.is_meta or is_same(one, other)


@pytest.mark.parametrize(
    "odd",
    [
        "mkldnn",
        "a subclass",
    ],
)
def test_a_bundle_refuses_what_only_pickle_can_carry_and_keeps_the_rest(odd):
    bad = torch.ones(3).as_subclass(Subclass) if odd == "a subclass" else torch.ones(2).to_mkldnn()
    bundle = bundle_of([filled(1, SMALL)])
    with pytest.raises(SerializationError, match="can only go through pickle"):
        bundle.add([filled(2, SMALL), filled(3, BIG), bad, filled(4, SMALL)])
    bundle.add([filled(5, SMALL), filled(6, BIG)])
    assert [tensor[0].item() for tensor in opened(bundle)] == [1.0, 5.0, 6.0]


def test_the_interceptor_sees_each_add_and_the_first_word_counts():
    seen, words = [], iter([None, [1, "word"], [2, "late"], None])

    def outgoing(to, tensors):
        seen.append((to, [tensor[0].item() for tensor in tensors]))
        return next(words)

    bundle = bundle_of([filled(1, SMALL)], outgoing=outgoing)
    assert bundle.packed().body.extra is None
    bundle.add([filled(2, SMALL), filled(3, SMALL)])
    assert bundle.packed().body.extra == [1, "word"]
    bundle.add([filled(4, SMALL)])
    bundle.add([filled(5, SMALL)])
    assert seen == [(1, [1.0]), (1, [2.0, 3.0]), (1, [4.0]), (1, [5.0])]
    assert bundle.packed().body.extra == [1, "word"]


def test_the_interceptor_does_not_see_a_bundle_that_is_not_recorded():
    bundle = Bundle(Route(1, outgoing=lambda to, tensors: pytest.fail("it was asked")), recorded=False)
    bundle.add([filled(1, SMALL)])
    assert bundle.packed().body.extra is None


# --- functions ------------------------------------------------------------------------------------------------------


def test_lambdas_and_local_functions():
    offset = torch.ones(2)

    def local(x):
        return x + offset

    got, square = trip([local, lambda x: x * x]).value
    assert torch.equal(got(1), offset + 1)
    assert square(3) == 9


def test_a_local_class():
    class Local:
        def __init__(self, x):
            self.x = x

    got = trip(Local([1])).value
    assert got.x == [1]
    assert type(got).__qualname__ == Local.__qualname__


def test_without_cloudpickle_a_lambda_is_refused_by_name():
    with pytest.raises(SerializationError, match=r"cannot send a value of type function: .*<lambda>"):
        trip([lambda: 1], allow_cloudpickle=False)


def test_bound_methods_go_with_their_object():
    got = trip(collections.Counter("aab").most_common).value
    assert got() == [("a", 2), ("b", 1)]


@pytest.fixture
def main_function(monkeypatch):
    """A function of the main program."""
    main = type(sys)("__main__")
    exec("def job(x): return x + 1", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.job


def test_a_function_of_the_same_main_program_goes_by_name(main_function):
    assert trip([main_function]).value[0] is main_function


def test_a_function_of_another_main_program_goes_by_value(main_function, monkeypatch):
    packed = pack([main_function], Route(1, same_main=False))
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    assert receive(body, [])[1][0](1) == 2


def test_a_function_of_another_main_program_is_refused_without_cloudpickle(main_function):
    with pytest.raises(SerializationError, match=r"'job'.*main program"):
        trip([main_function], same_main=False, allow_cloudpickle=False)


def test_a_function_that_the_receiver_does_not_have(main_function, monkeypatch):
    packed = pack([main_function], Route(1))
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    with pytest.raises(SerializationError, match="cannot import 'job' from module '__main__'"):
        receive(body, [])


# --- what cannot be sent or rebuilt ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [threading.Lock(), [threading.Lock()], {"f": sys.stdout}, (x for x in ())], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("allow_cloudpickle", [True, False])
def test_the_error_names_what_cannot_be_pickled(value, allow_cloudpickle):
    with pytest.raises(SerializationError, match=r"cannot send a value of type (lock|EncodedFile|generator): .*\w+"):
        trip(value, allow_cloudpickle=allow_cloudpickle)


def test_the_error_names_the_lock():
    with pytest.raises(SerializationError, match=r"_thread\.lock"):
        trip({"a": [threading.Lock()]})


class Fragile:
    def __reduce__(self):
        return (_break, ())


def _break():
    raise OSError("the disk is gone")


def test_an_object_that_cannot_be_rebuilt():
    with pytest.raises(SerializationError, match="cannot rebuild a value here: OSError: the disk is gone"):
        trip(Fragile())


def test_a_pickle_that_was_cut():
    body = pack(Point(1, 2), Route(1)).body
    with pytest.raises(SerializationError, match="cannot rebuild"):
        unpack(body, [bytearray(body.buffers[0][:-5])], (), (), True)


def test_the_tables_of_an_outer_value_survive_an_inner_one():
    class_of = trip(Nesting(torch.ones(2))).value
    assert torch.equal(class_of.tensor, torch.ones(2))
    assert torch.equal(class_of.inner, torch.zeros(3))


class Nesting:
    """Its rebuilding receives another value, as that of an object with an RPC inside would."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return [Point(1, 2), self.tensor]

    def __setstate__(self, state):
        self.inner = trip(Point(0, torch.zeros(3))).value.y
        self.tensor = state[1]

    def __reduce__(self):
        return (_nesting, (1,), self.__getstate__())


def _nesting(_):
    return Nesting.__new__(Nesting)


# --- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda r: [r], lambda r: Point(1, r)], ids=["plain", "pickled"])
def test_references_ride_beside_the_value(wrap):
    sent = Shared(5)
    done = trip(wrap(sent), rrefs=["the reference"])
    assert "the reference" in done.value
    assert sent.shared_with == [1]
    assert done.body.rrefs == (RRefFork(GlobalId(0, 5), GlobalId(0, 1), 0, 0),)


@pytest.mark.parametrize("bad", [threading.Lock(), lambda: 1], ids=["lock", "lambda"])
def test_a_value_that_cannot_be_sent_shares_no_reference(bad):
    sent = Shared(5)
    with pytest.raises(SerializationError):
        pack([sent, bad], Route(1, allow_cloudpickle=False))
    assert sent.shared_with == []


def test_a_tensor_without_a_device_map_shares_no_reference():
    sent = Shared(5)

    def refuse(_):
        raise UsageError("no map")

    route = Route(1, outgoing=lambda to, tensors: refuse(to))
    with pytest.raises(UsageError, match="no map"):
        pack([sent, torch.ones(2)], route)
    assert sent.shared_with == []


# --- the interceptor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [list, lambda parts: Point(*parts)], ids=["plain", "pickled"])
def test_the_interceptor_sees_the_tensors(wrap):
    seen = []
    tensors = [torch.ones(2), torch.zeros(3)]
    route = Route(1, outgoing=lambda to, found: seen.append((to, found)) or [7, "extra"])
    body = pack(wrap(tensors), route).body
    ((to, found),) = seen
    assert to == 1
    assert all(map(torch.equal, found, tensors))
    assert body.extra == [7, "extra"]
    assert pack([1, 2], route).body.extra == [7, "extra"]
    assert seen[1:] == [(1, [])], "it sees every body, also one without tensors"


# --- without pickle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Point(1, 2), Colour.RED, np.arange(3), print, object(), 2**64, "\ud800"], ids=repr)
def test_without_pickle_only_plain_data_go_out(value):
    for wrapped, path in ((value, ()), ([1, {"key": value}], ("[1]", "['key']"))):
        with pytest.raises(
            SerializationError, match=rf"type {type(value).__qualname__} without pickle \(allow_pickle=False\)"
        ) as caught:
            trip(wrapped, allow_pickle=False)
        assert caught.value.path == path


class Holder:
    def __init__(self, content):
        self.number = 1
        self.content = content


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda bad: bad, ()),
        (lambda bad: [1, torch.ones(1), bad], ("[2]",)),
        (lambda bad: {"a": ({2: bad},)}, ("['a']", "[0]", "[2]")),
        (lambda bad: (Holder([bad]), Holder(2)), ("[0]", ".content", "[0]")),
    ],
    ids=["alone", "list", "dict", "object"],
)
def test_the_error_says_which_part_of_a_value_cannot_be_sent(wrap, path):
    with pytest.raises(SerializationError, match=r"type lock: cannot pickle '_thread.lock' object") as caught:
        trip(wrap(threading.Lock()))
    assert caught.value.path == path


def test_without_pickle_tensors_go_out():
    done = trip({"x": [torch.ones(2), torch.nn.Parameter(torch.ones(20_000))]}, allow_pickle=False)
    assert torch.equal(done.value["x"][0], torch.ones(2))


def test_without_pickle_no_pickle_comes_in():
    packed = pack(Point(1, 2), Route(1))
    with pytest.raises(SerializationError, match=r"takes none \(allow_pickle=False\)"):
        receive(packed.body, [], allow_pickle=False)


# --- malformed trees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        Node(-1, []),
        Node(999, []),
        Node(0, [Node(999, [])]),
        Node(2, [1]),  # a key without a value
        Node(2, [Node(0, []), 1]),  # a list for a key
        Node(3, [Node(0, [])]),
        Node(4, [Node(2, [])]),
        Node(5, []),
        Node(5, [0]),
        Node(5, ["0"]),
        Node(6, [0]),
        Node(7, []),
        Node(7, ["1", "2"]),
        Node(8, [999]),
        Node(8, [1.5]),
        Node(9, ["nowhere"]),
        Node(9, [None]),
        Node(10, ["x"]),
        Node(11, []),
        Node(11, [10**12]),  # as many zeros
        Node(11, ["text"]),
        Node(12, []),
        Node(12, [1, 2, 3, 4]),
        Node(14, [1, 2, 0]),
        Node(14, [1.5]),
        Node(15, []),
        Node(0, [Ext(1, b"")]),
    ],
    ids=repr,
)
def test_malformed_trees_are_refused(tree):
    with pytest.raises(SerializationError, match="a body holds"):
        unpack(Body(tree), [], (), (), False)


def test_a_tree_nested_without_end_is_refused():
    tree = Node(0, [])
    for _ in range(50_000):
        tree = Node(0, [tree])
    with pytest.raises(SerializationError, match="nested"):
        unpack(Body(tree), [], (), (), False)
    while tree.parts:
        tree = tree.parts.pop()


# --- keys that collide ----------------------------------------------------------------------------------------------


def colliding(count):
    """Tuples with one hash: -1 and -2 have the same."""
    return list(itertools.islice(itertools.product((-1, -2), repeat=17), count))


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset], ids=["dict", "set", "frozenset"])
def test_keys_that_collide_are_refused_before_they_cost_much(kind):
    keys = colliding(20_000)
    assert len({hash(key) for key in keys}) == 1
    tag = {dict.fromkeys: 2, set: 3, frozenset: 4}[kind]
    parts = [Node(1, list(key)) for key in keys]
    if kind is dict.fromkeys:
        parts = [part for key in parts for part in (key, None)]
    body = codec.decode(codec.encode(Reply(1, Body(Node(tag, parts))))).body
    with pytest.raises(SerializationError, match="keys of a dict or set collide"):
        unpack(body, [], (), (), False)


@pytest.mark.parametrize(
    "keys",
    [
        range(200_000),
        [number * 2**20 for number in range(50_000)],
        [number / 7 for number in range(50_000)],
        [(row, column) for row in range(200) for column in range(200)],
        [str(number) for number in range(50_000)],
        [b"%d" % number for number in range(50_000)],
        colliding(100),
    ],
    ids=["numbers", "multiples", "floats", "pairs", "text", "bytes", "few that collide"],
)
def test_many_keys_of_honest_programs_go(keys):
    value = {"dict": dict.fromkeys(keys, 1), "set": set(keys), "frozenset": frozenset(keys)}
    came = trip(value)
    assert not came.pickled
    assert came.value == value
    assert list(came.value["dict"]) == list(keys)


def decoded(tree):
    return codec.decode(codec.encode(Reply(1, Body(tree)))).body


def set_of_frozensets(sets, keys):
    """All of them with one hash, and different in their last element."""
    pool = [Node(1, [0] * 40 + list(key)) for key in colliding(sets + keys)]
    return [Node(4, [*pool[: keys - 1], pool[keys - 1 + number]]) for number in range(sets)]


@pytest.mark.parametrize("tag", [2, 3, 4], ids=["dict", "set", "frozenset"])
def test_small_sets_that_collide_are_refused_when_they_are_many_in_one_message(tag):
    """Each has fewer than 128 elements, and each alone is quick to build."""
    inner = set_of_frozensets(126, 126)
    assert len(unpack(decoded(inner[0]), [], (), (), False)) == 126
    parts = [part for key in inner for part in (key, None)] if tag == 2 else inner
    with pytest.raises(SerializationError, match="keys of a dict or set collide"):
        unpack(decoded(Node(tag, parts)), [], (), (), False)


NESTED_SETS = {
    "set": {frozenset({frozenset({1})})},
    "frozenset": frozenset({frozenset({frozenset({1})})}),
    "dict": {frozenset({frozenset({1})}): 1},
    "by tuples": {(1, (frozenset({(2, frozenset({1}))}),))},
}


@pytest.mark.parametrize("value", NESTED_SETS.values(), ids=NESTED_SETS)
def test_sets_of_sets_inside_a_set_go_by_pickle_only(value):
    """Comparing two of them can take far longer than building them."""
    done = trip(value)
    assert done.pickled
    assert done.value == value
    with pytest.raises(SerializationError, match="without pickle"):
        trip(value, allow_pickle=False)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: Node(3, [inner]),
        lambda inner: Node(4, [inner]),
        lambda inner: Node(2, [inner, None]),
        lambda inner: Node(3, [Node(1, [1, inner])]),
    ],
    ids=["set", "frozenset", "dict", "set of tuples"],
)
def test_sets_of_sets_inside_a_set_are_refused(wrap):
    tree = wrap(Node(4, [Node(4, [1])]))
    with pytest.raises(SerializationError, match="more than 2 sets inside each other"):
        unpack(decoded(tree), [], (), (), False)


HONEST_NESTS = {
    "frozensets of tuples": {frozenset({(row, column), (column, row)}) for row in range(100) for column in range(100)},
    "dict of frozensets": {frozenset({row, "x"}): frozenset({frozenset({row})}) for row in range(1_000)},
    "tuples of tuples": {((row, (column, ("x",))), 1.5): row for row in range(100) for column in range(100)},
    "long tuples": {tuple(range(row, row + 5_000)) for row in range(300)},
    "many small dicts": [{(row, column): 1 for column in range(5)} for row in range(10_000)],
    "long text": {f"{number}" * 20_000: number for number in range(1_000)},
    "values in a dict": {"a": {"b": {"c": {"d": {frozenset({1}): {2}}}}}},
}


@pytest.mark.parametrize("value", HONEST_NESTS.values(), ids=HONEST_NESTS)
def test_nested_keys_of_honest_programs_go(value):
    done = trip(value, allow_pickle=False)
    assert done.value == value


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_codec_itself_builds_no_dict(depth):
    """It would do so before anything could be checked."""
    tree: Any = {1: 2}
    for _ in range(depth):
        tree = [0, [tree]]
    for body in ([tree], [None, -1, [], [], [], [], tree], [None, -1, [], [], [], [], [1, 1, [tree]]]):
        with pytest.raises(ProtocolError):
            codec.decode(msgspec.msgpack.encode([4, 1, body]))


@pytest.mark.parametrize(
    ("body", "buffers"),
    [
        (Body(pickle=5), []),
        (Body(pickle=0), [b""]),
        (Body(pickle=0), [7]),
        (Body(pickle=0, pickle_buffers=(3,)), [pickle.dumps(1)]),
    ],
)
def test_malformed_pickles_are_refused(body, buffers):
    with pytest.raises(SerializationError):
        unpack(body, buffers, (), (), True)


# --- fuzz -----------------------------------------------------------------------------------------------------------


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    """A pickle that would make a directory, and proof that it would; then the test that nobody ran it."""
    path = str(tmp_path_factory.mktemp("canary") / "sang")
    pickled = pickle.dumps(Canary(path), 5)
    pickle.loads(pickled)
    os.rmdir(path)
    yield pickled
    assert not os.path.exists(path), "a pickle was run although pickle is switched off"


def take_in(body, streamed=()):
    """As the agent does it, of a worker without pickle."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        buffers = codec.complete(body, list(streamed), [])
        tensors = unpack_tensors(body.tensors, buffers)
        values.unpack(body, buffers, (), tensors, False)
    except TelegradError:
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "256 MiB for a few bytes"


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-2, 16)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.builds(Ext, st.integers(-1, 1), st.binary(max_size=5))
    | st.sampled_from(["cpu", "cuda:0", "builtins:eval"])
)
nodes = st.recursive(
    leaves,
    lambda inner: st.builds(Node, st.integers(-1, 16), st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(nodes, st.integers(-2, 3), st.lists(st.integers(-1, 3), max_size=2).map(tuple), st.booleans())
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_trees(canary, tree, index, pickle_buffers, with_tensor):
    tensors = (TensorMeta(0, (1,), 1),) if with_tensor else ()
    body = Body(tree, index, pickle_buffers, (bytearray(canary), bytearray(4)), tensors)
    try:
        body = codec.decode(codec.encode(Reply(1, body))).body
    except TelegradError:
        return
    take_in(body)


@functools.cache
def packed_values(pickled):
    """Marshal of plain data, and one that holds the canary where a pickle belongs."""
    parts = [[1, {"a": (2.5, None), "b": {1, 2}}], [torch.ones(2), torch.ones(3, 4).t(), slice(1, 2)], list(PLAIN)]
    bodies = [pack(part, Route(1)).body for part in parts]
    bodies.append(Body(None, 0, (), (pickled,)))
    bodies.append(Body(Node(0, [Ext(0, pickled)]), -1, (0,), (pickled, 5)))
    return [codec.encode(Reply(1, body)) for body in bodies]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), max_size=5),
    st.lists(st.binary(max_size=20), max_size=2),
)
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_mutated_bodies(canary, which, edits, streamed):
    data = bytearray(packed_values(canary)[which])
    for position, byte in edits:
        data[position % len(data)] = byte
    try:
        message = codec.decode(data)
    except TelegradError:
        return
    if isinstance(getattr(message, "body", None), Body):
        take_in(message.body, streamed)


@given(st.binary(max_size=60))
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_random_trees(canary, data):
    try:
        tree = msgspec.msgpack.decode(data, type=Tree)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return
    take_in(Body(tree, -1, (), (bytearray(canary),)))
