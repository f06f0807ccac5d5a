"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad._agent.dispatch import ASYNC_MARK

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(function: F) -> F:
    """The function returns a ``torch.futures.Future``; the callee answers when that is done, and blocks no thread.

    Put ``@staticmethod`` and ``@classmethod`` outside, before this one.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, function)
    return wrapper  # type: ignore[return-value]
