"""Callables by name: how a function is written on the wire, and found again on the other side."""

from __future__ import annotations

import builtins
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from telegrad.errors import SerializationError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

# A spawned child knows its main module by the second name, its parent by the first.
MAIN_MODULES = ("__main__", "__mp_main__")

_exported: dict[str, Callable[..., Any]] = {}
_names: dict[Any, str] = {}  # name_of, remembered: 0.3 us instead of 2
_NAMES_KEPT = 4096
_MAIN_SECONDS = 1.0  # how long a call waits for the main program to define its function


def export(function: F | None = None, *, name: str | None = None) -> Any:
    """Lets other workers call this function even where pickle is switched off.

    Use it bare, ``@rpc.export``, or give a short name that callers without the function's code can use,
    ``@rpc.export(name="forward")``.
    """

    def register(function: F) -> F:
        key = name or f"{function.__module__}:{function.__qualname__}"
        if _exported.setdefault(key, function) is not function and name is not None:
            raise UsageError(f"two functions are exported as {key!r}")
        _exported[key] = function
        _names[function] = key
        return function

    return register if function is None else register(function)


def name_of(function: Any) -> str | None:
    """The name under which the other side finds this very callable; None when only its value can be sent."""
    if type(function) is str:
        return function
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        return None
    if name is None or _is_stale(name, function):
        name = _find_name(function)
        if name is not None:
            if len(_names) >= _NAMES_KEPT:
                _names.clear()
                _names.update((exported, key) for key, exported in _exported.items())
            _names[function] = name
    return name


def _is_stale(name: str, function: Any) -> bool:
    """Whether the name means another function by now, as after a cell of a notebook ran again."""
    module_name, _, path = name.partition(":")
    if "." in path or name in _exported:
        return False
    return getattr(sys.modules.get(module_name), path, None) is not function


def _find_name(function: Any) -> str | None:
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(qualname, str) or "<" in qualname:
        return None
    module = getattr(function, "__module__", None)
    candidates = [(module, qualname)] if isinstance(module, str) else []
    short = getattr(function, "__name__", "")
    # torch's operators do not say where they live.
    candidates += [("torch", short), ("torch.nn.functional", short)] if short else []
    owner = getattr(function, "__objclass__", None)
    if owner is not None:
        candidates.append((owner.__module__, f"{owner.__qualname__}.{short}"))
    for module_name, path in candidates:
        found = _look_up(sys.modules.get(module_name), path)
        if found is function or (found == function and callable(getattr(function, "__func__", None))):
            module_name = "__main__" if module_name in MAIN_MODULES else module_name
            return f"{module_name}:{path}"
    return None


def _look_up(module: Any, path: str) -> Any:
    found = module
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def resolve(name: str, allow_any: bool) -> Any:
    """The callable of that name here.  Without ``allow_any`` only exported functions and plain operators are found."""
    function = _exported.get(name)
    if function is not None:
        return function
    module_name, colon, path = name.partition(":")
    if not allow_any:
        if module_name == "torch" and path in _PLAIN_OPERATORS:
            return getattr(torch, path)
        raise SerializationError(
            f"{name!r} is not exported here and this worker allows no other functions (allow_pickle=False): "
            "put @rpc.export on it over there"
        )
    if not colon:
        raise SerializationError(f"no function is exported as {name!r} here")
    module = sys.modules.get(module_name)
    if module is None or _is_being_imported(module):
        try:
            module = importlib.import_module(module_name)  # waits, if another thread is importing it
        except Exception as error:  # a module may raise anything while it is imported
            raise SerializationError(
                f"cannot import module {module_name!r} for {path!r}: {type(error).__name__}: {error}"
            ) from error
    function = _look_up(module, path)
    if function is None and module_name in MAIN_MODULES:
        function = _wait_for(module, path)
    if function is None:
        where = getattr(module, "__file__", None) or "no file"
        raise SerializationError(f"module {module_name!r} ({where}) has no {path!r}")
    return function


def _is_being_imported(module: Any) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _wait_for(module: Any, path: str) -> Any:
    """A function of the main program, which may stand below its ``init_rpc``: the program may not be there yet."""
    deadline = time.monotonic() + _MAIN_SECONDS
    while (function := _look_up(module, path)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return function


# Operators of tensors to tensors, which cannot reach files or run code.
_PLAIN_OPERATORS = frozenset(
    "add sub mul div matmul mm bmm sum mean neg exp log relu sigmoid tanh softmax cat stack ones zeros full".split()
)


# The same for methods of a tensor that another worker holds a reference to.
_PLAIN_METHODS = _PLAIN_OPERATORS | frozenset(
    "size dim numel stride item tolist clone detach t view reshape transpose contiguous float double long".split()
)


def check_method(value: object, name: str) -> None:
    """Refuses a method that a worker without pickle must not run for others: what a value's methods can reach is open,
    so only classes that were exported let theirs be called."""
    if isinstance(value, torch.Tensor):
        if name in _PLAIN_METHODS:
            return
        raise SerializationError(f"tensors let others call no {name!r} here (allow_pickle=False)")
    if type(value) not in _exported.values() or name.startswith("_"):
        raise SerializationError(
            f"{type(value).__qualname__}.{name} is not for others to call here (allow_pickle=False): "
            "put @rpc.export on the class over there; private methods stay private"
        )


def exception_type(name: str, allow_any: bool) -> type[BaseException] | None:
    """The exception class of that name, where it can be imported."""
    module_name, _, path = name.partition(":")
    try:
        if module_name in ("builtins", "telegrad.errors"):
            found = _look_up(builtins if module_name == "builtins" else sys.modules[module_name], path)
        else:
            found = resolve(name, allow_any)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
