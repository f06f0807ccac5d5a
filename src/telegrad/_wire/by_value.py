"""Functions that the peer cannot find by name: lambdas, functions of a main program that it does not run.

cloudpickle sends a function together with what it uses: globals, closure, defaults.  Making and reading such a pickle
costs ten times as much as the call itself.  So the caller keeps the pickle with the function, and the callee keeps the
function with the pickle.  Both are allowed only if nothing that the function uses can change in place: numbers, text,
tuples of them, modules, and functions and classes that can be imported.  When the caller rebinds a global or a closure
variable, it makes a new pickle.  A function that uses a list, for example, or assigns to a global or an attribute, is
pickled for each call.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from telegrad._wire.callables import name_of
from telegrad._wire.pickles import dump, load
from telegrad.errors import SerializationError

_LONGEST = 64 << 10  # bytes; longer pickles are not kept
_MOST = 256  # functions that a caller keeps, and a callee too

_CONSTANTS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type(...), CodeType, torch.dtype, torch.device)
)
_MISSING = object()  # a global that is not defined: a builtin, or not yet defined

#: By the function's id, the least recently used first: the objects that it used when it was pickled, itself included,
#: and its pickles for peers with the same main program (True) or another (False).  The references are not weak: an
#: object that the function uses may refer to the function.
_sent: OrderedDict[int, tuple[list[Any], dict[bool, bytes]]] = OrderedDict()
_sent_lock = threading.Lock()


class _Changeable(Exception):
    """The function uses something that can change in place."""


def pickle_of(function: Any, same_main: bool, allow_cloudpickle: bool) -> bytes | None:
    """The kept pickle of a function; None if it must be pickled for each call."""
    if type(function) is not FunctionType or not allow_cloudpickle:
        return None
    used: list[Any] = []
    try:
        _collect(function, used, set(), same_main)
    except (_Changeable, RecursionError):
        return None
    with _sent_lock:
        known = _sent.get(id(function))
        if known is None or len(known[0]) != len(used) or any(a is not b for a, b in zip(known[0], used, strict=True)):
            known = _sent[id(function)] = (used, {})
        _sent.move_to_end(id(function))
        if len(_sent) > _MOST:
            _sent.popitem(last=False)
    pickled = known[1].get(same_main)
    if pickled is None:
        try:
            writer, pickled, buffers = dump(function, same_main, allow_cloudpickle)
        except SerializationError:
            return None
        if writer.tensors or writer.rrefs or buffers or len(pickled) > _LONGEST:
            return None
        known[1][same_main] = pickled
    return pickled


def _collect(value: Any, used: list[Any], seen: set[int], same_main: bool) -> None:
    """Adds a value to ``used``, and, if it was not ``seen``, everything that it uses in turn."""
    used.append(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    kind = type(value)
    if kind in _CONSTANTS or value is _MISSING:
        return
    if kind is ModuleType:
        if sys.modules.get(value.__name__) is value:
            return
    elif kind is tuple or kind is frozenset:
        for part in value:
            _collect(part, used, seen, same_main)
        return
    elif callable(value):
        name = name_of(value)
        if name is not None and (same_main or not name.startswith("__main__:")):
            return
        if kind is FunctionType:
            for part in _parts_of(value):
                _collect(part, used, seen, same_main)
            return
    raise _Changeable


def _parts_of(function: FunctionType) -> Iterator[Any]:
    names = _globals_of(function.__code__)
    if names is None:
        raise _Changeable
    yield function.__code__
    for name in names:
        yield function.__globals__.get(name, _MISSING)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    for cell in function.__closure__ or ():
        yield _content_of(cell)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise _Changeable from None


@functools.lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[str, ...] | None:
    """The globals that the code reads; None if it assigns to a global, an attribute or a variable of its closure."""
    names: set[str] = set()
    pending = [code]
    while pending:
        each = pending.pop()
        pending += [constant for constant in each.co_consts if type(constant) is CodeType]
        for instruction in dis.get_instructions(each):
            what = instruction.opname
            if what in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
                return None
            if what in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
                return None
            if what in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(instruction.argval)
    return tuple(sorted(names))


class ReceivedFunctions:
    """Functions received by value, each unpickled once per peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, bytes], Any] = OrderedDict()

    def load(self, peer: int, pickled: bytes) -> Any:
        key = peer, pickled
        with self._lock:
            function = self._kept.get(key)
            if function is not None:
                self._kept.move_to_end(key)
                return function
        function = load(pickled, [], (), ())  # outside the lock: it may import modules
        if len(pickled) <= _LONGEST:
            with self._lock:
                self._kept[key] = function
                if len(self._kept) > _MOST:
                    self._kept.popitem(last=False)
        return function

    def __len__(self) -> int:
        return len(self._kept)
