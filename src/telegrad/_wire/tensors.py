"""Tensors on the wire: the records that describe them, and the buffers that hold their elements.

A tensor becomes a :class:`TensorMeta` and part of a buffer.  Small buffers go inside the header: on a socket a separate
buffer costs 70-140 us, and copying a few KiB less than one.  Tensors of one message whose memory overlaps share one
buffer, so that they alias each other at the receiver too.  A view sends only the bytes between its first and last
element.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from telegrad._torch import make_quantized_per_channel, make_quantized_per_tensor, negative_view, sparse_parts
from telegrad._wire.aliasing import Region, all_apart, overlaps, span
from telegrad._wire.dtypes import (
    COMPRESSED_LAYOUTS,
    DTYPE_CODES,
    DTYPES,
    LAYOUT_CODES,
    NUMPY_CODES,
    NUMPY_DTYPES,
    QUANTIZED_DTYPES,
)
from telegrad._wire.messages import InSegment, TensorMeta
from telegrad.errors import SerializationError, UsageError

INLINE_LIMIT = 32 << 10  # bytes of a buffer inside the header: a round trip of 16 KB takes 65 us so, 105 beside it
INLINE_BUDGET = 4 << 20  # bytes of all buffers inside one header

_REQUIRES_GRAD, _PARAMETER, _CONJUGATE, _NEGATIVE, _COALESCED, _GAPS = 1, 2, 4, 8, 16, 32
_STRIDED, _COO, _COMPRESSED, _QUANTIZED, _QUANTIZED_CHANNELS, _META = range(6)

_MOST_DIMENSIONS = 64  # as in numpy; torch's operators take no more either
_MOST_ELEMENTS = 2**63 - 1
_MOST_REPEATED = 2**40  # elements of an expanded tensor: few bytes, but minutes to read

#: Tensor classes that are rebuilt from the table; any other subclass goes through pickle as its class says.
TABLE_TYPES = (Tensor, torch.nn.Parameter)


class NotInTable(Exception):
    """A tensor that only pickle can carry."""


def in_table(tensor: Tensor) -> bool:
    """Whether the table can carry this tensor; nested, mkldnn and sub-byte quantised ones cannot."""
    if type(tensor) not in TABLE_TYPES or tensor.dtype not in DTYPE_CODES:
        return False
    if tensor.is_nested or tensor.is_mkldnn:
        return False
    return not (tensor.is_quantized and tensor.dtype not in (torch.qint8, torch.quint8, torch.qint32))


# --- packing ------------------------------------------------------------------------------------------------------


class Segment(Protocol):
    """Shared memory with a copy of a buffer in it; see ``_transport.shared_memory``."""

    number: int
    fd: int


#: Copies ``size`` bytes at an address into a segment; None: send the buffer through the socket.
CopyToSegment = Callable[[int, int], Segment | None]


class OutgoingBuffers(Struct):
    """The buffers of one message to send."""

    to_segment: CopyToSegment | None = None
    buffers: list[bytes | int | InSegment] = []
    stream: list[memoryview] = []  # follow the header
    segments: list[Segment] = []
    budget: int = INLINE_BUDGET  # bytes that may still go inside the header

    def inlines(self, size: int) -> bool:
        """Whether a buffer of that size goes inside the header; if so, it is counted."""
        if size > INLINE_LIMIT or size > self.budget:
            return False
        self.budget -= size
        return True

    def add(self, memory: memoryview | bytes) -> int:
        """Adds a buffer; returns its index."""
        return self.add_array(np.frombuffer(memory, np.uint8))

    def add_array(self, array: NDArray[Any]) -> int:
        """Adds the memory of a contiguous array: inside the header, in shared memory, or after the header."""
        size = array.nbytes
        if self.inlines(size):
            self.buffers.append(array.tobytes())
            return len(self.buffers) - 1
        segment = self.to_segment(array.__array_interface__["data"][0], size) if self.to_segment is not None else None
        if segment is not None:
            self.segments.append(segment)
            self.buffers.append(InSegment(segment.number, segment.fd, size))
        else:
            self.buffers.append(size)
            flat: Any = array.reshape(-1).view(np.uint8)
            self.stream.append(memoryview(flat))
        return len(self.buffers) - 1


DeviceMap = Callable[[torch.device], str | None]


def pack(tensors: Sequence[Tensor], out: OutgoingBuffers, device_for: DeviceMap) -> tuple[TensorMeta, ...]:
    """Describes the tensors and adds their memory to ``out``."""
    if len(tensors) == 1:
        return (_pack_one(tensors[0], out, device_for),)
    shared = {} if all_apart(tensors) else overlaps(tensors)
    return tuple(
        [
            _pack_shared(tensor, shared[id(tensor)], out)
            if id(tensor) in shared
            else _pack_one(tensor, out, device_for)
            for tensor in tensors
        ]
    )


def _flags(tensor: Tensor) -> int:
    flags = _REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | _PARAMETER if type(tensor) is not Tensor else flags


def _pack_one(tensor: Tensor, out: OutgoingBuffers, device_for: DeviceMap) -> TensorMeta:
    flags = _flags(tensor)
    # The fast path: numpy() raises for everything but plain CPU memory.  That is one call instead of ten checks, each
    # of which takes 2 us when torch's code is not in the core's caches, as between two remote calls.
    try:
        array = (tensor.data if flags else tensor).numpy()
    except (TypeError, RuntimeError):
        pass
    else:
        code = NUMPY_CODES.get(array.dtype.num)
        if code is not None and array.flags.c_contiguous:
            return TensorMeta(code, array.shape, out.add_array(array), None, 0, flags)
        if code is not None and not any(array.strides):  # one element, expanded: the gradient of sum()
            return TensorMeta(code, array.shape, out.add_array(array.flat[:1]), array.strides, 0, flags)
    if not in_table(tensor):
        raise NotInTable
    device = None
    if not tensor.is_cpu:
        if tensor.is_meta:
            return TensorMeta(DTYPE_CODES[tensor.dtype], tuple(tensor.shape), -1, tensor.stride(), 0, flags, _META)
        device = device_for(tensor.device)
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return _pack_composite(tensor, flags, out, device)
    if tensor.is_conj():
        tensor, flags = tensor.conj(), flags | _CONJUGATE
    if tensor.is_neg():
        tensor, flags = negative_view(tensor), flags | _NEGATIVE
    stride = gaps = None
    if not tensor.is_contiguous():
        if span(tensor) > tensor.numel():
            if _has_small_gaps(tensor.shape, tensor.stride(), tensor.itemsize):
                gaps, flags = tensor.stride(), flags | _GAPS
            tensor = tensor.detach().contiguous()
        else:
            stride = tensor.stride()
    size = tensor.nbytes if stride is None else span(tensor) * tensor.itemsize
    if out.inlines(size):
        out.buffers.append(ctypes.string_at(tensor.data_ptr(), size))
        buffer = len(out.buffers) - 1
    else:
        start = int(tensor.storage_offset()) * tensor.itemsize
        buffer = out.add_array(_memory(tensor, start, size))
    return TensorMeta(
        DTYPE_CODES[tensor.dtype], tuple(tensor.shape), buffer, gaps or stride, 0, flags, 0, (), (), device
    )


def _has_small_gaps(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Whether the receiver restores the gaps of a view; those of a big view would take much memory there."""
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    return 0 not in stride and 0 not in shape and extent * itemsize <= INLINE_LIMIT


def _memory(tensor: Tensor, start: int, size: int) -> NDArray[np.uint8]:
    """The bytes [start, start + size) of the tensor's storage, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,), (1,))
    return flat.numpy()


def _pack_composite(tensor: Tensor, flags: int, out: OutgoingBuffers, device: str | None) -> TensorMeta:
    """Sparse and quantised tensors: their plain parts, and how to combine them."""
    detached = tensor.detach()
    scalars: tuple[float, ...] = ()
    if tensor.layout is torch.sparse_coo:
        layout = _COO
        flags |= _COALESCED if tensor.is_coalesced() else 0
        parts: tuple[Tensor, ...] = sparse_parts(detached)
    elif tensor.layout in COMPRESSED_LAYOUTS:
        layout = _COMPRESSED
        outer, inner = COMPRESSED_LAYOUTS[tensor.layout]
        parts = (outer(detached), inner(detached), detached.values())
        scalars = (LAYOUT_CODES.index(tensor.layout),)
    elif tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        layout, parts = _QUANTIZED, (detached.int_repr(),)
        scalars = (tensor.q_scale(), tensor.q_zero_point())
    elif tensor.is_quantized:
        layout = _QUANTIZED_CHANNELS
        parts = (detached.int_repr(), detached.q_per_channel_scales(), detached.q_per_channel_zero_points())
        scalars = (tensor.q_per_channel_axis(),)
    else:
        raise SerializationError(f"a tensor of layout {tensor.layout} cannot be sent: call .to_dense() on it first")
    metas = tuple(
        _pack_one(part if span(part) >= part.numel() else part.contiguous(), out, lambda _: None) for part in parts
    )
    return TensorMeta(
        DTYPE_CODES[tensor.dtype], tuple(tensor.shape), -1, None, 0, flags, layout, metas, scalars, device
    )


def _pack_shared(tensor: Tensor, region: Region, out: OutgoingBuffers) -> TensorMeta:
    if region.buffer < 0:
        # Offsets are in elements, so the region must begin at a multiple of its widest element.
        widest = max(member.itemsize for member in region.members)
        region.start -= region.start % widest
        region.buffer = out.add_array(_memory(tensor, region.start, region.end - region.start))
    flags = _flags(tensor)
    flags |= _CONJUGATE if tensor.is_conj() else 0
    flags |= _NEGATIVE if tensor.is_neg() else 0
    offset = (int(tensor.storage_offset()) * tensor.itemsize - region.start) // tensor.itemsize
    return TensorMeta(
        DTYPE_CODES[tensor.dtype], tuple(tensor.shape), region.buffer, tuple(tensor.stride()), offset, flags
    )


# --- unpacking ----------------------------------------------------------------------------------------------------


def unpack(metas: Sequence[TensorMeta], buffers: Sequence[Any], recorded: bool = False) -> list[Tensor]:
    """Rebuilds the tensors over the received memory, without copying it.

    ``recorded``: a plain tensor that requires a gradient is returned without that flag, because the incoming
    interceptor makes it the output of a recv.
    """
    storages: dict[int, Tensor] = {}
    try:
        return [_unpack_one(meta, buffers, storages, recorded) for meta in metas]
    except SerializationError:
        raise
    except Exception as error:  # torch raises many types, an AssertionError for a device that this host lacks
        # Only the first line: a C++ stack trace may follow, and its addresses must not reach other workers.
        raise SerializationError(f"cannot rebuild a tensor here: {str(error).partition(chr(10))[0]}") from error


def _unpack_one(meta: TensorMeta, buffers: Sequence[Any], storages: dict[int, Tensor], recorded: bool) -> Tensor:
    if 0 <= meta.flags <= _REQUIRES_GRAD and meta.stride is None and meta.layout == _STRIDED and meta.device is None:
        # The fast path, as in _pack_one.
        numpy_dtype = NUMPY_DTYPES[meta.dtype] if 0 <= meta.dtype < len(NUMPY_DTYPES) else None
        buffer = buffers[meta.buffer]
        if numpy_dtype is not None and len(buffer):
            tensor = torch.from_numpy(np.ndarray(meta.shape, numpy_dtype, buffer))
            return tensor.requires_grad_() if meta.flags and not recorded and torch.is_grad_enabled() else tensor
    dtype = DTYPES[meta.dtype] if 0 <= meta.dtype < len(DTYPES) else None
    if dtype is None:
        raise SerializationError(f"this torch ({torch.__version__}) has no dtype for code {meta.dtype}")
    if dtype in QUANTIZED_DTYPES and meta.layout not in (_QUANTIZED, _QUANTIZED_CHANNELS):
        raise SerializationError(f"{dtype} came without a scale")  # torch would crash
    flags = meta.flags
    _check_meta(meta, dtype)
    if meta.layout == _STRIDED:
        if meta.stride is None:
            tensor = _contiguous(dtype, meta.shape, buffers[meta.buffer])
        elif flags & _GAPS:
            tensor = _with_gaps(dtype, meta, buffers[meta.buffer])
        else:
            tensor = _strided(dtype, meta, buffers, storages)
    elif meta.layout == _META:
        tensor = torch.empty_strided(meta.shape, _checked_stride(meta), dtype=dtype, device="meta")
    else:
        tensor = _unpack_composite(meta, buffers)
        if tensor.dtype is not dtype or tensor.shape != meta.shape:
            raise SerializationError(f"the parts of a {dtype} tensor of shape {meta.shape} do not make one")
    if flags == 0 and meta.device is None:
        return tensor
    if flags & _CONJUGATE:
        tensor = tensor.conj()
    if flags & _NEGATIVE:
        tensor = negative_view(tensor)
    if meta.device is not None:
        tensor = tensor.to(meta.device)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
    # Under no_grad a received tensor requires no gradient, like one computed here.
    return tensor.requires_grad_() if flags & _REQUIRES_GRAD and torch.is_grad_enabled() else tensor


def _check_meta(meta: TensorMeta, dtype: torch.dtype) -> None:
    """Refuses what ``pack`` never sends: torch crashes on a quantised tensor with a conjugate bit, for example."""
    dimensions = max(len(meta.shape), len(meta.stride or ()))
    if dimensions > _MOST_DIMENSIONS:  # checked first: the product of thousands of sizes takes seconds
        raise SerializationError(f"a tensor of {dimensions:,} dimensions came, and {_MOST_DIMENSIONS} is the most")
    if math.prod(meta.shape) > _MOST_ELEMENTS:
        raise SerializationError(f"a tensor of shape {meta.shape} has more elements than torch can count")
    allowed = _REQUIRES_GRAD | _PARAMETER
    if meta.layout == _STRIDED:
        allowed |= _GAPS
        if dtype.is_complex or dtype.is_floating_point:
            allowed |= _CONJUGATE | _NEGATIVE
    elif meta.layout == _COO:
        allowed |= _COALESCED
    if meta.flags & ~allowed:
        raise SerializationError(f"a {dtype} tensor with layout code {meta.layout} cannot have flags {meta.flags}")


def _contiguous(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> Tensor:
    if len(buffer) == 0:
        if math.prod(shape):
            raise SerializationError(f"a tensor of shape {shape} came without its bytes")
        return torch.empty(shape, dtype=dtype)
    try:
        flat = torch.frombuffer(buffer, dtype=dtype)
    except (ValueError, RuntimeError):
        # frombuffer does not take all dtypes; a storage does.
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, _contiguous_stride(shape))
    return flat.view(shape)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return tuple(reversed(stride)) if shape else ()


def _strided(dtype: torch.dtype, meta: TensorMeta, buffers: Sequence[Any], storages: dict[int, Tensor]) -> Tensor:
    base = storages.get(meta.buffer)
    if base is None:
        base = storages[meta.buffer] = torch.frombuffer(buffers[meta.buffer], dtype=torch.uint8)
    stride = _checked_stride(meta)
    last = meta.offset + sum((size - 1) * step for size, step in zip(meta.shape, stride, strict=True))
    if (last + 1) * dtype.itemsize > base.numel() and 0 not in meta.shape:
        raise SerializationError("a tensor reaches beyond the buffer that came with it")
    elements = math.prod(meta.shape)
    if elements > _MOST_REPEATED and elements * dtype.itemsize > base.numel():
        raise SerializationError(
            f"an expanded tensor of shape {meta.shape} came, with {elements:,} elements over {base.numel():,} bytes: "
            "send it before it is expanded, and expand it here"
        )
    return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), meta.offset, meta.shape, stride)


def _with_gaps(dtype: torch.dtype, meta: TensorMeta, buffer: Any) -> Tensor:
    stride = _checked_stride(meta)
    if not _has_small_gaps(meta.shape, stride, dtype.itemsize):
        raise SerializationError(f"a tensor of shape {meta.shape} asks for memory for its strides {stride}")
    tensor = torch.empty_strided(meta.shape, stride, dtype=dtype)
    with torch.no_grad():
        return tensor.copy_(_contiguous(dtype, meta.shape, buffer))


def _checked_stride(meta: TensorMeta) -> tuple[int, ...]:
    stride = meta.stride or ()
    if len(stride) != len(meta.shape) or min((0, meta.offset, *stride, *meta.shape)) < 0:
        raise SerializationError(f"a tensor of shape {meta.shape} cannot have strides {stride}")
    return stride


def _unpack_composite(meta: TensorMeta, buffers: Sequence[Any]) -> Tensor:
    if any(part.layout != _STRIDED for part in meta.parts):
        raise SerializationError("a part of a tensor has parts itself")
    if any(part.flags & (_REQUIRES_GRAD | _PARAMETER) or part.device is not None for part in meta.parts):
        raise SerializationError("a part of a tensor has a gradient or a device of its own")
    parts = unpack(meta.parts, buffers)
    if any(part.nbytes > part.untyped_storage().nbytes() for part in parts):
        # torch copies and searches the parts, and an expanded one can be far larger than the bytes received.
        raise SerializationError("a part of a tensor repeats its bytes")
    # torch checks indices once and then trusts them.  Another tensor of the message, or the sender, may share the
    # received memory, so all parts except the elements are copied before they are checked.
    elements = 0 if meta.layout in (_QUANTIZED, _QUANTIZED_CHANNELS) else len(parts) - 1
    parts = [part if index == elements else part.clone() for index, part in enumerate(parts)]
    if meta.layout == _COO:
        coalesced = bool(meta.flags & _COALESCED)
        return torch.sparse_coo_tensor(parts[0], parts[1], meta.shape, is_coalesced=coalesced, check_invariants=True)
    if meta.layout == _COMPRESSED:
        layout = LAYOUT_CODES[int(meta.scalars[0])]
        outer, inner, values = parts
        if layout in (torch.sparse_bsr, torch.sparse_bsc) and 0 in values.shape[outer.dim() : outer.dim() + 2]:
            raise SerializationError("a sparse tensor has blocks without elements")  # torch would divide by their size
        _check_compressed_indices(outer, inner)
        return torch.sparse_compressed_tensor(
            outer, inner, values, size=meta.shape, layout=layout, check_invariants=True
        )
    if meta.layout == _QUANTIZED:
        scale, zero = meta.scalars
        return make_quantized_per_tensor(parts[0], scale, int(zero))
    if meta.layout == _QUANTIZED_CHANNELS:
        (values, scales, zeros), axis = parts, int(meta.scalars[0])
        if axis < 0 or not scales.shape == zeros.shape == values.shape[axis : axis + 1]:
            raise SerializationError(f"{len(scales)} scales for axis {axis} of a tensor of shape {meta.shape}")
        _check_channel_dtypes(values, scales, zeros)
        return make_quantized_per_channel(values, scales, zeros, axis)
    raise SerializationError(f"unknown tensor layout code {meta.layout}")


def _check_channel_dtypes(values: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """Allows only the dtypes that torch itself uses: it crashes on a qint32 tensor with floating zero points."""
    floating = zeros.dtype is torch.float32 and values.dtype is not torch.int32
    if scales.dtype not in (torch.float32, torch.float64) or not (zeros.dtype is torch.int64 or floating):
        raise SerializationError(
            f"a quantised tensor of {values.dtype} cannot have {scales.dtype} scales and {zeros.dtype} zero points"
        )


def _check_compressed_indices(outer: Tensor, inner: Tensor) -> None:
    """torch's own check reads ``inner[outer[i] : outer[i + 1]]`` before it has checked these bounds."""
    stored = inner.shape[-1] if inner.dim() else 0
    if (
        outer.dim() == 0
        or outer.shape[-1] == 0
        or outer.shape[:-1] != inner.shape[:-1]
        or (outer[..., 0] != 0).any()
        or (outer[..., -1] != stored).any()
        or (outer[..., 1:] < outer[..., :-1]).any()
    ):
        raise SerializationError(f"the indices of a sparse tensor do not describe its {stored} elements")


def no_device_map(device: torch.device) -> str | None:
    """The device map of a worker that has none."""
    raise UsageError(
        f"a tensor on {device} cannot be sent: no device map says where it goes on the other side. "
        "Call .cpu() on it, or give a map with options.set_device_map(worker, {here: there})."
    )
