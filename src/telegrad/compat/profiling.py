"""Calls under a profiler: they appear there under torch's names, on the worker that makes them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from telegrad._worker import Worker


def is_profiling() -> bool:
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def profiling_key(mode: str, function: str, caller: str, callee: str) -> str:
    return f"rpc_{mode}#{function}({caller} -> {callee})"


def profiled(worker: Worker, mode: str, to: Any, function: Any) -> contextlib.AbstractContextManager[Any]:
    """``mode`` is sync, async or remote."""
    if not is_profiling():
        return contextlib.nullcontext()
    name = getattr(function, "__qualname__", None) or repr(function)
    return torch.autograd.profiler.record_function(profiling_key(mode, name, worker.name, worker.info(to).name))
