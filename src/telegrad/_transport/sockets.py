"""Plain sockets: the stream over one, and how to listen and connect, within the host and across hosts."""

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
# In the median, 1-64 MB ran 2-15 % faster than with the kernel's 208 KiB; with 4 MiB, slower from 4 MB on.
UNIX_BUFFER = 1 << 20
_IOV_MAX = 1024
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_UCRED = struct.Struct("iII")  # pid, uid, gid
_TCP_INFO = struct.Struct("xxBBxxxx48xI")  # retransmits and probes without an answer, ms since the last acknowledgement
_UNANSWERED = 2  # a probe that was sent just now has no answer yet
_LONGEST_WAIT = 60.0  # seconds of one poll; its argument is an int of milliseconds


class SocketStream:
    """A ``Stream`` over a connected socket.

    **Closing under another thread's feet.**  ``close`` shuts the connection down, which wakes a thread that blocks in
    ``send``.  But that thread may not have come back from the kernel yet, or may stand just before the system call
    with the descriptor's number in its hand; were the descriptor closed now, the next file that the process opens
    would get this number, and our bytes.  So each direction has a flag that its thread raises *before* it looks at
    ``_closed``, and ``close`` sets ``_closed`` *before* it looks at the flags: whichever order the two threads come in,
    at least one of them sees the other, and the descriptor is closed by the last one out.  Two attributes instead of
    a counter under a lock, because this runs for every message, and each direction has one thread at a time.
    """

    drain: ClassVar[bool] = False  # one recv empties what the kernel has, or fills the buffer

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
        self._closing = threading.Lock()  # of two closers, one does it

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
        """Sends all but the first ``skip`` bytes; what is left at the deadline.

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
        """Waits until the kernel takes more; ``close`` ends the wait too.  False: not before the deadline."""
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
        """Sends without blocking, all or nothing more: for the few bytes of a handshake, which an empty send buffer
        always has room for.  Whoever does not let them through is not worth waiting for."""
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
        """Nothing changes for a plain socket; see ``TlsStream.trust``."""

    # --- is the peer's host there? ---

    def watch_host(self, seconds: float) -> None:
        """On TCP, lets the kernel close an idle connection whose peer's host does not respond for about that long."""
        if self._sock.family == socket.AF_UNIX:
            return
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def host_is_silent(self, seconds: float) -> bool:
        """Whether the peer's host has acknowledged nothing for that long, though the kernel asked again and again.

        This is for a connection with data under way, on which the kernel sends no keepalives.  ``TCP_USER_TIMEOUT``
        would do the same and more: it also closes a connection whose peer acknowledges but reads nothing, because its
        process is stopped or holds the GIL, and such a worker is not lost.
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
            with contextlib.suppress(OSError):  # the peer was faster
                self._sock.shutdown(socket.SHUT_RDWR)
            self._in_shutdown = False
        self._release()

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptor, and leaves the connection to the parent."""
        self._closed = True
        self._sock.close()

    def _release(self) -> None:
        if not (self._sending or self._receiving or self._in_shutdown):
            self._sock.close()


def _enlarge_buffers(sock: socket.socket) -> None:
    """TCP tunes its buffers itself; a Unix socket stays at 208 KiB unless told (the kernel caps what we ask for)."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER)


# --- within the host ------------------------------------------------------------------------------------------


def listen_unix() -> tuple[socket.socket, str]:
    """Listens in the abstract namespace: no file to clean up, and gone with the process.  Such a name has no
    permissions, hence :func:`check_same_user`.  Written with ``@`` for the leading zero byte, as ``ss`` prints it."""
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
    """Connects.  A full backlog is worth waiting for; the kernel says EAGAIN then, and offers nothing to wait on."""
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
    """The process and the user at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_same_user(sock: socket.socket) -> None:
    """Both sides ask: anyone may connect to an abstract name, and anyone may have taken it after its owner died."""
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
    """Listens on one address of this machine; port 0 lets the kernel choose.  Gives the address really bound."""
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
            # On loopback the kernel may give us, as our own port, the very one that we dial, and connect us to us.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on {host}:{port}")
            sock.settimeout(None)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure
