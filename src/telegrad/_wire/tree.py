"""Plain data as a tree that the header codec encodes; reading it cannot execute code.

Scalars represent themselves.  Everything else is a :class:`Node` with a tag and parts.  Tensors and references are
indices into the tables beside the tree.

Hashes of numbers and tuples are the same in every process, so a peer can choose colliding keys that make a dict take
seconds to build.  So the CPU time for building all dicts and sets of a body is limited to ten times what ordinary keys
need: 2 microseconds for each number or text, 10 for each tuple.  The time is checked between keys.  Comparing two sets
of sets can take far longer than building them, so neither an element of a set nor a key of a dict may contain a set of
sets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.msgpack import Ext
from torch import Tensor

from telegrad._wire.dtypes import DTYPE_CODES, DTYPES
from telegrad._wire.messages import Node, RRefFork, Tree
from telegrad.errors import SerializationError


class Reference(Protocol):
    """The methods of an RRef that ``values`` uses to send it."""

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork: ...

    def __telegrad_unshare__(self, fork: RRefFork) -> None: ...


class NotPlain(Exception):
    """The value contains something that only pickle can send."""


_SCALARS = frozenset((type(None), bool, int, float, str))
_BYTES = 0  # the only kind of Ext
#: Levels of containers.  A peer must not be able to bring a thread near the end of its stack: a garbage collection may
#: run there, and a reference whose ``__del__`` fails is never released.
MOST_NESTED = 200

_LIST, _TUPLE, _DICT, _SET, _FROZENSET, _TENSOR, _RREF, _COMPLEX = range(8)
_DTYPE, _DEVICE, _SIZE, _BYTEARRAY, _SLICE, _ELLIPSIS, _RANGE = range(8, 15)

_MOST_NESTED_SETS = 2  # sets inside each other; a key of a dict counts as an element of a set
_KEYS_AT_ONCE = 128  # keys that are inserted between two checks; if all of them collide: 0.2 ms
_SECONDS_PER_KEY = 2e-6
_SECONDS_PER_COMPOSITE_KEY = 10e-6  # a tuple or a frozenset
_SECONDS_PER_ITEM = 0.1e-6  # of all containers: long tuples take longer to hash and compare
_SECONDS_TO_SPARE = 0.05  # for a garbage collection or the resizing of a big table


class TreeWriter(Struct):
    """Walks a value once, collecting its tensors and references."""

    tensors: list[Tensor] = []
    positions: dict[int, int] = {}  # id(tensor) -> index: a tensor that occurs twice is sent once
    rrefs: list[Reference] = []
    seen: set[int] = set()
    depth: int = 0
    nested_sets: int = 0

    def tensor(self, tensor: Tensor) -> int:
        index = self.positions.get(id(tensor))
        if index is None:
            index = self.positions[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def rref(self, reference: Reference) -> int:
        self.rrefs.append(reference)
        return len(self.rrefs) - 1

    def write(self, value: Any) -> Tree:
        kind = type(value)
        if kind in _SCALARS:
            return value  # type: ignore[no-any-return]
        if kind is Tensor:  # the two most common types, without a lookup
            return Node(_TENSOR, [self.tensor(value)])
        if kind is tuple:
            return self.items(_TUPLE, value)
        writer = _WRITERS.get(kind)
        if writer is not None:
            return writer(self, value)
        if hasattr(kind, "__telegrad_share__"):
            return Node(_RREF, [self.rref(value)])
        raise NotPlain

    def items(self, tag: int, values: Iterable[Any]) -> Node:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise NotPlain
        parts = [value if type(value) in _SCALARS else self.write(value) for value in values]
        self.depth -= 1
        return Node(tag, parts)

    def hashed(self, tag: int, values: Iterable[Any]) -> Node:
        """The elements of a set or the keys of a dict."""
        self.nested_sets += 1
        if self.nested_sets > _MOST_NESTED_SETS:
            raise NotPlain
        node = self.items(tag, values)
        self.nested_sets -= 1
        return node

    def dictionary(self, value: dict[Any, Any]) -> Node:
        keys, values = self.hashed(_DICT, value), self.items(_DICT, value.values())
        return Node(_DICT, [part for item in zip(keys.parts, values.parts, strict=True) for part in item])

    def once(self, value: Any) -> TreeWriter:
        # A container that occurs twice, or in itself, must stay one object, which pickle can express and a tree cannot.
        if id(value) in self.seen:
            raise NotPlain
        self.seen.add(id(value))
        return self


_WRITERS: dict[type, Callable[[TreeWriter, Any], Tree]] = {
    bytes: lambda w, v: Ext(_BYTES, v),
    list: lambda w, v: w.once(v).items(_LIST, v),
    dict: lambda w, v: w.once(v).dictionary(v),
    set: lambda w, v: w.once(v).hashed(_SET, v),
    frozenset: lambda w, v: w.hashed(_FROZENSET, v),
    torch.nn.Parameter: lambda w, v: Node(_TENSOR, [w.tensor(v)]),
    complex: lambda w, v: Node(_COMPLEX, [v.real, v.imag]),
    torch.dtype: lambda w, v: Node(_DTYPE, [DTYPE_CODES[v]]),
    torch.device: lambda w, v: Node(_DEVICE, [str(v)]),
    torch.Size: lambda w, v: Node(_SIZE, list(v)),
    bytearray: lambda w, v: w.once(v).items(_BYTEARRAY, (bytes(v),)),
    slice: lambda w, v: w.items(_SLICE, (v.start, v.stop, v.step)),
    type(...): lambda w, v: Node(_ELLIPSIS, []),
    range: lambda w, v: Node(_RANGE, [v.start, v.stop, v.step]),
}


class TreeReader(Struct):
    """Builds a value from its tree, tensors and references."""

    tensors: Sequence[Tensor]
    rrefs: Sequence[Any]
    depth: int = 0
    nested_sets: int = 0
    item_count: int = 0
    key_seconds: float = 0.0  # CPU time that keys took to insert
    key_allowance: float = _SECONDS_TO_SPARE

    def read(self, node: Tree) -> Any:
        if type(node) is Node:
            reader = _READERS.get(node.tag)
            if reader is None:
                raise SerializationError("a body holds a node of unknown kind")
            return reader(self, node.parts)
        if type(node) is Ext:
            if node.code != _BYTES:
                raise SerializationError("a body holds bytes of unknown kind")
            return bytes(node.data)
        return node

    def items(self, parts: list[Any]) -> list[Any]:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise SerializationError(f"a body holds more than {MOST_NESTED} nested nodes")
        read = self.read
        items = [part if type(part) in _SCALARS else read(part) for part in parts]
        self.depth -= 1
        self.item_count += len(items)
        return items

    def hashed(self, parts: list[Any]) -> list[Any]:
        """The elements of a set or the keys of a dict."""
        self.nested_sets += 1
        if self.nested_sets > _MOST_NESTED_SETS:
            raise SerializationError(
                f"a body holds more than {_MOST_NESTED_SETS} sets inside each other (keys of a dict count as a set): "
                "send the inner ones as sorted tuples"
            )
        keys = self.items(parts)
        self.nested_sets -= 1
        return keys

    def insert_all(self, keys: Sequence[Any], at_once: int, insert: Callable[[slice], None]) -> None:
        """Inserts keys in chunks; raises if the keys of this body take far longer than ordinary ones."""
        for key in keys:
            hash(key)  # not timed: text and bytes cache their hash, and hashing a long one is not a collision
        per_chunk = _SECONDS_PER_COMPOSITE_KEY if at_once == 1 else at_once * _SECONDS_PER_KEY
        for_items = self.item_count * _SECONDS_PER_ITEM
        start = time.thread_time() - self.key_seconds
        for first in range(0, len(keys), at_once):
            insert(slice(first, first + at_once))
            self.key_seconds = time.thread_time() - start
            self.key_allowance += per_chunk
            if self.key_seconds > self.key_allowance + for_items:
                raise SerializationError(
                    f"the keys of a dict or set collide: those of this message took {self.key_seconds:.2f} s of CPU "
                    f"time to insert, and {self.key_allowance + for_items:.2f} s is the limit for this number of keys. "
                    "Send them as a list"
                )


def _read_dict(reader: TreeReader, parts: list[Any]) -> dict[Any, Any]:
    if len(parts) % 2:
        raise SerializationError("a body holds a dict with a key without a value")
    key_parts = parts[::2]
    keys, values = reader.hashed(key_parts), reader.items(parts[1::2])
    at_once = _keys_at_once(key_parts)
    if len(keys) <= at_once:
        return dict(zip(keys, values, strict=True))
    built: dict[Any, Any] = {}
    reader.insert_all(keys, at_once, lambda chunk: built.update(zip(keys[chunk], values[chunk], strict=True)))
    return built


def _read_set(reader: TreeReader, parts: list[Any]) -> set[Any]:
    items = reader.hashed(parts)
    at_once = _keys_at_once(parts)
    if len(items) <= at_once:
        return set(items)
    built: set[Any] = set()
    reader.insert_all(items, at_once, lambda chunk: built.update(items[chunk]))
    return built


def _keys_at_once(parts: list[Any]) -> int:
    """Number of keys to insert between two checks of the time: 1 if they have parts to compare."""
    return 1 if any(type(part) is Node for part in parts) else _KEYS_AT_ONCE


def _read_bytearray(reader: TreeReader, parts: list[Any]) -> bytearray:
    return bytearray(memoryview(reader.read(parts[0])))  # bytearray(n) of a number would make n zeros


_READERS: dict[int, Callable[[TreeReader, list[Any]], Any]] = {
    _LIST: TreeReader.items,
    _TUPLE: lambda r, n: tuple(r.items(n)),
    _DICT: _read_dict,
    _SET: _read_set,
    _FROZENSET: lambda r, n: frozenset(_read_set(r, n)),
    _TENSOR: lambda r, n: r.tensors[n[0]],
    _RREF: lambda r, n: r.rrefs[n[0]],
    _COMPLEX: lambda r, n: complex(n[0], n[1]),
    _DTYPE: lambda r, n: DTYPES[n[0]],
    _DEVICE: lambda r, n: torch.device(n[0]),
    _SIZE: lambda r, n: torch.Size(n),
    _BYTEARRAY: _read_bytearray,
    _SLICE: lambda r, n: slice(*r.items(n)),
    _ELLIPSIS: lambda r, n: ...,
    _RANGE: lambda r, n: range(*n),
}
