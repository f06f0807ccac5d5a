"""What worker_processes and tests do to themselves."""

from __future__ import annotations

import ctypes

CLONE_NEWNET = 0x40000000


def enter_namespace(name: str) -> None:
    """Moves the calling thread to another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
