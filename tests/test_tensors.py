"""Tensors on the wire: every kind comes back equal, aliases stay aliases, only the viewed bytes travel, and a malformed
description is refused before it reaches memory that is not the message's."""

from __future__ import annotations

import functools
import gc
import math
import resource
import warnings
import weakref

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._wire import codec, tensors, unpack_tensors, values
from telegrad._wire.messages import Body, InSegment, Reply, TensorMeta
from telegrad._wire.tensors import DTYPE_CODES, INLINE_BUDGET, INLINE_LIMIT, OutgoingBuffers, in_table, no_device_map
from telegrad.errors import SerializationError, TelegradError, UsageError
from wire_trip import FUZZ_EXAMPLES, Neighbours, receive, trip

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)} - QUANTIZED, key=str)

# torch is about to drop quantised tensors and says so; programs that still have them may send them.
quiet_quantised = pytest.mark.filterwarnings("ignore:.*(quantize|quantiz|deprecat).*:UserWarning")
quiet_sparse = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


def bytes_of(tensor):
    """The elements' bytes in order, by no operator of the dtype, for torch has few of them for some dtypes."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    shape, stride = (*tensor.shape, tensor.itemsize), (*(step * tensor.itemsize for step in tensor.stride()), 1)
    return raw.as_strided(shape, stride, tensor.storage_offset() * tensor.itemsize).numpy().tobytes()


def random_tensor(dtype, *shape):
    """Random bytes; bools that are bools."""
    size = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape)


def assert_same(got, sent):
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.layout, got.device) == (sent.dtype, sent.shape, sent.layout, sent.device)
    assert got.requires_grad == sent.requires_grad
    assert bytes_of(got) == bytes_of(sent)


def assert_trip(sent, **options):
    done = trip(sent, **options)
    assert not done.pickled
    assert_same(done.value, sent)
    return done


# --- dtypes and shapes ----------------------------------------------------------------------------------------------


def test_every_dtype_has_a_code():
    assert set(DTYPES) | QUANTIZED == set(DTYPE_CODES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3), (64, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, shape):
    assert_trip(random_tensor(dtype, *shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_with_strides(dtype):
    sent = random_tensor(dtype, 3, 4).t()
    done = assert_trip(sent)
    assert done.value.stride() == sent.stride()


def test_what_comes_is_writable_and_ones_own():
    for size in (4, 10_000):
        sent = torch.arange(float(size))
        got = trip(sent).value
        got.add_(1)
        assert got[0] == 1
        assert sent[0] == 0


def test_nan_and_signed_zero_keep_their_bits():
    assert_trip(torch.tensor([math.nan, -math.nan, 0.0, -0.0, math.inf, -math.inf]))


# --- views ----------------------------------------------------------------------------------------------------------

BASE = torch.arange(24 * 40, dtype=torch.float32).reshape(24, 40)


@pytest.mark.parametrize(
    ("view", "elements"),
    [
        (BASE.t(), 960),
        (BASE[3], 40),
        (BASE[2:4], 80),
        (BASE[:, 5], 24),
        (BASE[::2, ::4], 120),
        (BASE[1:1], 0),
        (BASE.reshape(2, 12, 40).permute(2, 0, 1), 960),
        (BASE.reshape(2, 3, 4, 40).contiguous(memory_format=torch.channels_last), 960),
        (BASE[0, 0].expand(7, 1000), 1),
        (BASE[0].expand(100, 40), 40),
        (BASE.unfold(1, 3, 1), 960),
        (BASE[4, 7], 1),
    ],
    ids="transpose row rows column steps empty permute channels_last scalar expand unfold item".split(),
)
def test_only_the_viewed_bytes_travel(view, elements):
    done = assert_trip(view)
    assert done.bytes_sent == elements * 4


def test_channels_last_stays_channels_last():
    sent = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert trip(sent).value.is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_tensor_stays_expanded():
    assert trip(torch.ones(1).expand(10**9)).value.stride() == (0,)


def gradient_of_sum():
    seen = []
    leaf = torch.ones(3, 4, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(gradient))
    leaf.sum().backward()
    return seen[0]


EXPANDED = {
    "gradient": gradient_of_sum(),
    "one row": torch.tensor(2.0).expand(1, 5),
    "from the middle": torch.arange(9.0)[4].expand(2, 3),
    "int8": torch.tensor(7, dtype=torch.int8).expand(4),
    "needs a gradient": torch.tensor(2.0).expand(4).requires_grad_(),
    "parameter": torch.nn.Parameter(torch.tensor(2.0).expand(4)),
    "all inline bytes used up": torch.tensor(3.0).expand(6),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_an_expanded_scalar_is_described_without_a_question_and_as_any_strided_tensor(name, monkeypatch):
    """The fast path gives what the general one gives, so receivers cannot tell them apart."""

    def packed():
        out = OutgoingBuffers(budget=0 if "used up" in name else INLINE_BUDGET)
        metas = tensors.pack([EXPANDED[name]], out, no_device_map)
        return metas, out.buffers, [bytes(memory) for memory in out.stream]

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "in_table", lambda tensor: pytest.fail("it left the fast path"))
        quick = packed()
    monkeypatch.setattr(tensors, "NUMPY_CODES", {})
    assert quick == packed()
    got = trip([EXPANDED[name]]).value[0]
    assert_same(got, EXPANDED[name])
    assert got.untyped_storage().nbytes() == got.itemsize
    assert not got._is_view()


def test_an_expanded_tensor_and_its_base_share_one_buffer():
    base = torch.tensor([1.0])
    got_base, got = trip([base, base.expand(5)]).value
    got_base.fill_(7)
    assert got.tolist() == [7.0] * 5
    assert got.untyped_storage()._cdata == got_base.untyped_storage()._cdata


# --- bits and marks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5_000])
def test_conjugate_and_negative_bits(size):
    numbers = torch.randn(size, dtype=torch.complex64)
    for sent in (numbers.conj(), numbers.conj().imag, torch._neg_view(numbers).conj()):
        got = trip(sent).value
        assert (got.is_conj(), got.is_neg()) == (sent.is_conj(), sent.is_neg())
        assert torch.equal(got, sent)


def test_parameters_and_gradients():
    for sent in (
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.nn.Parameter(torch.ones(3, 4).t()),
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.ones(10_000, requires_grad=True),
        torch.ones(3, dtype=torch.complex64, requires_grad=True).conj(),
    ):
        got = assert_trip(sent).value
        assert got.is_leaf
        assert got.grad is None


def test_inference_tensors():
    with torch.inference_mode():
        sent = [torch.ones(2), torch.ones(5_000)]
    for tensor in sent:
        assert_trip(tensor)


def test_meta_tensors_have_no_bytes():
    sent = torch.nn.Parameter(torch.empty(1000, 1000, 1000, device="meta").transpose(0, 2))
    done = trip(sent)
    assert done.bytes_sent == 0
    assert done.value.is_meta
    assert type(done.value) is torch.nn.Parameter
    assert (done.value.shape, done.value.stride()) == (sent.shape, sent.stride())


def test_a_tensor_elsewhere_needs_a_device_map():
    class Elsewhere:
        dtype, layout, requires_grad, is_nested, is_mkldnn, is_quantized = torch.float32, torch.strided, *[False] * 4
        is_cpu, is_meta, device = False, False, torch.device("cuda", 1)

        def is_contiguous(self):
            return False

        @property
        def data(self):
            return self

        def numpy(self):
            raise TypeError("can't convert cuda:1 device type tensor to numpy")

        def cpu(self):
            return torch.ones(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "TABLE_TYPES", (Elsewhere,))
        with pytest.raises(UsageError, match=r"cuda:1.*device map"):
            tensors.pack([Elsewhere()], OutgoingBuffers(), no_device_map)
        (meta,) = tensors.pack([Elsewhere()], OutgoingBuffers(), lambda device: f"cuda:{device.index + 1}")
    assert meta.device == "cuda:2"


# --- sparse and quantised -------------------------------------------------------------------------------------------


coo = functools.partial(torch.sparse_coo_tensor, check_invariants=True)


def sparse_example():
    dense = torch.zeros(6, 8)
    dense[0, 1] = dense[3, 4] = dense[5, 7] = 2.5
    return dense


@quiet_sparse
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse(layout, big):
    dense = torch.kron(torch.eye(40), torch.ones(24, 12)) if big else sparse_example()
    block = {"blocksize": (2, 4)} if layout.startswith("bs") else {}
    sent = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)
    done = trip(sent)
    assert not done.pickled
    assert done.value.layout is sent.layout
    assert done.value.shape == sent.shape
    assert torch.equal(done.value.to_dense(), dense)
    assert ("stream" in done.ways) == big


@pytest.mark.parametrize("coalesced", [True, False])
def test_coo_keeps_whether_it_is_coalesced(coalesced):
    sent = coo([[0, 0, 1], [2, 2, 0]], [1.0, 2.0, 3.0], (3, 4))
    sent = sent.coalesce() if coalesced else sent
    got = trip(sent).value
    assert got.is_coalesced() == coalesced
    assert got._nnz() == sent._nnz()
    assert torch.equal(got.to_dense(), sent.to_dense())


@pytest.mark.parametrize(
    "sent",
    [
        coo(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 4)),
        coo([[0, 2]], torch.ones(2, 3), (4, 3)),  # with a dense dimension
        coo([[0, 1, 2]], torch.ones(1).expand(3), (3,)),  # over repeated values
        coo([[1]], [1.0], (3,)).requires_grad_(),
        coo([[1], [1]], torch.ones(1, dtype=torch.bfloat16), (10**9, 10**9)),
    ],
    ids="empty hybrid expanded grad huge".split(),
)
def test_unusual_coo(sent):
    got = trip(sent).value
    assert (got.shape, got.dtype, got.requires_grad) == (sent.shape, sent.dtype, sent.requires_grad)
    assert torch.equal(got.detach()._indices(), sent.detach()._indices())
    assert torch.equal(got.detach()._values(), sent.detach()._values())


def quantised(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


@quiet_quantised
@pytest.mark.parametrize("shape", [(3, 4), (64, 400), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantised_per_tensor(dtype, shape):
    sent = quantised(torch.quantize_per_tensor, torch.rand(*shape), 0.02, 7, dtype)
    done = trip(sent)
    got = done.value
    assert not done.pickled
    assert (got.dtype, got.qscheme(), got.q_scale(), got.q_zero_point()) == (dtype, torch.per_tensor_affine, 0.02, 7)
    assert torch.equal(got.int_repr(), sent.int_repr())


@quiet_quantised
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zeros", [torch.arange(3), torch.rand(3)], ids=["integer zeros", "float zeros"])
def test_quantised_per_channel(axis, zeros):
    values = torch.rand(3, 4) if axis == 0 else torch.rand(4, 3)
    sent = quantised(torch.quantize_per_channel, values, torch.tensor([0.1, 0.2, 0.3]), zeros, axis, torch.quint8)
    done = trip(sent)
    got = done.value
    assert not done.pickled
    assert (got.dtype, got.qscheme(), got.q_per_channel_axis()) == (torch.quint8, sent.qscheme(), axis)
    assert torch.equal(got.q_per_channel_scales(), sent.q_per_channel_scales())
    assert torch.equal(got.q_per_channel_zero_points(), sent.q_per_channel_zero_points())
    assert torch.equal(got.dequantize(), sent.dequantize())


@quiet_quantised
def test_sub_byte_quantised_tensors_are_left_to_pickle():
    sent = quantised(torch.quantize_per_channel, torch.rand(3, 4), torch.rand(3), torch.zeros(3), 0, torch.quint4x2)
    assert not in_table(sent)
    done = trip(sent)
    assert done.pickled
    assert torch.equal(done.value.dequantize(), sent.dequantize())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_left_to_pickle():
    sent = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    done = trip([sent, sent.detach(), torch.ones(2)])
    assert done.pickled
    assert [part.tolist() for part in done.value[0].unbind()] == [[1, 1], [1, 1, 1]]


def test_mkldnn_tensors_are_refused():
    with pytest.raises(SerializationError, match="Tensor"):
        trip(torch.ones(3).to_mkldnn())


def test_subclasses_are_left_to_pickle():
    class_of = trip(torch.ones(2).as_subclass(Sub)).value
    assert type(class_of) is Sub


class Sub(torch.Tensor):
    pass


# --- aliasing -------------------------------------------------------------------------------------------------------


def test_one_tensor_sent_twice_is_one():
    tensor = torch.ones(3)
    done = trip([tensor, (tensor, {"again": tensor})])
    first, (second, others) = done.value
    assert first is second
    assert first is others["again"]
    assert len(done.tensors) == 1


@pytest.mark.parametrize("size", [40, 100_000], ids=["inline", "stream"])
@pytest.mark.parametrize("shared_from", [None, 100_000], ids=["socket", "shared memory"])
def test_overlapping_views_overlap_there_too(size, shared_from):
    base = torch.zeros(size)
    done = trip([base[: size // 2 + 5], base[size // 2 - 5 :], base.detach()], shared_from)
    left, right, whole = done.value
    assert len(done.packed.body.buffers) == 1
    assert done.bytes_sent == base.nbytes
    right[0] = 7
    assert left[-10] == 7
    assert whole[size // 2 - 5] == 7
    assert base.sum() == 0


def test_aliases_of_different_dtypes():
    base = torch.arange(8, dtype=torch.float64)
    number, bits, raw, half = trip(
        [base[2:6], base.view(torch.int64)[4:7], base.view(torch.uint8)[9:39], base[1]]
    ).value
    assert_same(number, base[2:6])
    assert_same(bits, base.view(torch.int64)[4:7])
    assert_same(raw, base.view(torch.uint8)[9:39])
    assert_same(half, base[1])
    number[2] = -1.0
    assert bits[0] == torch.tensor(-1.0, dtype=torch.float64).view(torch.int64)
    raw[0:7] = 0xFF
    assert half.isnan()


@pytest.mark.parametrize("order", [1, -1])
def test_aliases_are_ordered_by_bytes(order):
    """The narrow one begins first in bytes, although its offset counts more elements."""
    base = torch.arange(4, dtype=torch.float64)
    sent = [base[2:4], base.view(torch.uint8)[8:20]][::order]
    for got, expected in zip(trip(sent).value, sent, strict=True):
        assert_same(got, expected)


def test_views_with_bits_and_marks_alias():
    base = torch.randn(6, dtype=torch.complex64)
    sent = [base, base.conj(), base[2:].conj().imag, torch.nn.Parameter(base[1:3]), base[3:].requires_grad_()]
    got = trip(sent).value
    for one, other in zip(got, sent, strict=True):
        assert type(one) is type(other)
        assert (one.is_conj(), one.is_neg(), one.requires_grad) == (
            other.is_conj(),
            other.is_neg(),
            other.requires_grad,
        )
        assert torch.equal(one.detach(), other.detach())
    got[0][2] = 5 + 3j
    assert got[1][2] == 5 - 3j
    assert got[2][0] == -3


def test_views_apart_do_not_send_what_lies_between():
    base = torch.arange(1_000_000.0)
    done = trip([base[:10], base[500_000:500_010], base[-1]])
    assert done.bytes_sent == 21 * 4
    for got, sent in zip(done.value, [base[:10], base[500_000:500_010], base[-1]], strict=True):
        assert_same(got, sent)


def test_touching_views_do_not_alias_and_overlapping_neighbours_do():
    base = torch.arange(30.0)
    done = trip([base[0:10], base[10:20], base[15:25]])
    assert done.bytes_sent == 25 * 4
    assert len(done.packed.body.buffers) == 2


def test_empty_views_beside_full_ones():
    base = torch.arange(5.0)
    for got, sent in zip(trip([base[2:2], base, base[5:]]).value, [base[2:2], base, base[5:]], strict=True):
        assert_same(got, sent)


@quiet_sparse
def test_mixed_company():
    base = torch.arange(12.0).reshape(3, 4)
    sent = [
        base,
        base.t(),
        torch.empty(2, device="meta"),
        base.to_sparse(),
        base.to_sparse_csr(),
        torch.ones(0),
        base[1],
    ]
    got = trip(sent).value
    assert torch.equal(got[0], base)
    assert torch.equal(got[1], base.t())
    assert got[2].is_meta
    assert torch.equal(got[3].to_dense(), base)
    assert torch.equal(got[4].to_dense(), base)
    got[6].zero_()
    assert got[0][1].sum() == 0
    assert got[1][:, 1].sum() == 0


# --- the three ways -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (INLINE_LIMIT, "inline"),
        (INLINE_LIMIT + 1, "stream"),
        (99_999, "stream"),
        (100_000, "shared memory"),
        (9 << 20, "shared memory"),
    ],
)
def test_small_middle_and_big_buffers(size, way):
    sent = random_tensor(torch.uint8, size)
    done = assert_trip(sent, shared_from=100_000)
    assert done.ways == {way}
    assert [segment.size >= size for segment in done.packed.segments] == [True] * (way == "shared memory")
    assert len(done.packed.stream) == (way == "stream")


def test_without_shared_memory_the_biggest_go_by_stream():
    assert assert_trip(torch.zeros(100_000)).ways == {"stream"}


@pytest.mark.parametrize(
    "view", [BASE.t(), torch.rand(300, 400)[5:, ::3], torch.randn(400, dtype=torch.complex64).conj()]
)
def test_views_through_shared_memory(view):
    done = trip(view, shared_from=1)
    assert done.ways <= {"shared memory", "inline"}
    assert torch.equal(done.value, view)


@quiet_sparse
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_the_parts_of_a_sparse_tensor_through_shared_memory(kind):
    value = getattr(torch.ones(200, 200), kind)()
    done = trip(value, shared_from=1)
    assert "shared memory" in done.ways
    assert torch.equal(done.value.to_dense(), value.to_dense())


def test_each_buffer_goes_its_own_way():
    sent = [random_tensor(torch.uint8, size) for size in (10, 50_000, 200_000, 20, 200_001, 60_000)]
    done = trip(sent, shared_from=100_000)
    kinds = [type(buffer) for buffer in done.packed.body.buffers]
    assert kinds == [bytes, int, InSegment, bytes, InSegment, int]
    for got, expected in zip(done.value, sent, strict=True):
        assert_same(got, expected)


def test_what_went_through_shared_memory_is_a_snapshot_and_needs_the_original_no_more():
    neighbours = Neighbours(limit=10_000)
    tensor = torch.arange(100_000.0)
    gone = weakref.ref(tensor)
    packed = values.pack([tensor], values.Route(1), neighbours.to_segment)
    tensor.zero_()
    del tensor
    assert gone() is None
    body = codec.decode(codec.encode(Reply(1, packed.body))).body
    _, (got,) = receive(body, [], borrowed=neighbours.borrow(body))
    assert torch.equal(got, torch.arange(100_000.0))


@pytest.mark.parametrize("make", [lambda: torch.arange(99_999.0), lambda: torch.arange(99_999.0)[::3]])
def test_what_is_still_to_be_sent_is_kept_alive(make):
    packed = values.pack([make()], values.Route(1))
    gc.collect()
    assert b"".join(packed.stream) == make().numpy().tobytes()


def test_shared_memory_that_takes_nothing_leaves_all_to_the_socket():
    asked = []
    tensor = torch.arange(100_000.0)
    out = OutgoingBuffers(lambda address, size: asked.append((address, size)))
    assert out.add_array(tensor.numpy()) == 0
    assert out.add(b"small") == 1
    assert out.add(bytes(range(256)) * 200) == 2
    assert asked[0] == (tensor.data_ptr(), 400_000)
    assert [size for _, size in asked] == [400_000, 51_200], "nobody asks for what rides in the header"
    assert out.buffers == [400_000, b"small", 51_200]
    assert out.segments == []
    assert [memory.nbytes for memory in out.stream] == [400_000, 51_200]


def test_small_buffers_beyond_the_headers_budget_go_another_way():
    """Shared memory is asked for them too, and has a limit of its own."""
    asked = []
    out = OutgoingBuffers(lambda _, size: asked.append(size))
    for _ in range(INLINE_BUDGET // INLINE_LIMIT + 3):
        out.add(bytes(INLINE_LIMIT))
    assert asked == [INLINE_LIMIT] * 3
    assert len(out.stream) == 3
    out.add(b"")
    assert out.buffers[-1] == b""


def test_a_region_that_several_share_goes_into_one_segment():
    base = torch.arange(100_000.0)
    done = trip([base[:60_000], base[40_000:], base[::2]], shared_from=1000)
    assert len(done.packed.segments) == 1
    left, right, even = done.value
    right[0] = -1
    assert left[40_000] == even[20_000] == -1


def test_what_came_through_shared_memory_can_be_changed_and_outlives_its_pool():
    tensor = torch.arange(100_000.0)
    got = trip(tensor, shared_from=1000).value
    gc.collect()
    got += 1
    assert torch.equal(got, tensor + 1)


def test_received_memory_is_used_as_it_is():
    """Unpacking copies nothing: the tensor lies in the buffer that came."""
    for dtype, stride in ((FLOAT, None), (HALF, None), (FLOAT, (1,))):
        memory = np.zeros(16, np.uint8)
        (tensor,) = unpack_tensors.unpack(
            [TensorMeta(dtype, (16 // unpack_tensors.DTYPES[dtype].itemsize,), 0, stride)], [memory]
        )
        assert tensor.data_ptr() == memory.ctypes.data


# --- any strides at all ---------------------------------------------------------------------------------------------

PLAIN_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@st.composite
def strided(draw):
    dtype = draw(st.sampled_from(PLAIN_DTYPES))
    dims = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4))
    offset = draw(st.integers(0, 9))
    shape, stride = [size for size, _ in dims], [step for _, step in dims]
    base = draw(st.sampled_from([random_tensor(dtype, 300), random_tensor(dtype, 6_000)]))
    return base.as_strided(shape, stride, offset if base.numel() == 300 else offset * 100)


@given(strided(), st.sampled_from([None, 1]))
@settings(max_examples=200)
def test_any_strides(sent, shared_from):
    done = assert_trip(sent, shared_from=shared_from)
    assert done.bytes_sent <= sent.numel() * sent.itemsize


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.sampled_from(PLAIN_DTYPES)), min_size=2, max_size=5)
)
@settings(max_examples=200)
def test_any_overlaps(pieces):
    """Pieces of one storage come back equal, and alias exactly where they did."""
    base = torch.arange(64, dtype=torch.float64)
    base.view(torch.uint8)[:] = torch.arange(512, dtype=torch.int64).to(torch.uint8) & 1
    sent = []
    for start, length, dtype in pieces:
        whole = base.view(dtype) if dtype.itemsize <= 8 else base
        sent.append(whole[start % whole.numel() :][:length])
    got = trip(sent).value
    for one, other in zip(got, sent, strict=True):
        assert_same(one, other)
    for index, one in enumerate(sent):
        for far, other in zip(got[index + 1 :], sent[index + 1 :], strict=True):
            if overlap(one, other):
                assert (got[index].data_ptr() - far.data_ptr()) == (one.data_ptr() - other.data_ptr())


def overlap(one, other):
    (a, b), (c, d) = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (one, other)]
    return max(a, c) < min(b, d)


# --- malformed descriptions -----------------------------------------------------------------------------------------

FLOAT, DOUBLE, HALF, LONG, CHAR = (
    DTYPE_CODES[dtype] for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8)
)
QINT8, FLOAT8 = DTYPE_CODES[torch.qint8], DTYPE_CODES[torch.float8_e8m0fnu]
STRIDED, COO, COMPRESSED, QUANT, CHANNELS, META = range(6)


def composite(layout, shape, *parts, dtype=FLOAT, scalars=()):
    return TensorMeta(dtype, shape, -1, None, 0, 0, layout, parts, scalars)


LONGS, CHARS, FLOATS = TensorMeta(LONG, (2, 1), 0), TensorMeta(CHAR, (4, 2), 0), TensorMeta(FLOAT, (1,), 1)
ONE_DOUBLE, ONE_LONG = TensorMeta(DOUBLE, (1,), 0), TensorMeta(LONG, (1,), 0)

MALFORMED = {
    "shape beyond the buffer": TensorMeta(FLOAT, (5,), 0),
    "shape far beyond": TensorMeta(FLOAT, (2**40,), 0),
    "shape that overflows": TensorMeta(FLOAT, (2**62, 4), 0),
    "shape beyond 64 bits": TensorMeta(FLOAT, (2**70,), 0),
    "repeated far too often": TensorMeta(FLOAT, (2**62,), 0, (0,)),
    "repeated by overlapping": TensorMeta(FLOAT, (2,) * 42, 0, (1,) * 2 + (0,) * 40),
    "no bytes": TensorMeta(FLOAT, (4,), 2),
    "no bytes, half": TensorMeta(HALF, (4,), 2),
    "half beyond": TensorMeta(HALF, (9,), 0),
    "half far beyond": TensorMeta(HALF, (2**50, 2**10), 0),
    "half, odd bytes": TensorMeta(HALF, (2,), 3),
    "float8 beyond": TensorMeta(FLOAT8, (17,), 0),
    "float8 overflows": TensorMeta(FLOAT8, (2**62, 4), 0),
    "negative with flags": TensorMeta(FLOAT, (-2, -2), 0, None, 0, 1),
    "strides beyond": TensorMeta(FLOAT, (2, 2), 0, (3, 1)),
    "strides far beyond": TensorMeta(FLOAT, (2,), 0, (2**62,)),
    "strides beyond 64 bits": TensorMeta(FLOAT, (1,), 0, (2**80,)),
    "offset beyond": TensorMeta(FLOAT, (1,), 0, (1,), 4),
    "offset far beyond": TensorMeta(FLOAT, (1,), 0, (1,), 2**62),
    "negative stride": TensorMeta(FLOAT, (2,), 0, (-1,), 1),
    "negative offset": TensorMeta(FLOAT, (1,), 0, (1,), -1),
    "negative size": TensorMeta(FLOAT, (-1,), 0, (1,)),
    "too few strides": TensorMeta(FLOAT, (2, 2), 0, (1,)),
    "too many strides": TensorMeta(FLOAT, (2,), 0, (1, 1)),
    "strides over no bytes": TensorMeta(FLOAT, (1,), 2, (1,)),
    "buffer that is not there": TensorMeta(FLOAT, (1,), 9),
    "buffer that is not there, strided": TensorMeta(FLOAT, (1,), 9, (1,)),
    "unknown dtype": TensorMeta(999, (1,), 0),
    "negative dtype": TensorMeta(-1, (1,), 0),
    "quantised, but strided": TensorMeta(QINT8, (4,), 0),
    "quantised, but strided, by strides": TensorMeta(QINT8, (4,), 0, (1,)),
    "quantised, but strided, below a byte": TensorMeta(DTYPE_CODES[torch.quint4x2], (4,), 0),
    "quantised, but empty": TensorMeta(QINT8, (0,), 2),
    "quantised, but meta": TensorMeta(QINT8, (4,), -1, (1,), 0, 0, META),
    "unknown layout": TensorMeta(FLOAT, (1,), 0, None, 0, 0, 99),
    "negative layout": TensorMeta(FLOAT, (1,), 0, None, 0, 0, -1),
    "gradient of integers": TensorMeta(LONG, (1,), 0, None, 0, 1),
    "parameter of integers": TensorMeta(LONG, (1,), 0, None, 0, 3),
    "device that is not here": TensorMeta(FLOAT, (1,), 0, device="cuda:77"),
    "no device": TensorMeta(FLOAT, (1,), 0, device="nowhere"),
    "meta without strides": TensorMeta(FLOAT, (2,), -1, None, 0, 0, META),
    "meta, negative": TensorMeta(FLOAT, (2,), -1, (-1,), 0, 0, META),
    "meta that overflows": TensorMeta(FLOAT, (2**62, 2**62), -1, (1, 1), 0, 0, META),
    "coo without parts": composite(COO, (9, 9)),
    "coo with one part": composite(COO, (9, 9), LONGS),
    "coo, index out of range": composite(COO, (1, 1), LONGS, FLOATS),
    "coo, wrong dtype": composite(COO, (9, 300), LONGS, ONE_DOUBLE, dtype=FLOAT),
    "coo of coo": composite(COO, (9, 9), composite(COO, (9, 300), LONGS, FLOATS), FLOATS),
    "coo, values repeated": composite(
        COO, (9, 300), TensorMeta(LONG, (2, 2**40), 0, (1, 0)), TensorMeta(FLOAT, (2**40,), 1, (0,))
    ),
    "coo of meta": composite(COO, (9, 9), LONGS, TensorMeta(FLOAT, (1,), -1, (1,), 0, 0, META)),
    "csr without layout": composite(COMPRESSED, (1, 300), ONE_LONG, ONE_LONG, FLOATS),
    "csr with bad layout": composite(COMPRESSED, (1, 300), ONE_LONG, ONE_LONG, FLOATS, scalars=(7.0,)),
    "csr, nan layout": composite(COMPRESSED, (1, 300), ONE_LONG, ONE_LONG, FLOATS, scalars=(math.nan,)),
    "csr, lengths": composite(COMPRESSED, (1, 300), ONE_LONG, ONE_LONG, FLOATS, scalars=(0.0,)),
    "quantised without parts": composite(QUANT, (4, 2), dtype=QINT8, scalars=(1.0, 0.0)),
    "quantised without scale": composite(QUANT, (4, 2), CHARS, dtype=QINT8),
    "quantised, nan": composite(QUANT, (4, 2), CHARS, dtype=QINT8, scalars=(1.0, math.nan)),
    "quantised floats": composite(QUANT, (1,), FLOATS, dtype=QINT8, scalars=(1.0, 0.0)),
    "quantised, wrong shape": composite(QUANT, (9, 9), CHARS, dtype=QINT8, scalars=(1.0, 0.0)),
    "quantised, repeated": composite(
        QUANT, (2**40,), TensorMeta(CHAR, (2**40,), 0, (0,)), dtype=QINT8, scalars=(1.0, 0.0)
    ),
    "channels, too few scales": composite(CHANNELS, (4, 2), CHARS, ONE_DOUBLE, ONE_LONG, dtype=QINT8, scalars=(0.0,)),
    "channels, axis": composite(CHANNELS, (4, 2), CHARS, ONE_DOUBLE, ONE_LONG, dtype=QINT8, scalars=(7.0,)),
    "channels, negative axis": composite(CHANNELS, (4, 2), CHARS, ONE_DOUBLE, ONE_LONG, dtype=QINT8, scalars=(-1.0,)),
}


@quiet_quantised
@pytest.mark.parametrize("meta", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_descriptions_are_refused(meta):
    buffers = [bytearray([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]), bytearray(4), bytearray(), bytearray(3)]
    with pytest.raises(SerializationError):
        unpack_tensors.unpack((meta,), buffers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_torch_was_built_without():
    """Torch says so with an AssertionError, the first time."""
    with pytest.raises(SerializationError, match="CUDA"):
        unpack_tensors.unpack((TensorMeta(FLOAT, (1,), 0, device="cuda"),), [bytearray(4)])


@pytest.mark.parametrize("buffer", [5, None, "text", object()], ids=str)
def test_a_buffer_that_never_came_is_refused(buffer):
    for meta in (TensorMeta(FLOAT, (1,), 0), TensorMeta(HALF, (1,), 0), TensorMeta(FLOAT, (1,), 0, (1,))):
        with pytest.raises(SerializationError):
            unpack_tensors.unpack((meta,), [buffer])


def test_a_part_nested_without_end_is_refused():
    meta = LONGS
    for _ in range(5_000):
        meta = composite(COO, (9, 9), meta)
    with pytest.raises(SerializationError):
        unpack_tensors.unpack((meta,), [bytearray(16)])


@quiet_sparse
@pytest.mark.parametrize("layout", [2, 3])
def test_blocks_without_elements_are_refused(layout):
    """torch takes them, and dies of a division by zero when such a tensor is made dense."""
    code = DTYPE_CODES[torch.int64]
    parts = (
        TensorMeta(code, (2,), 0),
        TensorMeta(code, (1,), 1),
        TensorMeta(DTYPE_CODES[torch.float32], (1, 0, 2), 2),
    )
    meta = TensorMeta(DTYPE_CODES[torch.float32], (0, 2), layout=2, parts=parts, scalars=(layout,))
    buffers = [bytearray(torch.tensor([0, 1]).numpy().tobytes()), bytearray(8), bytearray()]
    with pytest.raises(SerializationError, match="blocks without elements"):
        unpack_tensors.unpack((meta,), buffers)


@pytest.mark.parametrize("layout", [STRIDED, COO, COMPRESSED, QUANT, CHANNELS, META])
def test_many_dimensions_are_refused_before_their_product_is_taken(layout):
    """A product of 60,000 sizes of 2**62 takes seconds, in which no other thread runs."""
    many = (2**62,) * 60_000
    for shape, stride in [(many, (1,)), (many, many), ((1,) * 65, (1,) * 65), ((1,), many)]:
        meta = TensorMeta(FLOAT, shape, 0, stride, 0, 0, layout)
        with pytest.raises(SerializationError, match=r"a tensor of [\d,]+ dimensions came, and 64 is the most"):
            unpack_tensors.unpack((meta,), [bytearray(16)])


def test_tensors_of_64_dimensions_go():
    for dtype in (torch.float32, torch.bfloat16):
        sent = torch.rand((1,) * 63 + (2,)).to(dtype)
        assert torch.equal(trip(sent, allow_pickle=False).value, sent)


def test_expanded_tensors_go_if_they_can_be_read():
    mask = torch.ones(1, dtype=torch.bool).expand(8, 64, 2**15, 2**15)
    meta = TensorMeta(DTYPE_CODES[torch.bool], tuple(mask.shape), 0, mask.stride())
    (got,) = unpack_tensors.unpack((meta,), [bytearray(1)])
    assert got.shape == mask.shape
    assert got.stride() == mask.stride()


CHANNEL_VALUES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
SCALE_DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64]
ZERO_DTYPES = [torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.bool]


@quiet_quantised
@pytest.mark.parametrize("scales", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("zeros", ZERO_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", CHANNEL_VALUES, ids=str)
def test_channels_have_the_scales_and_zero_points_that_torch_makes(dtype, zeros, scales):
    """torch crashes when it reads a qint32 tensor with floating zero points."""
    kinds = (CHANNEL_VALUES[dtype], scales, zeros)
    parts = [TensorMeta(DTYPE_CODES[kind], (2,), index) for index, kind in enumerate(kinds)]
    meta = composite(CHANNELS, (2,), *parts, dtype=DTYPE_CODES[dtype], scalars=(0.0,))
    buffers = [bytearray(bytes_of(torch.ones(2, dtype=kind))) for kind in kinds]
    made = scales.itemsize >= 4 and scales.is_floating_point
    made = made and (zeros is torch.int64 or (zeros is torch.float32 and dtype is not torch.qint32))
    if not made:
        with pytest.raises(SerializationError, match=r"cannot have \S+ scales and \S+ zero points"):
            unpack_tensors.unpack((meta,), buffers)
        return
    (tensor,) = unpack_tensors.unpack((meta,), buffers)
    assert tensor.dequantize().tolist() == [0.0, 0.0]
    assert "size=(2,)" in repr(tensor)


def flagged(meta, flags):
    return msgspec.structs.replace(meta, flags=flags)


CONJUGATE, NEGATIVE, COALESCED, GAPS = 4, 8, 16, 32
COMPOSITES = {
    "coo": composite(COO, (9, 300), LONGS, FLOATS),
    "csr": composite(COMPRESSED, (1, 300), TensorMeta(LONG, (2,), 4), ONE_LONG, FLOATS, scalars=(0.0,)),
    "quantised": composite(QUANT, (4, 2), CHARS, dtype=QINT8, scalars=(1.0, 0.0)),
    "channels": composite(CHANNELS, (1,), TensorMeta(CHAR, (1,), 0), ONE_DOUBLE, ONE_LONG, dtype=QINT8, scalars=(0.0,)),
    "meta": TensorMeta(FLOAT, (2,), -1, (1,), 0, 0, META),
    "integers": TensorMeta(LONG, (2,), 0),
}


def composite_buffers():
    return [
        bytearray([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]),
        bytearray(4),
        bytearray(),
        bytearray(3),
        bytearray(torch.tensor([0, 1]).numpy().tobytes()),
    ]


@quiet_quantised
@quiet_sparse
@pytest.mark.parametrize("kind", COMPOSITES)
@pytest.mark.parametrize("flag", [CONJUGATE, NEGATIVE, GAPS, 64, -1], ids=["conj", "neg", "gaps", "unknown", "all"])
def test_a_flag_that_the_kind_of_tensor_cannot_have_is_refused(kind, flag):
    """torch dies of a quantised tensor with a conjugate or negative bit."""
    meta = COMPOSITES[kind]
    unpack_tensors.unpack((meta,), composite_buffers())
    if flag == GAPS and kind == "integers":
        flag = GAPS | COALESCED
    for flags in (flag, flag | 1, flag | 2) if flag > 0 else (flag,):
        with pytest.raises(SerializationError, match="cannot have flags"):
            unpack_tensors.unpack((flagged(meta, flags),), composite_buffers())


@quiet_sparse
@pytest.mark.parametrize(
    "part", [flagged(LONGS, 1), flagged(LONGS, 2), msgspec.structs.replace(LONGS, device="cpu")], ids=repr
)
def test_a_part_is_a_plain_tensor(part):
    with pytest.raises(SerializationError, match="a gradient or a device of its own"):
        unpack_tensors.unpack((composite(COO, (9, 300), part, FLOATS),), composite_buffers())


@quiet_sparse
@pytest.mark.parametrize("outer", [[0, 2, 0], [1, 1, 0], [0, -1, 0], [0, 2**62, 0], [0, 0, 5]], ids=repr)
@pytest.mark.parametrize("layout", range(4))
def test_indices_that_lead_beyond_the_others_are_refused(outer, layout):
    """torch's own check reads memory there, and dies of it."""
    elements = TensorMeta(FLOAT, (0, 1, 1) if layout > 1 else (0,), 1)
    meta = composite(
        COMPRESSED, (2, 2), TensorMeta(LONG, (3,), 0), TensorMeta(LONG, (0,), 1), elements, scalars=(layout,)
    )
    with pytest.raises(SerializationError, match="the indices of a sparse tensor"):
        unpack_tensors.unpack((meta,), [bytearray(torch.tensor(outer).numpy().tobytes()), bytearray()])


INDEXED = {
    "coo": composite(COO, (4,), TensorMeta(LONG, (1, 2), 0), TensorMeta(LONG, (2,), 0), dtype=LONG),
    "csr": composite(
        COMPRESSED,
        (1, 4),
        TensorMeta(LONG, (2,), 1),
        TensorMeta(LONG, (2,), 0),
        TensorMeta(LONG, (2,), 0),
        dtype=LONG,
        scalars=(0.0,),
    ),
    "channels": composite(
        CHANNELS,
        (2,),
        TensorMeta(CHAR, (2,), 0),
        TensorMeta(DOUBLE, (2,), 1),
        TensorMeta(LONG, (2,), 0),
        dtype=QINT8,
        scalars=(0.0,),
    ),
}


def indices_of(tensor):
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices()]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


@quiet_sparse
@quiet_quantised
@pytest.mark.parametrize("kind", INDEXED)
def test_indices_share_no_memory_with_what_the_peer_can_change(kind):
    """Another tensor of the message over the same buffer, or the sender, in memory that it shares with us."""
    meta = INDEXED[kind]
    buffers = [bytearray(torch.tensor(content).numpy().tobytes()) for content in ([0, 1], [0, 2])]
    aliases = (TensorMeta(LONG, (2,), 0), TensorMeta(LONG, (2,), 1), TensorMeta(LONG, (2,), 0, (1,)))
    tensor, *others = unpack_tensors.unpack((meta, *aliases), buffers)
    before = [part.tolist() for part in indices_of(tensor)]
    for other in others:
        other.fill_(2**40)
    for buffer in buffers:
        buffer[:] = bytes([255]) * 16
    assert [part.tolist() for part in indices_of(tensor)] == before


# --- fuzz -----------------------------------------------------------------------------------------------------------


def touch(tensor):
    """Reads a tensor from end to end, where that is little work: out-of-bounds memory would show (or crash)."""
    if tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized and 0 < tensor.numel() < 10_000:
        bytes_of(tensor)
    elif tensor.layout is not torch.strided and tensor.numel() < 10_000:
        tensor.to_dense()


sizes = st.integers(0, 6) | st.integers(0, 2**63 - 1)
shapes = st.lists(sizes, max_size=3).map(tuple)
codes = st.integers(-1, len(unpack_tensors.DTYPES))
small = st.integers(-2, 4)
strided_metas = st.builds(
    TensorMeta,
    codes,
    shapes,
    small,
    st.none() | shapes,
    sizes,
    st.integers(0, 127),
    st.sampled_from([0, 0, 0, 5]),
    device=st.sampled_from([None, None, "cpu", "meta", "cuda", "nowhere"]),
)
any_metas = strided_metas | st.builds(
    TensorMeta,
    codes,
    shapes,
    flags=st.integers(0, 31),
    layout=st.integers(0, 6),
    parts=st.lists(strided_metas, max_size=3).map(tuple),
    scalars=st.lists(small.map(float) | st.floats(), max_size=2).map(tuple),
)


@quiet_quantised
@quiet_sparse
@given(st.lists(any_metas, max_size=3), st.lists(st.binary(max_size=40), max_size=3))
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_descriptions(metas, buffers):
    check_rebuild(Body(tensors=tuple(metas), buffers=tuple(buffers)), [bytearray(buffer) for buffer in buffers])


def check_rebuild(body, buffers):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        rebuilt = unpack_tensors.unpack(body.tensors, buffers)
    except TelegradError:
        rebuilt = []
    for tensor in rebuilt:
        touch(tensor)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "256 MiB for a few bytes"


def corpus():
    base = torch.arange(24.0).reshape(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = [
            torch.quantize_per_tensor(base, 0.5, 3, torch.qint8),
            torch.quantize_per_channel(base, torch.rand(4), torch.zeros(4), 0, torch.quint8),
        ]
        compressed = [base.to_sparse_csr(), base.to_sparse_bsc((2, 3))]
    return [base, base.t(), base[1], base.bfloat16(), base.to_sparse(), *quantised, *compressed]


PACKED_VALUES = [codec.encode(Reply(1, values.pack(value, values.Route(1)).body)) for value in [*corpus(), corpus()]]


@quiet_quantised
@quiet_sparse
@given(
    st.sampled_from(PACKED_VALUES),
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_mutated_tensors(header, edits):
    data = bytearray(header)
    for position, byte in edits:
        data[position % len(data)] = byte
    try:
        message = codec.decode(data)
        buffers = codec.complete(message.body, [], []) if isinstance(message, Reply) else []
    except TelegradError:
        return
    if isinstance(message, Reply):
        check_rebuild(message.body, buffers)


# --- gaps -----------------------------------------------------------------------------------------------------------


def test_a_small_view_gets_its_gaps_back_and_a_big_one_does_not() -> None:
    small, big = torch.rand(5, 5).narrow(1, 2, 2), torch.rand(100, 100)[:, ::3]
    assert assert_trip(small).value.stride() == small.stride() == (5, 1)
    assert assert_trip(big).value.is_contiguous()


def test_a_view_with_gaps_that_repeats_its_elements() -> None:
    view = torch.rand(1, 50)[:, ::25].expand(3, 2)
    assert assert_trip(view).value.tolist() == view.tolist()


def test_strides_that_ask_for_much_memory_are_refused() -> None:
    meta = TensorMeta(DTYPE_CODES[torch.float32], (2, 2), 0, (1 << 40, 1), flags=32)
    with pytest.raises(SerializationError, match="asks for memory for its strides"):
        unpack_tensors.unpack((meta,), [bytearray(16)])
