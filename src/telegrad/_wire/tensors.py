"""Tensors on the wire: the records that describe them, and the buffers that hold their elements.

A tensor becomes a :class:`TensorMeta` and part of a buffer.  Small buffers go inside the header: on a socket a separate
buffer costs 70-140 us, and copying a few KiB less than one.  Tensors of one message whose memory overlaps share one
buffer, so that they alias each other at the receiver too.  A view sends only the bytes between its first and last
element.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from telegrad._torch import negative_view, sparse_parts
from telegrad._wire.aliasing import Region, all_apart, overlaps, span
from telegrad._wire.dtypes import (
    COALESCED,
    COMPRESSED,
    COMPRESSED_LAYOUTS,
    CONJUGATE,
    COO,
    DTYPE_CODES,
    GAPS,
    LAYOUT_CODES,
    META,
    NEGATIVE,
    NUMPY_CODES,
    PARAMETER,
    QUANTIZED,
    QUANTIZED_CHANNELS,
    REQUIRES_GRAD,
)
from telegrad._wire.messages import InSegment, TensorMeta
from telegrad.errors import SerializationError, UsageError

INLINE_LIMIT = 32 << 10  # bytes of a buffer inside the header: a round trip of 16 KB takes 65 us so, 105 beside it
INLINE_BUDGET = 4 << 20  # bytes of all buffers inside one header


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
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | PARAMETER if type(tensor) is not Tensor else flags


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
            return TensorMeta(DTYPE_CODES[tensor.dtype], tuple(tensor.shape), -1, tensor.stride(), 0, flags, META)
        device = device_for(tensor.device)
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return _pack_composite(tensor, flags, out, device)
    if tensor.is_conj():
        tensor, flags = tensor.conj(), flags | CONJUGATE
    if tensor.is_neg():
        tensor, flags = negative_view(tensor), flags | NEGATIVE
    stride = gaps = None
    if not tensor.is_contiguous():
        if span(tensor) > tensor.numel():
            if has_small_gaps(tensor.shape, tensor.stride(), tensor.itemsize):
                gaps, flags = tensor.stride(), flags | GAPS
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


def has_small_gaps(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
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
        layout = COO
        flags |= COALESCED if tensor.is_coalesced() else 0
        parts: tuple[Tensor, ...] = sparse_parts(detached)
    elif tensor.layout in COMPRESSED_LAYOUTS:
        layout = COMPRESSED
        outer, inner = COMPRESSED_LAYOUTS[tensor.layout]
        parts = (outer(detached), inner(detached), detached.values())
        scalars = (LAYOUT_CODES.index(tensor.layout),)
    elif tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        layout, parts = QUANTIZED, (detached.int_repr(),)
        scalars = (tensor.q_scale(), tensor.q_zero_point())
    elif tensor.is_quantized:
        layout = QUANTIZED_CHANNELS
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
    flags |= CONJUGATE if tensor.is_conj() else 0
    flags |= NEGATIVE if tensor.is_neg() else 0
    offset = (int(tensor.storage_offset()) * tensor.itemsize - region.start) // tensor.itemsize
    return TensorMeta(
        DTYPE_CODES[tensor.dtype], tuple(tensor.shape), region.buffer, tuple(tensor.stride()), offset, flags
    )


def no_device_map(device: torch.device) -> str | None:
    """The device map of a worker that has none."""
    raise UsageError(
        f"a tensor on {device} cannot be sent: no device map says where it goes on the other side. "
        "Call .cpu() on it, or give a map with options.set_device_map(worker, {here: there})."
    )
