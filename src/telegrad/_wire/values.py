"""Python values to message bodies and back.

Plain data (None, numbers, text, bytes, containers of them, tensors, references) becomes a tree that the header codec
encodes; reading it cannot execute code.  A value with anything else in it is pickled as a whole.  Only pickles from
authenticated peers are loaded, and ``allow_pickle=False`` turns pickle off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw, Struct
from torch import Tensor

from telegrad._wire.codec import encode
from telegrad._wire.frames import MAX_HEADER
from telegrad._wire.messages import EMPTY_BODY, Body, RRefFork, TensorMeta
from telegrad._wire.pickles import advice_on, dump, load
from telegrad._wire.tensors import (
    CopyToSegment,
    DeviceMap,
    NotInTable,
    OutgoingBuffers,
    Segment,
    in_table,
    no_device_map,
)
from telegrad._wire.tensors import pack as pack_tensors
from telegrad._wire.tree import NotPlain, Reference, TreeReader, TreeWriter
from telegrad.errors import SerializationError, TelegradError


@dataclass(slots=True)
class Route:
    """How values for one peer are packed."""

    to: int
    allow_pickle: bool = True
    allow_cloudpickle: bool = True
    same_main: bool = True  # the peer runs the same main program, so names in ``__main__`` mean the same there
    device_for: DeviceMap = no_device_map
    # The outgoing interceptor: is given the tensors of a body, returns the body's ``extra``.
    outgoing: Callable[[int, list[Tensor]], Any] | None = None


class PackedValue(Struct):
    """A body to send, and the memory that goes beside its header."""

    body: Body = EMPTY_BODY
    stream: Sequence[memoryview] = ()
    segments: Sequence[Segment] = ()  # not to be reused until the receiver releases them
    lent: Sequence[Reference] = ()  # to be kept alive until the answer comes


PACKED_NONE = PackedValue()

#: The fields of a Body that hold the value itself: all up to ``tensors``.
_Fields = tuple[Any, int, tuple[int, ...], tuple[Any, ...], tuple[TensorMeta, ...]]


def pack(value: Any, route: Route, to_segment: CopyToSegment | None = None, answered: bool = False) -> PackedValue:
    """Packs a value for one peer.

    ``to_segment`` copies big buffers into shared memory.  ``answered``: the value belongs to a request, so references
    may be lent to their owner instead of shared.
    """
    try:
        writer, out, fields = _write(value, route, to_segment)
    except SerializationError as error:
        raise _located(value, route, error, answered) from error.__cause__
    extra = route.outgoing(route.to, writer.tensors) if route.outgoing is not None else None
    if not writer.rrefs:
        return PackedValue(Body(*fields, (), extra), out.stream, out.segments)
    # The last step, because nothing may fail after it: the ledger expects these references to arrive.
    rrefs = _share(writer.rrefs, route.to, answered)
    lent = [reference for reference, fork in zip(writer.rrefs, rrefs, strict=True) if fork.lent]
    return PackedValue(Body(*fields, rrefs, extra), out.stream, out.segments, lent)


def _write(value: Any, route: Route, to_segment: CopyToSegment | None) -> tuple[TreeWriter, OutgoingBuffers, _Fields]:
    """The tensors and references of a value, its buffers, and its part of the body."""
    out = OutgoingBuffers(to_segment)
    try:
        writer = TreeWriter()
        tree = encode(writer.write(value))
        if len(tree) > MAX_HEADER // 2:
            raise NotPlain  # too long for the header; a pickle goes beside it
        metas = pack_tensors(writer.tensors, out, route.device_for) if writer.tensors else ()
        return writer, out, (Raw(tree), -1, (), tuple(out.buffers), metas)
    except (NotPlain, NotInTable, RecursionError, OverflowError, UnicodeEncodeError, TypeError, KeyError) as reason:
        if isinstance(reason, TelegradError):
            raise
        if not route.allow_pickle:
            raise SerializationError(
                f"cannot send a value of type {type(value).__qualname__} without pickle (allow_pickle=False): "
                f"only plain data, tensors and references can be sent"
            ) from reason
    out = OutgoingBuffers(to_segment)
    writer, data, out_of_band = dump(value, route.same_main, route.allow_cloudpickle)
    pickle = out.add(data)
    pickle_buffers = tuple(out.add(buffer.raw()) for buffer in out_of_band)
    metas = pack_tensors(writer.tensors, out, route.device_for)
    return writer, out, (None, pickle, pickle_buffers, tuple(out.buffers), metas)


_DEEPEST_PATH = 16


def _located(value: Any, route: Route, error: SerializationError, argument: bool) -> SerializationError:
    """The error of the smallest part of the value that cannot be sent, with advice; its ``path`` leads to that part."""
    path: list[str] = []
    while len(path) < _DEEPEST_PATH:
        for step, part in _parts_of(value, route.allow_pickle):
            try:
                _write(part, route, None)
            except SerializationError as problem:
                path.append(step)
                value, error = part, problem
                break
            except Exception:
                continue
        else:
            break
    error.args = (f"{error}{advice_on(value, argument)}",)
    error.path = tuple(path)
    return error


def _parts_of(value: Any, pickled: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif pickled and not callable(value) and _goes_by_attributes(type(value)):
        for name, part in vars(value).items():
            yield f".{name}", part


def _goes_by_attributes(kind: Any) -> bool:
    """Whether pickle sends an object of that class as its ``__dict__``."""
    own = [getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")]
    return all(own) and "__dict__" in dir(kind)


class Bundle:
    """A list of tensors for one peer that may grow until it is sent.  It needs no tree."""

    __slots__ = ("_extra", "_metas", "_out", "_recorded", "_route")

    def __init__(self, route: Route, to_segment: CopyToSegment | None = None, recorded: bool = True) -> None:
        self._route = route
        self._recorded = recorded
        self._out = OutgoingBuffers(to_segment)
        self._metas: tuple[TensorMeta, ...] = ()
        self._extra: Any = None

    def add(self, tensors: list[Tensor]) -> None:
        """Packs more tensors.  Only those of the first call may require gradients."""
        try:
            for tensor in tensors:
                if type(tensor) is not Tensor and not in_table(tensor):
                    raise NotInTable
            self._metas += pack_tensors(tensors, self._out, self._route.device_for)
        except NotInTable:
            raise SerializationError("a tensor among them can only go through pickle") from None
        if self._recorded and self._route.outgoing is not None:
            extra = self._route.outgoing(self._route.to, tensors)
            self._extra = self._extra or extra

    @property
    def is_small(self) -> bool:
        """Whether all of its memory goes inside the header."""
        return not (self._out.stream or self._out.segments)

    def packed(self) -> PackedValue:
        out = self._out
        body = Body(buffers=tuple(out.buffers), tensors=self._metas, extra=self._extra)  # type: ignore[arg-type]
        return PackedValue(body, out.stream, out.segments)


def _share(references: list[Reference], to: int, answered: bool) -> tuple[RRefFork, ...]:
    """Records in the ledger that these references are sent; if one fails, none is."""
    forks: list[RRefFork] = []
    try:
        for reference in references:
            forks.append(reference.__telegrad_share__(to, answered))
    except BaseException:
        for reference, fork in zip(references, forks, strict=False):
            reference.__telegrad_unshare__(fork)
        raise
    return tuple(forks)


def unpack(
    body: Body, buffers: Sequence[Any], rrefs: Sequence[Any], tensors: Sequence[Tensor], allow_pickle: bool
) -> Any:
    """The value of a body, from its buffers and its rebuilt tensors and references."""
    if body.pickle < 0:
        tree = body.tree
        if tree is None:
            return list(tensors) or None
        try:
            return TreeReader(tensors, rrefs).read(tree)
        except SerializationError:
            raise
        except Exception as error:
            raise SerializationError(f"a body holds a malformed node: {type(error).__name__}: {error}") from error
    if not allow_pickle:
        raise SerializationError("the peer sent a pickle, and this worker takes none (allow_pickle=False)")
    try:
        data, out_of_band = buffers[body.pickle], [buffers[index] for index in body.pickle_buffers]
    except IndexError:
        raise SerializationError("a body names a buffer that it does not have") from None
    return load(data, out_of_band, tensors, rrefs)
