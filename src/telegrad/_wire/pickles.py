"""Pickle, for values that are not plain data, between authenticated workers."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import threading
from collections.abc import Sequence
from types import AsyncGeneratorType, FunctionType, GeneratorType
from typing import Any

from torch import Tensor

from telegrad._torch import FutureBase
from telegrad._wire.callables import MAIN_MODULES, name_of
from telegrad._wire.tensors import TABLE_TYPES, in_table
from telegrad._wire.tree import TreeWriter
from telegrad.errors import SerializationError


class _NeedsCloudpickle(Exception):
    """A function or class of this main program, which the peer does not run."""


def _reduce(writer: TreeWriter, same_main: bool, value: Any) -> Any:
    """Puts tensors and references into the tables beside the pickle, and their index into the pickle."""
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
    def __init__(
        self, file: io.BytesIO, writer: TreeWriter, same_main: bool, buffers: list[pickle.PickleBuffer]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._writer, self._same_main = writer, same_main

    def reducer_override(self, value: Any) -> Any:
        return _reduce(self._writer, self._same_main, value)


@functools.cache
def _cloud_pickler() -> Any:
    """The class, made once: a class is a reference cycle, and would keep what it pickles alive until the next GC."""
    import cloudpickle  # imported only by programs that send lambdas

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
        writer: TreeWriter
        same_main: bool

        def reducer_override(self, value: Any) -> Any:
            if self.same_main and _is_of_main(value):
                return value.__qualname__  # by name: a copy of a class would not be the callee's class
            reduced = _reduce(self.writer, True, value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return CloudPickler


def _is_of_main(value: Any) -> bool:
    """Whether this is a function or class of the main program that can be found by name."""
    if not isinstance(value, (FunctionType, type)) or value.__module__ not in MAIN_MODULES:
        return False
    return name_of(value) is not None


_tables = threading.local()  # the tensors and references of the pickle being loaded on this thread


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


def dump(value: Any, same_main: bool, allow_cloudpickle: bool) -> tuple[TreeWriter, bytes, list[pickle.PickleBuffer]]:
    """The tables of a value, its pickle, and the buffers (of arrays, for example) that are not copied into it."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        writer, file = TreeWriter(), io.BytesIO()
        _Pickler(file, writer, same_main, buffers).dump(value)
        return writer, file.getvalue(), buffers
    except (Exception, SystemExit) as plain_error:  # a value's own code may even raise SystemExit
        if not allow_cloudpickle:
            raise _cannot_pickle(value, plain_error) from plain_error
    buffers.clear()
    try:
        writer, file = TreeWriter(), io.BytesIO()
        pickler = _cloud_pickler()(file, protocol=5, buffer_callback=buffers.append)
        pickler.writer, pickler.same_main = writer, same_main
        pickler.dump(value)
        return writer, file.getvalue(), buffers
    except (Exception, SystemExit) as error:
        raise _cannot_pickle(value, error) from error


def _cannot_pickle(value: Any, error: BaseException) -> SerializationError:
    reason = str(error) or type(error).__name__
    return SerializationError(f"cannot send a value of type {type(value).__qualname__}: {reason}")


def advice_on(value: Any, argument: bool) -> str:
    """What to send in place of a value that cannot be sent, as an argument of a call or as its result."""
    if isinstance(value, FutureBase):
        if argument:
            return "; wait for the future first, and send its value"
        return "; wait for the future on the callee, or let an async_execution function return it"
    if isinstance(value, (GeneratorType, AsyncGeneratorType)):
        return f"; {'send' if argument else 'return'} a list, or an RRef to an object whose method gives the next item"
    if inspect.isawaitable(value):
        return (
            "; await it first, and send its result"
            if argument
            else "; make the function `async def` and await it there"
        )
    if "torch.jit" in type(value).__module__:
        return "; TorchScript cannot be sent, send the Python function"
    return ""


def load(data: Any, buffers: list[Any], tensors: Sequence[Tensor], rrefs: Sequence[Any]) -> Any:
    """The value of a pickle."""
    outer = _tables.__dict__.copy()
    _tables.tensors, _tables.rrefs = tensors, rrefs
    try:
        return _Unpickler(io.BytesIO(data), buffers=buffers).load()
    except SerializationError:
        raise
    except (Exception, SystemExit) as error:
        raise SerializationError(f"cannot rebuild a value here: {type(error).__name__}: {error}") from error
    finally:
        _tables.__dict__.clear()
        _tables.__dict__.update(outer)
