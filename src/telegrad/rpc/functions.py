"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad._agent.dispatch import ASYNC_MARK

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(function: F) -> F:
    """Marks a function whose result is a future: callers get the value of the future, when it is done.

    The function returns its future early. The thread that ran it is then free for other calls, and the callee answers
    when the future is done. The future may come from :func:`telegrad.rpc.rpc_async`, from its ``then()``, or from
    ``torch.futures.Future()``; it never leaves the callee. If the future fails, the caller gets its exception.

    Called directly, the function is what it was and returns the future itself. An ``async def`` function needs no mark.
    With ``@staticmethod`` and ``@classmethod``, put them outside: write them above this one.

    Args:
        function (Callable): A function that returns a ``torch.futures.Future``. If it returns anything else, the caller
            gets an error.

    Returns:
        The marked function, to be given to ``rpc_sync``, ``rpc_async`` or ``remote``, or called as a method through an
        RRef.

    Example::

        >>> # on worker0, in a job with worker1: worker1 asks worker0, and occupies no thread while it waits
        >>> @rpc.functions.async_execution
        ... def add_and_double(x, y):
        ...     future = rpc.rpc_async("worker0", torch.add, args=(x, y))
        ...     return future.then(lambda future: future.wait() * 2)
        >>> rpc.rpc_sync("worker1", add_and_double, args=(torch.ones(2), 1))
        tensor([4., 4.])
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, function)
    return wrapper  # type: ignore[return-value]
