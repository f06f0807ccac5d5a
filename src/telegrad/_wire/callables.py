"""Callables by name: the name that a function has on the wire, and the function of a name."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar, overload

import torch

from telegrad.errors import SerializationError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

# The main module's name in a parent, and in a child that it has spawned.
MAIN_MODULES = ("__main__", "__mp_main__")

_exported: dict[str, Callable[..., Any]] = {}
_exported_methods: dict[type, frozenset[str]] = {}
_names: dict[Any, str] = {}  # the results of name_of: 0.3 us instead of 2
_NAMES_KEPT = 4096
_MAIN_SECONDS = 1.0  # time that a call waits for the main program to define its function


@overload
def export(function: F) -> F: ...
@overload
def export(*, name: str | None = ..., methods: Sequence[str] | None = ...) -> Callable[[F], F]: ...
def export(function: F | None = None, *, name: str | None = None, methods: Sequence[str] | None = None) -> Any:
    """Lets other workers call a function, or make and use objects of a class, where pickle is switched off.

    A worker with ``allow_pickle=False`` runs nothing else for others, apart from some operators of torch. It works with
    pickle too, and gives a function a name that callers can use without having its code.

    An exported function must be safe to call with any arguments: one that writes files lets other workers write files.

    Args:
        function (Callable): The function or class, where it is used as a decorator without arguments: ``@rpc.export``.
            Of a class, others can make objects, and call their methods through an RRef: the functions that the class
            itself defines under a public name. Inherited methods, attributes and properties are not exported.
        name (str, optional): A name by which callers can call it: ``rpc_sync(to, "name")``. By default it is called as
            any function.
        methods (list, optional): The names of the methods to export, in place of those that the class defines;
            inherited ones may be among them.

    Returns:
        The function or class itself.

    Raises:
        UsageError: Another function was exported under this name, or a method does not exist.

    Example::

        >>> # on both workers
        >>> @rpc.export(name="scale")
        ... def scale(tensor, factor=2):
        ...     return tensor * factor
        >>> # on worker0, in a job with worker1
        >>> rpc.rpc_sync("worker1", "scale", args=(torch.ones(2),), kwargs={"factor": 3})
        tensor([3., 3.])
    """

    def register(function: F) -> F:
        key = name or f"{function.__module__}:{function.__qualname__}"
        if _exported.setdefault(key, function) is not function and name is not None:
            raise UsageError(f"two functions are exported as {key!r}")
        if isinstance(function, type):
            _exported_methods[function] = _methods_to_export(function, methods)
        elif methods is not None:
            raise UsageError(f"export(methods=...) is for classes, and {function.__qualname__} is none")
        _exported[key] = function
        _names[function] = key
        return function

    return register if function is None else register(function)


def _methods_to_export(kind: type, methods: Sequence[str] | None) -> frozenset[str]:
    if methods is None:
        own = vars(kind).items()
        return frozenset(name for name, value in own if not name.startswith("_") and _is_method(value))
    if isinstance(methods, str):
        raise UsageError(f"export(methods=...) takes a list of names, not {methods!r}")
    for name in methods:
        found = inspect.getattr_static(kind, name, None)
        if not callable(found) and not _is_method(found):
            raise UsageError(f"export(methods=...): {kind.__qualname__} has no method {name!r}")
    return frozenset(methods)


def _is_method(value: object) -> bool:
    return isinstance(value, (FunctionType, staticmethod, classmethod))


def name_of(function: Any) -> str | None:
    """The name by which a peer finds this callable; None if it can only be sent by value."""
    if type(function) is str:
        return function
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        return None
    if name is not None and name not in _exported:
        module_name, _, path = name.partition(":")
        # Not if the name refers to another function now, for example after a notebook cell ran again.
        if "." not in path and getattr(sys.modules.get(module_name), path, None) is not function:
            name = None
    if name is None:
        name = _find_name(function)
        if name is not None:
            if len(_names) >= _NAMES_KEPT:
                _names.clear()
                _names.update((exported, key) for key, exported in _exported.items())
            _names[function] = name
    return name


def shown(function: Any) -> str:
    """A function, or its name, in an error text."""
    return function if isinstance(function, str) else getattr(function, "__qualname__", None) or repr(function)


def _find_name(function: Any) -> str | None:
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(qualname, str) or "<" in qualname:
        return None
    module = getattr(function, "__module__", None)
    candidates = [(module, qualname)] if isinstance(module, str) else []
    short = getattr(function, "__name__", "")
    # torch's operators have no module of their own.
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
    """The callable of that name on this worker.  Without ``allow_any``: only exported functions and plain operators."""
    function = _exported.get(name)
    if function is not None:
        return function
    module_name, colon, path = name.partition(":")
    if not allow_any:
        if module_name == "torch" and path in _PLAIN_OPERATORS:
            return _plain_operator(path)
        raise SerializationError(
            f"{name!r} is not exported here and this worker allows no other functions (allow_pickle=False): "
            "put @rpc.export on it on that worker"
        )
    if not colon:
        raise SerializationError(f"no function is exported as {name!r} here")
    module = sys.modules.get(module_name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        try:
            module = importlib.import_module(module_name)  # waits, if another thread is importing it
        except Exception as error:  # importing a module may raise anything
            raise SerializationError(
                f"cannot import module {module_name!r} for {path!r}: {type(error).__name__}: {error}"
            ) from error
    function = _look_up(module, path) if "." in path else getattr(module, path, None)
    if function is None and module_name in MAIN_MODULES:
        function = _wait_for(module, path)
    if function is None:
        where = getattr(module, "__file__", None) or "no file"
        raise SerializationError(f"module {module_name!r} ({where}) has no {path!r}")
    return function


def _wait_for(module: Any, path: str) -> Any:
    """Waits for a function of the main program, which may be defined after its call of ``init_rpc``."""
    deadline = time.monotonic() + _MAIN_SECONDS
    while (function := _look_up(module, path)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return function


# Operators from tensors to tensors that neither access files nor run code.
_PLAIN_OPERATORS = frozenset(
    "add sub mul div matmul mm bmm sum mean neg exp log relu sigmoid tanh softmax cat stack ones zeros full".split()
)

# The same for methods of a tensor, called through an RRef.
_PLAIN_METHODS = _PLAIN_OPERATORS | frozenset(
    "size dim numel stride item tolist clone detach t view reshape transpose contiguous float double long".split()
)

# For these a dtype argument is the dtype of the result.  Others, like Tensor.view, would reinterpret memory.
_WITH_DTYPE = frozenset("sum mean softmax ones zeros full".split())

_PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz".split()
)

_MOST_REPEATED = 2**28  # elements of an expanded tensor: a few bytes on the wire, but about a second for a sum


@functools.cache
def _plain_operator(name: str) -> Callable[..., Any]:
    """The operator, without the arguments that it would write into."""
    operator: Callable[..., Any] = getattr(torch, name)

    @functools.wraps(operator)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            raise SerializationError(
                f"torch.{name} takes no out= from another worker (allow_pickle=False): use its result"
            )
        _check_plain(name, (args, *kwargs.values()))
        return operator(*args, **kwargs)

    return plain


def _plain_method(tensor: torch.Tensor, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(tensor, name)

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        _check_plain(name, (tensor, args, *kwargs.values()))
        return method(*args, **kwargs)

    return plain


def _check_plain(name: str, arguments: Sequence[Any]) -> None:
    """Refuses arguments that may make torch's operators crash or run for very long."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            refused = _why_not_plain(argument)
        elif isinstance(argument, torch.dtype):
            refused = None if name in _WITH_DTYPE and argument in _PLAIN_DTYPES else str(argument)
        elif isinstance(argument, (list, tuple)):
            _check_plain(name, argument)
            continue
        else:
            continue
        if refused is not None:
            raise SerializationError(
                f"torch's {name!r} takes no {refused} from another worker (allow_pickle=False): export a function that "
                "does this with @rpc.export on that worker, and call that"
            )


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    """What is unusual about a tensor; None for a plain one.  Few of torch's operators are tested with unusual ones."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"tensor of layout {tensor.layout}" + (" (nested)" if tensor.is_nested else "")
    if tensor.dtype not in _PLAIN_DTYPES:
        return f"tensor of {tensor.dtype}"
    if tensor.is_meta:
        return "tensor on the meta device"
    if tensor.numel() > _MOST_REPEATED and tensor.nbytes > tensor.untyped_storage().nbytes():
        return f"expanded tensor of more than {_MOST_REPEATED:,} elements"
    return None


def exported_method(value: object, name: str) -> Callable[..., Any]:
    """A method that a worker with ``allow_pickle=False`` runs for other workers; raises for all others."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if name in _PLAIN_METHODS:
            return _plain_method(value, name)
        raise SerializationError(f"tensors let others call no {name!r} here (allow_pickle=False)")
    exported = _exported_methods.get(kind)
    if exported is None:
        raise SerializationError(
            f"{kind.__qualname__}.{name} cannot be called by other workers here (allow_pickle=False): "
            "put @rpc.export on the class on that worker"
        )
    if name not in exported:
        raise SerializationError(
            f"{kind.__qualname__}.{name} is not exported here (allow_pickle=False): @rpc.export exports the public "
            "functions that a class itself defines, no attributes, properties or inherited methods; "
            f"name it in @rpc.export(methods=[...]) on that worker. Exported: {', '.join(sorted(exported)) or 'none'}"
        )
    # From the class: the instance may have an attribute of the same name.
    method = inspect.getattr_static(kind, name)
    return method.__get__(value, kind) if hasattr(method, "__get__") else method  # type: ignore[no-any-return]


def exception_type(name: str, allow_any: bool) -> type[BaseException] | None:
    """The exception class of that name; None if it cannot be imported."""
    module_name, _, path = name.partition(":")
    try:
        if module_name in ("builtins", "telegrad.errors"):
            found = _look_up(builtins if module_name == "builtins" else sys.modules[module_name], path)
        else:
            found = resolve(name, allow_any)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
