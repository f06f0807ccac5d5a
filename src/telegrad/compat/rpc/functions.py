"""``async_execution``, with torch's words for a function that returns no future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from telegrad.errors import UsageError
from telegrad.rpc import functions

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """The function returns a ``torch.futures.Future``, and its caller gets what that will hold."""

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not isinstance(result, torch._C.Future):
            raise UsageError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                f"{fn.__qualname__} returned a {type(result).__qualname__}"
            )
        return result

    return functions.async_execution(checked)  # type: ignore[return-value]
