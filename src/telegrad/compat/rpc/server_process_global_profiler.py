"""torch's profiler of all threads of a process rests on its own C++ agent; there is none here."""

from __future__ import annotations

from typing import Any

from telegrad.errors import UsageError


class _server_process_global_profile:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "_server_process_global_profile belongs to torch's C++ RPC and cannot be offered: use "
            "torch.profiler.profile in a function that runs on the worker"
        )
