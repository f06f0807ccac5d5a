"""The callable and the arguments of a call: how they are sent, and errors that name the argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from telegrad._agent.peers import Peer
from telegrad._rref.rref import call_method
from telegrad._wire.by_value import pickle_of
from telegrad._wire.callables import name_of, shown
from telegrad.errors import SerializationError, UsageError


def call_value(peer: Peer, func: Any, args: Any, kwargs: Any) -> tuple[str, bytes, Any]:
    """Checks a call, and prepares it for one peer.

    Returns:
        The name of the callable, or ``""``; its pickle, or ``b""`` (see ``_wire.by_value``); and the value to send: the
        positional arguments, and last a dict of the keyword arguments or None.  A callable that has neither a name that
        the peer knows nor a pickle that can be kept is the first element of the value.

    Raises:
        UsageError: ``func`` is not callable, or the arguments are not a tuple and a dict.
    """
    args = () if args is None else args
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"args must be a tuple of the call's arguments, not {type(args).__qualname__}: {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs must be a dict of the call's keyword arguments, not {type(kwargs).__qualname__}")
    route = peer.route
    name = name_of(func)
    if name is not None and not route.same_main and name.startswith("__main__:") and func is not name:
        name = None if route.allow_pickle else name  # the peer runs another program: it has no such name
    pickled = b""
    if name is None:
        if not callable(func):
            raise UsageError(f"{func!r} is not callable")
        if route.allow_pickle:
            pickled = pickle_of(func, route.same_main, route.allow_cloudpickle) or b""
        if not pickled:
            return "", pickled, (func, *args, dict(kwargs) if kwargs else None)
    return name or "", pickled, (*args, dict(kwargs) if kwargs else None) if args or kwargs else None


def naming_argument(error: SerializationError, peer: Peer, func: Any, value: Any, by_name: bool) -> SerializationError:
    """The same error, with the argument that cannot be sent in its text; ``value`` is what ``call_value`` returned."""
    if func is call_method:
        function = f"method {value[1]!r}"
        what, rest = _argument_of_method(error.path)
    else:
        function = shown(func)
        what, rest = _argument(error.path, func, value, by_name)
    where = f"of {function} for worker {peer.name!r}"
    if not what:
        return SerializationError(f"an argument {where} cannot be sent: {error}")
    return SerializationError(f"{what}{''.join(rest)} {where} cannot be sent: {error}")


def _argument(path: Sequence[str], func: Any, value: Any, by_name: bool) -> tuple[str, Sequence[str]]:
    """Describes the argument to which a path leads; returns the text, or "", and the rest of the path."""
    if not path:
        return "", ()
    first, *rest = path
    place = int(first[1:-1])
    position = place if by_name else place - 1
    if position < 0:
        return "the function", rest
    if place == len(value) - 1 and rest:
        return f"argument {rest[0][1:-1]}", rest[1:]
    name = _parameter_name(func, position)
    return f"argument {position + 1} ({name!r})" if name else f"argument {position + 1}", rest


def _argument_of_method(path: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The same for a method called through a proxy: the user's arguments are a tuple and a dict that are arguments of
    ``call_method``."""
    if len(path) < 2:
        return "", ()
    of_call_method, of_method, *rest = path
    key = of_method[1:-1]
    return f"argument {int(key) + 1 if of_call_method == '[2]' else key}", rest


def _parameter_name(func: Any, index: int) -> str | None:
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # a name, or a builtin without a signature
        return None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return positional[index].name if index < len(positional) else None
