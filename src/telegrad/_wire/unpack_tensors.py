"""Rebuilds received tensors over their buffers.  The descriptions are checked: torch crashes on malformed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from telegrad._torch import make_quantized_per_channel, make_quantized_per_tensor, negative_view
from telegrad._wire.dtypes import (
    COALESCED,
    COMPRESSED,
    CONJUGATE,
    COO,
    DTYPES,
    GAPS,
    LAYOUT_CODES,
    META,
    NEGATIVE,
    NUMPY_DTYPES,
    PARAMETER,
    QUANTIZED,
    QUANTIZED_CHANNELS,
    QUANTIZED_DTYPES,
    REQUIRES_GRAD,
    STRIDED,
)
from telegrad._wire.messages import TensorMeta
from telegrad._wire.tensors import has_small_gaps
from telegrad.errors import SerializationError

_MOST_DIMENSIONS = 64  # as in numpy; torch's operators take no more either
_MOST_ELEMENTS = 2**63 - 1
_MOST_REPEATED = 2**40  # elements of an expanded tensor: few bytes, but minutes to read


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
    if 0 <= meta.flags <= REQUIRES_GRAD and meta.stride is None and meta.layout == STRIDED and meta.device is None:
        # The fast path, as in _pack_one.
        numpy_dtype = NUMPY_DTYPES[meta.dtype] if 0 <= meta.dtype < len(NUMPY_DTYPES) else None
        buffer = buffers[meta.buffer]
        if numpy_dtype is not None and len(buffer):
            tensor = torch.from_numpy(np.ndarray(meta.shape, numpy_dtype, buffer))
            return tensor.requires_grad_() if meta.flags and not recorded and torch.is_grad_enabled() else tensor
    dtype = DTYPES[meta.dtype] if 0 <= meta.dtype < len(DTYPES) else None
    if dtype is None:
        raise SerializationError(f"this torch ({torch.__version__}) has no dtype for code {meta.dtype}")
    if dtype in QUANTIZED_DTYPES and meta.layout not in (QUANTIZED, QUANTIZED_CHANNELS):
        raise SerializationError(f"{dtype} came without a scale")  # torch would crash
    flags = meta.flags
    _check_meta(meta, dtype)
    if meta.layout == STRIDED:
        if meta.stride is None:
            tensor = _contiguous(dtype, meta.shape, buffers[meta.buffer])
        elif flags & GAPS:
            tensor = _with_gaps(dtype, meta, buffers[meta.buffer])
        else:
            tensor = _strided(dtype, meta, buffers, storages)
    elif meta.layout == META:
        tensor = torch.empty_strided(meta.shape, _checked_stride(meta), dtype=dtype, device="meta")
    else:
        tensor = _unpack_composite(meta, buffers)
        if tensor.dtype is not dtype or tensor.shape != meta.shape:
            raise SerializationError(f"the parts of a {dtype} tensor of shape {meta.shape} do not make one")
    if flags == 0 and meta.device is None:
        return tensor
    if flags & CONJUGATE:
        tensor = tensor.conj()
    if flags & NEGATIVE:
        tensor = negative_view(tensor)
    if meta.device is not None:
        tensor = tensor.to(meta.device)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    # Under no_grad a received tensor requires no gradient, like one computed here.
    return tensor.requires_grad_() if flags & REQUIRES_GRAD and torch.is_grad_enabled() else tensor


def _check_meta(meta: TensorMeta, dtype: torch.dtype) -> None:
    """Refuses what ``pack`` never sends: torch crashes on a quantised tensor with a conjugate bit, for example."""
    dimensions = max(len(meta.shape), len(meta.stride or ()))
    if dimensions > _MOST_DIMENSIONS:  # checked first: the product of thousands of sizes takes seconds
        raise SerializationError(f"a tensor of {dimensions:,} dimensions came, and {_MOST_DIMENSIONS} is the most")
    if math.prod(meta.shape) > _MOST_ELEMENTS:
        raise SerializationError(f"a tensor of shape {meta.shape} has more elements than torch can count")
    allowed = REQUIRES_GRAD | PARAMETER
    if meta.layout == STRIDED:
        allowed |= GAPS
        if dtype.is_complex or dtype.is_floating_point:
            allowed |= CONJUGATE | NEGATIVE
    elif meta.layout == COO:
        allowed |= COALESCED
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
    if not has_small_gaps(meta.shape, stride, dtype.itemsize):
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
    if any(part.layout != STRIDED for part in meta.parts):
        raise SerializationError("a part of a tensor has parts itself")
    if any(part.flags & (REQUIRES_GRAD | PARAMETER) or part.device is not None for part in meta.parts):
        raise SerializationError("a part of a tensor has a gradient or a device of its own")
    parts = unpack(meta.parts, buffers)
    if any(part.nbytes > part.untyped_storage().nbytes() for part in parts):
        # torch copies and searches the parts, and an expanded one can be far larger than the bytes received.
        raise SerializationError("a part of a tensor repeats its bytes")
    # torch checks indices once and then trusts them.  Another tensor of the message, or the sender, may share the
    # received memory, so all parts except the elements are copied before they are checked.
    elements = 0 if meta.layout in (QUANTIZED, QUANTIZED_CHANNELS) else len(parts) - 1
    parts = [part if index == elements else part.clone() for index, part in enumerate(parts)]
    if meta.layout == COO:
        coalesced = bool(meta.flags & COALESCED)
        return torch.sparse_coo_tensor(parts[0], parts[1], meta.shape, is_coalesced=coalesced, check_invariants=True)
    if meta.layout == COMPRESSED:
        layout = LAYOUT_CODES[int(meta.scalars[0])]
        outer, inner, values = parts
        if layout in (torch.sparse_bsr, torch.sparse_bsc) and 0 in values.shape[outer.dim() : outer.dim() + 2]:
            raise SerializationError("a sparse tensor has blocks without elements")  # torch would divide by their size
        _check_compressed_indices(outer, inner)
        return torch.sparse_compressed_tensor(
            outer, inner, values, size=meta.shape, layout=layout, check_invariants=True
        )
    if meta.layout == QUANTIZED:
        scale, zero = meta.scalars
        return make_quantized_per_tensor(parts[0], scale, int(zero))
    if meta.layout == QUANTIZED_CHANNELS:
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
