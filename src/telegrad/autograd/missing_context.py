"""Warnings for calls that lose gradients because they were made outside of a context.  Each comes once in a process."""

from __future__ import annotations

import sys
import threading
import warnings

_lock = threading.Lock()
_given: set[str] = set()


def warn_of_result(worker: str) -> None:
    """The result of a call requires a gradient, and no thread is inside a context."""
    _warn_once(
        "result",
        f"the result of a call to worker {worker!r} requires a gradient, but the call was made outside of any context "
        "(or after its context had ended), so no backward will reach that worker. Make the call, and call backward, "
        "inside `with telegrad.autograd.context() as context_id:`. If you want no gradient, make the call under "
        "torch.no_grad(), or return result.detach() there.",
    )


def warn_of_thread(worker: str) -> None:
    """A call with tensors that require a gradient, by a thread outside of any context while another is inside one."""
    _warn_once(
        "thread",
        f"a call to worker {worker!r} has tensors that require a gradient, but the calling thread is in no context, so "
        "backward will not go through the call. A context belongs to the thread that entered it, and another thread is "
        "in one now. To take it along to a thread pool, write `executor.submit(contextvars.copy_context().run, "
        "function, ...)`. If you want no gradient, make the call under torch.no_grad().",
    )


def thread_warning_given() -> bool:
    return "thread" in _given


def _warn_once(kind: str, text: str) -> None:
    with _lock:
        if kind in _given:
            return
        _given.add(kind)
    warnings.warn(text, UserWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """The stack level of the first function that is neither telegrad's nor torch's, as `_warn_once` counts them."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("telegrad.", "torch.")):
        frame, depth = frame.f_back, depth + 1
    return depth
