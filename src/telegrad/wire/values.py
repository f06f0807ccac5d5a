"""Python values to bodies and back.

Plain data (None, numbers, text, bytes, containers of them, tensors, references) becomes a tree that the header codec
writes; reading it back cannot execute anything.  Whatever else is in a value sends the whole value through pickle,
which only an authenticated peer's bytes ever reach, and which ``allow_pickle=False`` switches off.
"""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.errors import SerializationError, TelegradError
from telegrad.wire.callables import MAIN_MODULES
from telegrad.wire.frames import MAX_HEADER
from telegrad.wire.messages import EMPTY_BODY, Body, RRefFork, TensorMeta
from telegrad.wire.tensors import (
    DTYPE_CODES,
    DTYPES,
    TABLE_TYPES,
    DeviceMap,
    NotInTable,
    Packed,
    in_table,
    no_device_map,
)
from telegrad.wire.tensors import pack as pack_tensors
from telegrad.wire.tensors import unpack as unpack_tensors


class Reference(Protocol):
    """What the codec must know of an RRef, which it carries beside the tree."""

    def __telegrad_share__(self, to: int) -> RRefFork: ...

    def __telegrad_unshare__(self, fork: RRefFork) -> None: ...


@dataclass(slots=True)
class Route:
    """What the way to one peer allows."""

    to: int
    allow_pickle: bool = True
    allow_cloudpickle: bool = True
    same_main: bool = True  # the peer runs the same main program, so names in it mean the same there
    device_for: DeviceMap = no_device_map
    # The outgoing interceptor: sees the tensors, returns what its twin should know.
    outgoing: Callable[[int, list[Tensor]], Any] | None = None


@dataclass(slots=True)
class Parcel:
    """A body on its way out, with the memory that goes beside the header."""

    body: Body = EMPTY_BODY
    stream: Sequence[memoryview] = ()
    keep: Sequence[object] = ()  # must stay alive until the receiver has it
    stays: int = 0  # how many bytes stay in our memory, for the receiver to read


EMPTY_PARCEL = Parcel()


class _NotPlain(Exception):
    """Something in the value needs pickle."""


# --- the plain tree: scalars stand for themselves, everything else is a list that begins with its tag ---------------

_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_LIST, _TUPLE, _DICT, _SET, _FROZENSET, _TENSOR, _RREF, _COMPLEX = range(8)
_DTYPE, _DEVICE, _SIZE, _BYTEARRAY, _SLICE, _ELLIPSIS, _RANGE, _BIG_INT = range(8, 16)


class _Writer:
    """Walks a value once, collecting its tensors and references."""

    __slots__ = ("positions", "rrefs", "seen", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.positions: dict[int, int] = {}  # id(tensor) -> index, so that one tensor stays one
        self.rrefs: list[Reference] = []
        self.seen: set[int] = set()

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
        writer = _WRITERS.get(kind)
        if writer is not None:
            return writer(self, value)
        if hasattr(kind, "__telegrad_share__"):
            return [_RREF, self.rref(value)]
        raise _NotPlain

    def items(self, tag: int, values: Iterable[Any]) -> list[Any]:
        write = self.write
        node: list[Any] = [tag]
        node.extend([value if type(value) in _SCALARS else write(value) for value in values])
        return node

    def mutable(self, tag: int, value: Any, values: Iterable[Any]) -> list[Any]:
        # A container that occurs twice (or in itself) must stay one object: pickle can say that, the tree cannot.
        if id(value) in self.seen:
            raise _NotPlain
        self.seen.add(id(value))
        return self.items(tag, values)


_WRITERS: dict[type, Callable[[_Writer, Any], Any]] = {
    tuple: lambda w, v: w.items(_TUPLE, v),
    list: lambda w, v: w.mutable(_LIST, v, v),
    dict: lambda w, v: w.mutable(_DICT, v, [part for item in v.items() for part in item]),
    set: lambda w, v: w.mutable(_SET, v, v),
    frozenset: lambda w, v: w.items(_FROZENSET, v),
    Tensor: lambda w, v: [_TENSOR, w.tensor(v)],
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


class _Reader:
    __slots__ = ("rrefs", "tensors")

    def __init__(self, tensors: Sequence[Tensor], rrefs: Sequence[Any]) -> None:
        self.tensors = tensors
        self.rrefs = rrefs

    def read(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        try:
            reader = _READERS[node[0]]
        except (IndexError, KeyError, TypeError):
            raise SerializationError("a body holds a node of unknown kind") from None
        return reader(self, node)

    def items(self, node: list[Any]) -> list[Any]:
        read = self.read
        return [read(part) if type(part) is list else part for part in node[1:]]


def _read_dict(reader: _Reader, node: list[Any]) -> dict[Any, Any]:
    parts = iter(reader.items(node))
    return dict(zip(parts, parts, strict=True))


def _read_bytearray(_: _Reader, node: list[Any]) -> bytearray:
    return bytearray(memoryview(node[1]))  # of a number, bytearray would make that many zeros


_READERS: dict[int, Callable[[_Reader, list[Any]], Any]] = {
    _LIST: _Reader.items,
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


# --- pickle ---------------------------------------------------------------------------------------------------------


class _NeedsCloudpickle(Exception):
    """A function or class of this main program, which the other side does not run."""


def _reduce(writer: _Writer, same_main: bool, value: Any) -> Any:
    """Tensors and references leave the pickle for the tables beside it."""
    if isinstance(value, Tensor) and type(value) in TABLE_TYPES and in_table(value):
        return _table_tensor, (writer.tensor(value),)
    if hasattr(type(value), "__telegrad_share__"):
        return _table_rref, (writer.rref(value),)
    if not same_main and isinstance(value, (FunctionType, type)) and value.__module__ in MAIN_MODULES:
        raise _NeedsCloudpickle(
            f"{value.__qualname__!r} is defined in this main program, which the other side does not run, "
            "and cloudpickle is switched off"
        )
    return NotImplemented


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, writer: _Writer, same_main: bool, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._writer, self._same_main = writer, same_main

    def reducer_override(self, value: Any) -> Any:
        return _reduce(self._writer, self._same_main, value)


@functools.cache
def _cloud_pickler() -> Any:
    """The class, made once: a class is a cycle of references, and would keep what it sends alive until the next GC."""
    import cloudpickle  # only programs that send lambdas pay for it

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
        writer: _Writer

        def reducer_override(self, value: Any) -> Any:
            reduced = _reduce(self.writer, True, value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return CloudPickler


_tables = threading.local()  # what the pickle being loaded on this thread may refer to


def _table_tensor(index: int) -> Tensor:
    return _tables.tensors[index]  # type: ignore[no-any-return]


def _table_rref(index: int) -> Any:
    return _tables.rrefs[index]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "__main__" if module in MAIN_MODULES else module
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise SerializationError(f"cannot import {name!r} from module {module!r} here: {error}") from error


def _dump(value: Any, route: Route) -> tuple[_Writer, bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    try:
        writer, file = _Writer(), io.BytesIO()
        _Pickler(file, writer, route.same_main, buffers).dump(value)
        return writer, file.getvalue(), buffers
    except Exception as plain_error:
        if not route.allow_cloudpickle:
            raise _cannot_pickle(value, plain_error) from plain_error
    buffers.clear()
    try:
        writer, file = _Writer(), io.BytesIO()
        pickler = _cloud_pickler()(file, protocol=5, buffer_callback=buffers.append)
        pickler.writer = writer
        pickler.dump(value)
        return writer, file.getvalue(), buffers
    except Exception as error:
        raise _cannot_pickle(value, error) from error


def _cannot_pickle(value: Any, error: Exception) -> SerializationError:
    return SerializationError(
        f"cannot send a value of type {type(value).__qualname__}: {str(error) or type(error).__name__}"
    )


# --- both together --------------------------------------------------------------------------------------------------


def pack(value: Any, route: Route, encode_tree: Callable[[Any], bytes], lane_limit: int | None = None) -> Parcel:
    """Turns a value into a parcel for one peer.

    ``encode_tree`` tries the tree, so that its failure is known here.  Buffers of ``lane_limit`` bytes and more stay in
    our memory, for the peer to read from there.
    """
    packed = Packed()
    pickle_buffers: tuple[int, ...] = ()
    extra: Any = None
    try:
        writer = _Writer()
        tree = writer.write(value)
        if len(encode_tree(tree)) > MAX_HEADER // 2:
            raise _NotPlain  # the header has no room for it; a pickle goes beside the header
        if writer.tensors:
            metas, extra = _pack_tensors(writer.tensors, packed, route, lane_limit)
        else:
            metas = ()
        pickle_index = -1
    except (_NotPlain, NotInTable, RecursionError, OverflowError, UnicodeEncodeError, TypeError, KeyError) as reason:
        if isinstance(reason, TelegradError):
            raise
        if not route.allow_pickle:
            raise SerializationError(
                f"cannot send a value of type {type(value).__qualname__} without pickle (allow_pickle=False): "
                "only plain data, tensors and references can go"
            ) from reason
        tree = None
        packed = Packed()
        writer, data, out_of_band = _dump(value, route)
        pickle_index = packed.add(data, data, None)
        pickle_buffers = tuple(_add_out_of_band(packed, buffer, lane_limit) for buffer in out_of_band)
        metas, extra = _pack_tensors(writer.tensors, packed, route, lane_limit)
    # Last, when nothing can fail any more: from here on the ledger counts on these references to arrive.
    rrefs = _share(writer.rrefs, route.to) if writer.rrefs else ()
    body = Body(tree, pickle_index, pickle_buffers, tuple(packed.buffers), metas, rrefs, extra)  # type: ignore[arg-type]
    return Parcel(body, packed.stream, packed.keep, packed.stays)


def _share(references: list[Reference], to: int) -> tuple[RRefFork, ...]:
    """Shares all of them or none."""
    forks: list[RRefFork] = []
    try:
        for reference in references:
            forks.append(reference.__telegrad_share__(to))
    except BaseException:
        for reference, fork in zip(references, forks, strict=False):
            reference.__telegrad_unshare__(fork)
        raise
    return tuple(forks)


def _pack_tensors(
    tensors: list[Tensor], packed: Packed, route: Route, lane_limit: int | None
) -> tuple[tuple[TensorMeta, ...], Any]:
    metas = pack_tensors(tensors, packed, lane_limit, route.device_for)
    return metas, route.outgoing(route.to, tensors) if route.outgoing is not None and tensors else None


def _add_out_of_band(packed: Packed, buffer: pickle.PickleBuffer, lane_limit: int | None) -> int:
    memory = buffer.raw()
    return packed.add(memory, memory, lane_limit if len(memory) else None)


def unpack(
    body: Body, buffers: Sequence[Any], rrefs: Sequence[Any], tensors: Sequence[Tensor], allow_pickle: bool
) -> Any:
    """The value of a body whose buffers have all arrived and whose tensors and references are rebuilt."""
    if body.pickle < 0:
        tree = body.tree
        if type(tree) is not list:
            return tree
        try:
            return _Reader(tensors, rrefs).read(tree)
        except SerializationError:
            raise
        except Exception as error:
            raise SerializationError(f"a body holds a malformed node: {type(error).__name__}: {error}") from error
    if not allow_pickle:
        raise SerializationError("the peer sent a pickle, and this worker takes none (allow_pickle=False)")
    outer = _tables.__dict__.copy()
    _tables.tensors, _tables.rrefs = tensors, rrefs
    try:
        file = io.BytesIO(buffers[body.pickle])
        return _Unpickler(file, buffers=[buffers[index] for index in body.pickle_buffers]).load()
    except SerializationError:
        raise
    except Exception as error:
        raise SerializationError(f"cannot rebuild a value here: {type(error).__name__}: {error}") from error
    finally:
        _tables.__dict__.clear()
        _tables.__dict__.update(outer)


def tensors_of(body: Body, buffers: Sequence[Any]) -> list[Tensor]:
    try:
        return unpack_tensors(body.tensors, buffers) if body.tensors else []
    except SerializationError:
        raise
    except Exception as error:  # torch raises whatever it likes, an AssertionError for a device that is not there
        raise SerializationError(f"cannot rebuild a tensor here: {error}") from error
