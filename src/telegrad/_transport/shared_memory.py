"""Shared memory: big buffers for a worker on the same host go through memory that both processes map.

A socket copies twice, into the kernel and out of it.  Here the sender copies once, into a *segment*, and the receiver
builds its tensors in that memory::

    sender, SegmentPool                                       receiver, PeerSegments
    1. copies the buffer into a segment (a sealed memfd)
    2. ── InSegment(segment, fd, size), in the message ──▶    3. maps /proc/<pid>/fd/<fd>, or finds it mapped
                                                              4. tensors use it
    6. may use the segment again       ◀── SegmentReleased ── 5. the last of these tensors is gone

Touching a segment for the first time takes longer than copying it (64 MiB: 29 ms and 6 ms), so both sides keep their
mappings for the next message.  A segment that is not released, because the link broke or the receiver keeps the tensor,
belongs to the receiver: the sender closes it, and the kernel frees it after the receiver's last tensor.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import secrets
import threading
import weakref
from typing import Any

import numpy as np

from telegrad._transport.buffers import Idle, Memory, size_class
from telegrad._transport.copier import Copier

SHARED_FROM = 64 << 10  # bytes from which buffers use shared memory; below, a socket is as fast
_MOST_SEGMENTS = 256  # each has a descriptor; further buffers go through the socket
_KEEP_BYTES = 1 << 30
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_ADDRESS = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Proof:
    """A random token in a memfd: a peer that can read it can read our segments too."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.token = secrets.token_bytes(32)
        self.fd = _memfd(_name(self.token, 0), len(self.token))
        weakref.finalize(self, os.close, self.fd)
        os.pwrite(self.fd, self.token, 0)


def can_read(pid: int, fd: int, token: bytes) -> bool:
    """Whether this process can read that token from that descriptor of that process."""
    if len(token) != 32:
        return False
    try:
        found = _open(pid, fd, token, 0, len(token))
    except OSError:
        return False
    try:
        return os.pread(found, len(token), 0) == token
    finally:
        os.close(found)


class Segment:
    """A piece of shared memory on the sender's side.  Dropping it unmaps it here; the receiver's mapping stays."""

    def __init__(self, number: int, token: bytes, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = _memfd(_name(token, number), size)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        self.memory = _map(self.fd, size)
        self.address = ctypes.addressof(self.memory)


class SegmentPool:
    """The segments that this worker owns: in use by peers, or free for the next buffer."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._numbers = itertools.count(1)
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._idle: Idle[Segment] = Idle(_KEEP_BYTES)
        self._copier = Copier()

    def put(self, address: int, size: int) -> Segment | None:
        """Copies memory into a segment; None if there are too many, or the system has no more memory."""
        wanted = size_class(size)
        segment = self._idle.take(wanted)
        if segment is None:
            if len(self._segments) >= _MOST_SEGMENTS:
                self._idle.trim()  # of other sizes
                return None
            try:
                segment = Segment(next(self._numbers), self._token, wanted)
            except OSError:
                return None
            self._segments.add(segment)
        self._copier.copy(segment.address, address, size)
        return segment

    def take_back(self, segment: Segment) -> None:
        """Makes a segment that its receiver has released free for the next buffer."""
        self._idle.put(segment.size, segment)

    def trim(self) -> None:
        self._idle.trim()

    def close(self) -> None:
        self._copier.close()

    def __repr__(self) -> str:
        return f"<SegmentPool {len(self._segments)} segments, {self._idle.bytes:,} bytes idle>"


class PeerSegments:
    """The segments of one peer that this worker has mapped."""

    def __init__(self, pid: int, token: bytes) -> None:
        self._pid = pid
        self._token = token
        self._lock = threading.Lock()
        self._mapped: dict[int, Any] = {}  # the most recently used last; tensors keep their own references
        self._bytes = 0

    def view(self, number: int, fd: int, size: int) -> Memory:
        """The first bytes of a segment.  Raises OSError if the peer has no such segment, or is gone."""
        with self._lock:
            memory = self._mapped.get(number)
            if memory is None:
                memory = self._map(number, fd, size)
                self._bytes += len(memory)
            elif len(memory) < size:
                raise OSError(f"segment {number} has {len(memory):,} bytes, not {size:,}")
            self._mapped.pop(number, None)
            self._mapped[number] = memory
            while self._bytes > _KEEP_BYTES:
                self._forget(next(iter(self._mapped)))
        return np.frombuffer(memory, np.uint8, size)

    def _map(self, number: int, fd: int, size: int) -> Any:
        found = _open(self._pid, fd, self._token, number, size)
        try:
            return _map(found, os.fstat(found).st_size)
        finally:
            os.close(found)

    def _forget(self, number: int) -> None:
        memory = self._mapped.pop(number, None)
        if memory is not None:
            self._bytes -= len(memory)

    def forget(self, number: int) -> None:
        """Unmaps a segment that the peer will not send again, once no tensor uses it."""
        with self._lock:
            self._forget(number)

    def trim(self) -> None:
        """Unmaps the less recently used half."""
        with self._lock:
            for number in list(self._mapped)[: (len(self._mapped) + 1) // 2]:
                self._forget(number)

    def __repr__(self) -> str:
        return f"<PeerSegments to process {self._pid}: {len(self._mapped)} segments, {self._bytes:,} bytes>"


def _name(token: bytes, number: int) -> str:
    return f"telegrad-{token[:8].hex()}-{number}"


def _memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)  # without free memory this raises; a later write would be killed with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(pid: int, fd: int, token: bytes, number: int, size: int) -> int:
    """Opens a segment of another process.

    The descriptor's number may belong to another file by now, so the file's name is checked.  The owner must not be
    able to shrink the file: reading past its end would kill this process.
    """
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        name = os.readlink(f"/proc/self/fd/{found}")
        if name != f"/memfd:{_name(token, number)} (deleted)":
            raise OSError(f"descriptor {fd} of process {pid} is not segment {number}")
        if fcntl.fcntl(found, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(found).st_size < size:
            raise OSError(f"segment {number} of process {pid} is not a sealed one of {size:,} bytes")
    except BaseException:
        os.close(found)
        raise
    return found


def _map(fd: int, size: int) -> Any:
    """Maps a file.  Unlike Python's ``mmap`` this keeps no descriptor open, however long a tensor lives.

    Pages are faulted in when they are touched.  ``MAP_POPULATE`` is no faster, and while it runs (4-7 s for 4 GiB) no
    thread can map or unmap anything: one that tries while it holds the GIL stops the whole process.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _NO_ADDRESS:
        errno = ctypes.get_errno()
        raise OSError(errno, f"mapping {size:,} bytes: {os.strerror(errno)}")
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit, when a thread may still be reading it.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory
