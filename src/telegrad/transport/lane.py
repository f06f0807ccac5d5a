"""The same-host lane: a receiver copies big buffers straight out of the sender's memory.

``process_vm_readv`` makes one copy where a socket makes two.  It needs the same user and a permissive ptrace scope, so
each side of a connection proves it first by reading a random word from the other's memory.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading

import numpy as np

from telegrad.errors import WorkerLostError
from telegrad.transport.buffers import Memory

LANE_LIMIT = 256 << 10  # below this a socket is as fast
SPLIT_FROM = 8 << 20  # from here on two cores copy faster than one
_MAX_READ = 1 << 30


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _load() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return function


_readv = _load()


class Proof:
    """A random word in this process's memory, for a peer to read."""

    def __init__(self) -> None:
        self._memory = np.frombuffer(bytearray(secrets.token_bytes(32)), np.uint8)
        self.pid = os.getpid()
        self.address = self._memory.ctypes.data
        self.word = self._memory.tobytes()


def can_read(pid: int, address: int, word: bytes) -> bool:
    """Whether this process can read that word at that address of that process."""
    if _readv is None or len(word) != 32:
        return False
    memory = np.zeros(len(word), np.uint8)
    try:
        read(pid, address, memory)
    except (OSError, OverflowError):
        return False
    return memory.tobytes() == word


def read(pid: int, address: int, into: Memory) -> None:
    """Copies ``len(into)`` bytes from another process; big copies are shared between two threads."""
    size = into.size
    if size < SPLIT_FROM or (os.cpu_count() or 1) < 2:
        _read(pid, address, into.ctypes.data, size)
        return
    half = size // 2
    failures: list[OSError] = []

    def second() -> None:
        try:
            _read(pid, address + half, into.ctypes.data + half, size - half)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=second, name="telegrad-lane", daemon=True)
    thread.start()
    try:
        _read(pid, address, into.ctypes.data, half)
    finally:
        thread.join()
    if failures:
        raise failures[0]


def _read(pid: int, address: int, target: int, size: int) -> None:
    assert _readv is not None
    done = 0
    while done < size:
        count = min(size - done, _MAX_READ)
        local, remote = _IoVec(target + done, count), _IoVec(address + done, count)
        got = _readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if got <= 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"reading {size:,} bytes of process {pid}: {os.strerror(errno)}")
        done += got


def fetch(pid: int, address: int, into: Memory, name: str) -> None:
    """As ``read``, for a peer by name."""
    try:
        read(pid, address, into)
    except OSError as error:
        raise WorkerLostError(
            f"worker {name!r} did not let {into.size:,} bytes be read from it, or went away: {error}"
        ) from error
