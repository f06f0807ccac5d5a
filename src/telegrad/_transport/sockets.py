"""Unix and TCP sockets: the stream over a socket, listening and connecting."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from telegrad.errors import AuthenticationError, RendezvousError, UsageError

__all__ = [
    "SocketStream",
    "check_same_user",
    "connect_tcp",
    "connect_unix",
    "is_loopback",
    "listen_tcp",
    "listen_unix",
]

BACKLOG = 512
# Median of 1-64 MB transfers: 2-15 % faster than with the kernel's 208 KiB; 4 MiB is slower from 4 MB on.
UNIX_BUFFER = 1 << 20
_IOV_MAX = 1024
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_UCRED = struct.Struct("iII")  # pid, uid, gid
_TCP_INFO = struct.Struct("xxBBxxxx48xI")  # unanswered retransmits and probes, ms since the last acknowledgement
_UNANSWERED = 2  # a single one may have been sent only now
_LONGEST_WAIT = 60.0  # seconds of one poll, whose argument is a C int of milliseconds


class SocketStream:
    """A ``Stream`` over a connected socket.

    **Closing while another thread uses the socket.**  ``close`` shuts the connection down, which wakes a thread that
    blocks in ``send``.  That thread may still be inside the system call, or just before it with the descriptor's
    number.  If the descriptor were closed now, the next file that the process opens could get the same number, and
    receive our bytes.  So each direction has a flag that its thread sets *before* it reads ``_closed``, and ``close``
    sets ``_closed`` *before* it reads the flags.  In any order of the two threads at least one sees the other, and the
    last one closes the descriptor.  Two flags are enough because each direction is used by one thread at a time; they
    are cheaper than a counter under a lock, and this runs for every message.
    """

    drain: ClassVar[bool] = False  # one recv takes all that the kernel has, or fills the buffer

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # each call asks for MSG_DONTWAIT
        if sock.family == socket.AF_UNIX:
            _enlarge_buffers(sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._closed = False
        self._sending = False
        self._receiving = False
        self._in_shutdown = False
        self._closing = threading.Lock()  # only one of two closing threads shuts down

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fd={self._sock.fileno()}{' closed' if self._closed else ''}>"

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._sock.fileno()

    def recv_into(self, buffer: memoryview) -> int:
        self._receiving = True
        try:
            if self._closed:
                return 0
            return self._sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        finally:
            self._receiving = False
            if self._closed:
                self._release()

    def send(
        self, buffers: Sequence[bytes | bytearray | memoryview], deadline: float = math.inf
    ) -> Sequence[memoryview]:
        self._sending = True
        try:
            if self._closed:
                raise BrokenPipeError(errno.EPIPE, "the stream was closed on this side")
            done = 0
            if len(buffers) == 1:
                only = buffers[0]
                size = only.nbytes if isinstance(only, memoryview) else len(only)
                try:
                    done = self._sock.send(only, _NOW) if size else 0
                except BlockingIOError:
                    pass
                if done == size:
                    return ()
            return self._send_rest(buffers, done, deadline)
        finally:
            self._sending = False
            if self._closed:
                self._release()

    def _send_rest(
        self, buffers: Sequence[bytes | bytearray | memoryview], skip: int, deadline: float
    ) -> Sequence[memoryview]:
        """Sends all but the first ``skip`` bytes; returns what is left at the deadline.

        One system call takes 1024 buffers and 2 GiB at most.
        """
        views = [view.cast("B") for view in [memoryview(buffer) for buffer in buffers] if view.nbytes]
        at = 0
        while True:
            while at < len(views) and skip >= views[at].nbytes:
                skip -= views[at].nbytes
                at += 1
            if at == len(views):
                return ()
            if skip:
                views[at] = views[at][skip:]
            try:
                skip = self._sock.sendmsg(views[at : at + _IOV_MAX], (), _NOW)
            except BlockingIOError:
                skip = 0
                if not self._wait_for_room(deadline):
                    return views[at:]

    def _wait_for_room(self, deadline: float) -> bool:
        """Waits until the kernel takes more bytes or the stream is closed.  False: the deadline has passed."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        while not self._closed:
            seconds = min(deadline - time.monotonic(), _LONGEST_WAIT)
            if seconds <= 0:
                return False
            if poll.poll(seconds * 1000):
                break
        return True

    def send_now(self, data: bytes) -> None:
        """Sends all of it without blocking, or raises: for the few bytes of a handshake, for which an empty send buffer
        always has room."""
        self._sending = True
        try:
            if self._closed:
                raise BrokenPipeError(errno.EPIPE, "the stream was closed on this side")
            if data and self._sock.send(data, _NOW) != len(data):
                raise ConnectionAbortedError("the peer does not read")
        except BlockingIOError:
            raise ConnectionAbortedError("the peer does not read") from None
        finally:
            self._sending = False
            if self._closed:
                self._release()

    def trust(self) -> None:
        """Does nothing on a plain socket; see ``TlsStream.trust``."""

    # --- is the peer's host alive? ---

    def watch_host(self, seconds: float) -> None:
        """On TCP, makes the kernel close an idle connection if the peer's host does not respond for about that long."""
        if self._sock.family == socket.AF_UNIX:
            return
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def host_is_silent(self, seconds: float) -> bool:
        """Whether the peer's host has acknowledged nothing for that long, although the kernel retransmitted.

        For a connection with unacknowledged data, on which the kernel sends no keepalives.  ``TCP_USER_TIMEOUT`` is not
        used: it also closes a connection whose peer acknowledges but does not read, because its process is stopped or
        holds the GIL, and such a worker is not lost.
        """
        if self._sock.family == socket.AF_UNIX or self._closed:
            return False
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            retransmits, probes, last_acknowledgement = _TCP_INFO.unpack(info)
        except (OSError, struct.error):
            return False
        return bool(max(retransmits, probes) >= _UNANSWERED and last_acknowledgement >= seconds * 1000)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._in_shutdown = True
            self._closed = True
            with contextlib.suppress(OSError):  # the peer has closed already
                self._sock.shutdown(socket.SHUT_RDWR)
            self._in_shutdown = False
        self._release()

    def disown(self) -> None:
        """In a forked child: closes this process's descriptor without shutting down the parent's connection."""
        self._closed = True
        self._sock.close()

    def _release(self) -> None:
        if not (self._sending or self._receiving or self._in_shutdown):
            self._sock.close()


def _enlarge_buffers(sock: socket.socket) -> None:
    """TCP tunes its buffers itself; a Unix socket's stay at 208 KiB unless set.  The kernel caps the value."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER)


# --- within the host ------------------------------------------------------------------------------------------


def listen_unix() -> tuple[socket.socket, str]:
    """Listens in the abstract namespace: the name ends with the process and leaves no file.  It has no permissions,
    hence :func:`check_same_user`.  The leading zero byte is written as ``@``, as ``ss`` prints it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name = f"telegrad-{os.getpid()}-{secrets.token_hex(8)}"
        sock.bind("\0" + name)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, "@" + name


def connect_unix(address: str, timeout: float) -> socket.socket:
    """Connects.  While the backlog is full, retries: the kernel returns EAGAIN and offers nothing to poll."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    path = "\0" + address[1:] if address.startswith("@") else address
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                if time.monotonic() + pause > deadline:
                    raise TimeoutError(f"{address} did not accept within {timeout:.1f} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The pid and the uid at the other end of a Unix socket, from the kernel."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_same_user(sock: socket.socket) -> None:
    """Called by both sides: any user may connect to an abstract name, or bind it after its owner died."""
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise AuthenticationError(
            f"process {pid} at the other end runs as user {uid}, this one as user {os.geteuid()}: "
            "run all workers of a host as the same user"
        )


# --- across hosts ---------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether packets to ``host`` stay on this machine; a name counts if all its addresses do."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return False
    found = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
    return bool(found) and all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in found)


def listen_tcp(host: str, port: int) -> tuple[socket.socket, tuple[str, int]]:
    """Listens on one address of this machine; port 0 lets the kernel choose.  Returns the bound address."""
    where = f"{host or '*'}:{port}"
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise UsageError(f"cannot listen on {where}: a port is 0 to 65535")
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {where}: no such address ({error})") from error
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        bound = sock.getsockname()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise RendezvousError(
                f"cannot listen on {where}: the port is in use, perhaps by an earlier run; choose another, or 0 for any"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"cannot listen on {where}: not an address of this machine; give one of its own, or 0.0.0.0 for all"
            ) from error
        if error.errno == errno.EACCES:
            raise UsageError(f"cannot listen on {where}: the system forbids it; choose a port above 1023") from error
        raise RendezvousError(f"cannot listen on {where}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock, (str(bound[0]), int(bound[1]))


def connect_tcp(host: str, port: int, timeout: float) -> socket.socket:
    """Connects to the first of the host's addresses that answers."""
    if not 0 < port <= 65535:
        raise UsageError(f"cannot connect to {host}:{port}: a port is 1 to 65535")
    deadline = time.monotonic() + timeout
    failure: OSError = ConnectionRefusedError(errno.ECONNREFUSED, f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        left = deadline - time.monotonic()
        if left <= 0:
            failure = TimeoutError(f"{host}:{port} did not answer within {timeout:.1f} s")
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left)
            sock.connect(address)
            # On loopback the kernel may choose the dialled port as our own and connect the socket to itself.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens on {host}:{port}")
            sock.settimeout(None)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure
