"""Adds torch's texts to telegrad's errors.

Programs, and PyTorch's own tests, look for certain texts in the errors of ``torch.distributed.rpc``.  Here an error of
telegrad gets torch's sentence in front of its own, which is more precise; its type stays the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from telegrad.errors import (
    NotInitializedError,
    RendezvousError,
    RpcTimeoutError,
    SerializationError,
    TelegradError,
    UnknownWorkerError,
    UsageError,
)

P = ParamSpec("P")
T = TypeVar("T")

# The type of an error, what its text says, and what torch's says; \1 is the first group of the pattern.
_TABLE: list[tuple[type[TelegradError], str, str]] = [
    (NotInitializedError, r"", "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."),
    (RpcTimeoutError, r"(?:no answer|no value) within (\S+) s", r"RPC ran for more than set timeout (\1 s)."),
    (UnknownWorkerError, r"no worker (\S+) in this job", r"could not find destination \1."),
    (UnknownWorkerError, r"no worker (\S+)", r"could not find destination \1."),
    (RendezvousError, r"the name (\S+) is already taken", r"RPC worker name \1 is not unique."),
    (UsageError, r"^RPC is already running", "RPC is already initialized."),
    (SerializationError, r"^module .* has no (\S+)", "Default RPC pickler does not serialize function code."),
    (SerializationError, r"type Future\b", "Can not pickle torch.futures.Future."),
    (UsageError, r"^(?:no )?context (\d+)", r"Could not find autograd context with id: \1."),
    (
        UsageError,
        r"^this thread is already in context (\d+)",
        r"Already have an autograd context id for this thread: \1.",
    ),
    (UsageError, r"mapped to", "`set_device_map` only supports 1-to-1 mapping."),
    (UsageError, r"^backward was given no roots", "No tensors provided for gradient computation."),
    (UsageError, r"^root (\d+) has shape", r"Root \1 is not a scalar, all roots need to be scalar."),
    (
        UsageError,
        r"^a RemoteModule has no parameters\(\)",
        "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead.",
    ),
    (UsageError, r"^a RemoteModule has no (\w+)\(\)", r"Method ``\1`` not supported for RemoteModule."),
    (
        UsageError,
        r"^module_cls must be a class",
        "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, and not what was given.",
    ),
    (
        RendezvousError,
        r"world size",
        "RPC group mixes statically and dynamically initialized members which is not supported.",
    ),
    (UsageError, r"its value is a \w+, not a tensor", "RRef should contain a tensor for .backward()."),
]
_ROWS = [(kind, re.compile(pattern), words) for kind, pattern, words in _TABLE]


def translated(error: Exception) -> Exception:
    """The error with torch's text added; the same object if torch has no such text, or if it is there already."""
    if not isinstance(error, TelegradError):
        return error
    text = str(error)
    for kind, pattern, words in _ROWS:
        found = pattern.search(text) if isinstance(error, kind) else None
        if found is not None:
            return spoken(error, found.expand(words))
    return error


def spoken(error: Exception, words: str) -> Exception:
    """An error with these words in front of its text."""
    text = str(error)
    if text.startswith(words):
        return error
    copy = type(error)(f"{words} {text}")
    copy.__cause__, copy.__traceback__ = error.__cause__, error.__traceback__
    return copy


@contextmanager
def in_torchs_words() -> Iterator[None]:
    try:
        yield
    except TelegradError as error:
        new = translated(error)
        if new is error:
            raise
        raise new from error.__cause__


def speaks_as_torch(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function so that its errors have torch's texts too."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TelegradError as error:
            new = translated(error)
            if new is error:
                raise
            raise new from error.__cause__

    return wrapper


def as_torch_rebuilds(error: Exception) -> Exception:
    """torch makes an exception of another worker again from its text alone, and a RuntimeError where that fails.

    telegrad rebuilds the whole exception, but a program that was written for torch expects the RuntimeError.
    """
    if isinstance(error, (TelegradError, OSError)) or "This was raised on worker" not in str(error):
        return error
    try:
        type(error)(str(error))
    except Exception as reason:
        return RuntimeError(
            f"Failed to create original exception type. Error msg was {reason} Original exception on remote side was "
            f"{type(error).__qualname__}: {error}"
        )
    return error
