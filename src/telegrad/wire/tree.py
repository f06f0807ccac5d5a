"""Plain data as a tree that the header codec writes, and that cannot execute anything when it is read.

Scalars stand for themselves; everything else is a list that begins with its tag.  Tensors and references are numbers
into the tables beside the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.errors import SerializationError
from telegrad.wire.dtypes import DTYPE_CODES, DTYPES
from telegrad.wire.messages import RRefFork


class Reference(Protocol):
    """What the codec must know of an RRef, which it carries beside the tree."""

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork: ...

    def __telegrad_unshare__(self, fork: RRefFork) -> None: ...


class NotPlain(Exception):
    """Something in the value needs pickle."""


#: Levels of containers.  A peer must not bring a thread near the end of its stack: a garbage collection may run there,
#: and references whose ``__del__`` fails are never let go of.
MOST_NESTED = 200

_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_LIST, _TUPLE, _DICT, _SET, _FROZENSET, _TENSOR, _RREF, _COMPLEX = range(8)
_DTYPE, _DEVICE, _SIZE, _BYTEARRAY, _SLICE, _ELLIPSIS, _RANGE, _BIG_INT = range(8, 16)


class TreeWriter:
    """Walks a value once, collecting its tensors and references."""

    __slots__ = ("depth", "positions", "rrefs", "seen", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.positions: dict[int, int] = {}  # id(tensor) -> index, so that one tensor stays one
        self.rrefs: list[Reference] = []
        self.seen: set[int] = set()
        self.depth = 0

    def tensor(self, tensor: Tensor) -> int:
        index = self.positions.get(id(tensor))
        if index is None:
            index = self.positions[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def rref(self, reference: Reference) -> int:
        self.rrefs.append(reference)
        return len(self.rrefs) - 1

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is Tensor:  # these two come with every call, and are not looked up
            return [_TENSOR, self.tensor(value)]
        if kind is tuple:
            return self.items(_TUPLE, value)
        writer = _WRITERS.get(kind)
        if writer is not None:
            return writer(self, value)
        if hasattr(kind, "__telegrad_share__"):
            return [_RREF, self.rref(value)]
        raise NotPlain

    def items(self, tag: int, values: Iterable[Any]) -> list[Any]:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise NotPlain
        node: list[Any] = [tag]
        for value in values:
            node.append(value if type(value) in _SCALARS else self.write(value))
        self.depth -= 1
        return node

    def mutable(self, tag: int, value: Any, values: Iterable[Any]) -> list[Any]:
        # A container that occurs twice (or in itself) must stay one object: pickle can say that, the tree cannot.
        if id(value) in self.seen:
            raise NotPlain
        self.seen.add(id(value))
        return self.items(tag, values)


_WRITERS: dict[type, Callable[[TreeWriter, Any], Any]] = {
    list: lambda w, v: w.mutable(_LIST, v, v),
    dict: lambda w, v: w.mutable(_DICT, v, [part for item in v.items() for part in item]),
    set: lambda w, v: w.mutable(_SET, v, v),
    frozenset: lambda w, v: w.items(_FROZENSET, v),
    torch.nn.Parameter: lambda w, v: [_TENSOR, w.tensor(v)],
    complex: lambda w, v: [_COMPLEX, v.real, v.imag],
    torch.dtype: lambda w, v: [_DTYPE, DTYPE_CODES[v]],
    torch.device: lambda w, v: [_DEVICE, str(v)],
    torch.Size: lambda w, v: [_SIZE, *v],
    bytearray: lambda w, v: w.mutable(_BYTEARRAY, v, (bytes(v),)),
    slice: lambda w, v: w.items(_SLICE, (v.start, v.stop, v.step)),
    type(...): lambda w, v: [_ELLIPSIS],
    range: lambda w, v: [_RANGE, v.start, v.stop, v.step],
}


class TreeReader:
    __slots__ = ("depth", "rrefs", "tensors")

    def __init__(self, tensors: Sequence[Tensor], rrefs: Sequence[Any]) -> None:
        self.tensors = tensors
        self.rrefs = rrefs
        self.depth = 0

    def read(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        try:
            reader = _READERS[node[0]]
        except (IndexError, KeyError, TypeError):
            raise SerializationError("a body holds a node of unknown kind") from None
        return reader(self, node)

    def items(self, node: list[Any]) -> list[Any]:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise SerializationError(f"a body holds more than {MOST_NESTED} nested nodes")
        read = self.read
        parts = [read(part) if type(part) is list else part for part in node[1:]]
        self.depth -= 1
        return parts


def _read_dict(reader: TreeReader, node: list[Any]) -> dict[Any, Any]:
    parts = iter(reader.items(node))
    return dict(zip(parts, parts, strict=True))


def _read_bytearray(_: TreeReader, node: list[Any]) -> bytearray:
    return bytearray(memoryview(node[1]))  # of a number, bytearray would make that many zeros


_READERS: dict[int, Callable[[TreeReader, list[Any]], Any]] = {
    _LIST: TreeReader.items,
    _TUPLE: lambda r, n: tuple(r.items(n)),
    _DICT: _read_dict,
    _SET: lambda r, n: set(r.items(n)),
    _FROZENSET: lambda r, n: frozenset(r.items(n)),
    _TENSOR: lambda r, n: r.tensors[n[1]],
    _RREF: lambda r, n: r.rrefs[n[1]],
    _COMPLEX: lambda r, n: complex(n[1], n[2]),
    _DTYPE: lambda r, n: DTYPES[n[1]],
    _DEVICE: lambda r, n: torch.device(n[1]),
    _SIZE: lambda r, n: torch.Size(n[1:]),
    _BYTEARRAY: _read_bytearray,
    _SLICE: lambda r, n: slice(*r.items(n)),
    _ELLIPSIS: lambda r, n: ...,
    _RANGE: lambda r, n: range(*n[1:]),
}
