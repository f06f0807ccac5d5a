"""Tensors in safetensors files: each owner writes and reads its own.

The library of that name reads them.  It does not write them here: it takes a path, not a descriptor, and makes a file
that only its owner may read, whatever the umask.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.parameter import is_lazy

from telegrad.checkpoint.files import create, finish, open_file

# What a file can hold: torch's name and the format's.
_DTYPES = dict(
    pair.split(":")
    for pair in "float64:F64 float32:F32 float16:F16 bfloat16:BF16 float8_e4m3fn:F8_E4M3 float8_e4m3fnuz:F8_E4M3FNUZ "
    "float8_e5m2:F8_E5M2 float8_e5m2fnuz:F8_E5M2FNUZ complex64:C64 bool:BOOL int64:I64 int32:I32 int16:I16 int8:I8 "
    "uint64:U64 uint32:U32 uint16:U16 uint8:U8".split()
)
_AS_REAL = "complex128"  # which it cannot: it goes as pairs of float64

Memory = tuple[object, ...]


class TensorRecord(msgspec.Struct, frozen=True):
    """Where a tensor is, and what it must be."""

    file: str
    key: str  # of tensors that share their memory one is stored, and all have its key
    dtype: str
    shape: tuple[int, ...]
    crc32: int

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


def describe(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def unfit(name: str, tensor: Tensor) -> str | None:
    """Why this tensor cannot be written; None if it can."""
    what = None
    if is_lazy(tensor):
        what = "is not initialized yet"
    elif type(tensor.detach()) is not Tensor:
        what = f"is a {type(tensor).__qualname__}, which a file cannot hold"
    elif tensor.layout is not torch.strided:
        what = f"is sparse ({tensor.layout}), which a file cannot hold"
    elif tensor.is_meta:
        what = "is on the meta device, and has no values"
    elif dtype_name(tensor) not in _DTYPES and dtype_name(tensor) != _AS_REAL:
        what = f"is of {tensor.dtype}, which a file cannot hold"
    return what and f"{name} {what}"


def memory_of(tensor: Tensor) -> Memory | None:
    """The same for two tensors that are one, as tied weights are; an empty tensor has no memory."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


# --- writing ----------------------------------------------------------------------------------------------------------


def write(directory: int, file: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorRecord], int]:
    """Writes a file of tensors, safe from a crash of the host; what is in it, and its size."""
    keys: dict[str, str] = {}
    first: dict[Memory, str] = {}
    for name, tensor in tensors.items():
        memory = memory_of(tensor)
        keys[name] = name if memory is None else first.setdefault(memory, name)
    with create(file, directory) as new:
        _write_file(new, _storable({name: tensors[name] for name, key in keys.items() if name == key}))
        finish(new)
        size = os.fstat(new.fileno()).st_size
        # The checksums are those of the file: if a tensor changed while it was written, the file can still be loaded.
        with _stored(new.fileno()) as stored:
            sums = {key: _crc32(stored.get_tensor(key)) for key in dict.fromkeys(keys.values())}
    records = {
        name: TensorRecord(file, key, dtype_name(tensors[name]), tuple(tensors[name].shape), sums[key])
        for name, key in keys.items()
    }
    return records, size


def _write_file(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """In the safetensors format: the length of the header, the header (JSON), and the bytes of all tensors."""
    # Widest first: so each begins at a multiple of its item's size, as the header's length is a multiple of 8.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[dtype_name(tensor)], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, tensor in ordered:
        file.write(_bytes(tensor.cpu()))


def _stored(descriptor: int) -> Any:
    """The tensors of an open file; the library opens files by path only, and this is the path of one that is open."""
    return safe_open(f"/proc/self/fd/{descriptor}", framework="pt")


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values, each with memory of its own and without gaps; most are, and are not copied."""
    made = {}
    owners = Counter(_storage(tensor) for tensor in tensors.values())
    for name, tensor in tensors.items():
        each = tensor.detach()
        if dtype_name(each) == _AS_REAL:
            each = torch.view_as_real(each.resolve_conj())
        each = each.resolve_conj().resolve_neg().contiguous()
        if owners[_storage(tensor)] > 1 and _storage(each) == _storage(tensor):
            each = each.clone()
        made[name] = each
    return made


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _crc32(tensor: Tensor) -> int:
    # 2.6 GB/s here; sha256 has 1.7, and an attacker who can change a file can change the manifest as well.
    return zlib.crc32(_bytes(tensor))


# --- reading ----------------------------------------------------------------------------------------------------------


def read(
    directory: int, records: Mapping[str, TensorRecord], sizes: Mapping[str, int]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors, in memory of their own, and what is wrong with the files that have them."""
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for file in dict.fromkeys(record.file for record in records.values()):
        mine = {name: record for name, record in records.items() if record.file == file}
        try:
            with open(open_file(file, directory), "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != sizes.get(file):
                    problems.append(f"{file} has {size:,} bytes, not {sizes.get(file, 0):,}: it is damaged")
                    continue
                found, bad = _read_file(file, opened.fileno(), mine)
        except FileNotFoundError:
            problems.append(f"{file} is missing")
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} cannot be read: {error}")
        else:
            tensors.update(found)
            problems.extend(bad)
    return tensors, problems


def _read_file(name: str, descriptor: int, records: Mapping[str, TensorRecord]) -> tuple[dict[str, Tensor], list[str]]:
    problems: list[str] = []
    made: dict[str, Tensor] = {}
    with _stored(descriptor) as stored:
        there = set(stored.keys())
        for key, record in {record.key: record for record in records.values()}.items():
            if key not in there:
                problems.append(f"{name} has no tensor {key!r}: it is damaged")
                continue
            # A copy of the mapped file: torch lets other threads run while it waits for the disk, where safetensors'
            # own reading holds the interpreter (0.6 s for 256 MB) and a heartbeat could come too late.
            tensor = stored.get_tensor(key).clone()
            if _crc32(tensor) != record.crc32:
                problems.append(f"{name} has other bytes in tensor {key!r} than were saved: it is damaged")
            made[key] = torch.view_as_complex(tensor) if record.dtype == _AS_REAL else tensor
            found = describe(dtype_name(made[key]), made[key].shape)
            if found != str(record):
                problems.append(f"{name} has a tensor {key!r} of {found}, not {record}: it is damaged")
    return {name: made[record.key] for name, record in records.items() if record.key in made}, problems
