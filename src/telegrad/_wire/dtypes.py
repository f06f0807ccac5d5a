"""The codes of dtypes, layouts and representations of tensors on the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# The position is the code on the wire: append only.
_DTYPE_NAMES = """
float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32 uint16 uint32 uint64
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32
quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 uint1 uint2 uint3 uint4 uint5 uint6 uint7
int1 int2 int3 int4 int5 int6 int7
""".split()
DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

QUANTIZED_DTYPES = frozenset(dtype for dtype in DTYPES if "torch.q" in str(dtype))

COMPRESSED_LAYOUTS = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}
LAYOUT_CODES = list(COMPRESSED_LAYOUTS)

NUMPY_DTYPES: list[np.dtype[Any] | None] = [
    np.dtype(name) if hasattr(np, name) else None
    for name in (name if name in _DTYPE_NAMES[:12] else "-" for name in _DTYPE_NAMES)
]
NUMPY_CODES = {dtype.num: code for code, dtype in enumerate(NUMPY_DTYPES) if dtype is not None}

# How a ``TensorMeta`` represents a tensor: the bits of ``flags``, and the values of ``layout``.
REQUIRES_GRAD, PARAMETER, CONJUGATE, NEGATIVE, COALESCED, GAPS = 1, 2, 4, 8, 16, 32
STRIDED, COO, COMPRESSED, QUANTIZED, QUANTIZED_CHANNELS, META = range(6)
