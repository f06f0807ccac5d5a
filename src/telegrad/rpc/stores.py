"""Opens torch's own stores by URL.  The workers of a job exchange their records in one."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, Queue
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from telegrad._text import printable
from telegrad._torch import DistNetworkError, FileStore, Store, TCPStore
from telegrad._transport.sockets import is_loopback
from telegrad.errors import RendezvousError, UsageError

T = TypeVar("T")

log = logging.getLogger("telegrad.rpc")

_GRACE = 1.0  # seconds after torch's own timeout, so that torch's error is seen first
_MAX_VALUE = 1 << 16  # bytes; the longest value that a worker writes is its record, of about 1 KB
_BACKLOG = 512


class StoreGoneError(RendezvousError):
    """The store's server went away, with the process that ran it."""


class JobStore:
    """A part of torch's store, under a prefix.  Values are text.

    Once the server is gone, methods raise ``StoreGoneError`` without a call into torch, which would print a C++ stack.
    ``watch`` is an idle connection to the server: the kernel closes it when the server ends.
    """

    def __init__(self, raw: Store, watch: socket.socket | None = None, prefix: str = "") -> None:
        self.raw = raw
        self._watch = watch
        self._prefix = prefix

    def under(self, prefix: str) -> JobStore:
        return JobStore(self.raw, self._watch, f"{self._prefix}{prefix}/")

    def has(self, key: str) -> bool:
        return self._ask(lambda: bool(self.raw.check([self._prefix + key])))

    def get(self, key: str) -> str | None:
        """The value of a key; None when it has none."""
        if not self.has(key):
            return None
        return self._text(key, self._ask(lambda: self.raw.get(self._prefix + key)))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.raw.set(self._prefix + key, value))

    def set_once(self, key: str, value: str) -> str:
        """Sets a key that has no value yet; returns the value that it has now."""
        return self._text(key, self._ask(lambda: self.raw.compare_set(self._prefix + key, "", value)))

    def delete(self, key: str) -> None:
        self._ask(lambda: self.raw.delete_key(self._prefix + key))

    def check_alive(self) -> None:
        if self._watch is None:
            return
        poll = select.poll()
        if self._watch.fileno() >= 0:
            poll.register(self._watch, select.POLLIN)
        if self._watch.fileno() < 0 or poll.poll(0):  # the server sends nothing on it: readable means closed
            raise StoreGoneError("the rendezvous is gone: rank 0 or the launcher, which served it, has ended")

    def close(self) -> None:
        """Ends the watch.  The store, and the server in it, live for as long as ``raw`` is referenced."""
        if self._watch is not None:
            self._watch.close()

    def _ask(self, action: Callable[[], T]) -> T:
        self.check_alive()
        try:
            return action()
        except DistNetworkError as error:
            raise StoreGoneError(f"the rendezvous does not answer any more: {_first_line(error)}") from error
        except RuntimeError as error:
            raise RendezvousError(f"the rendezvous failed: {_first_line(error)}") from error

    def _text(self, key: str, value: bytes) -> str:
        try:
            if len(value) <= _MAX_VALUE:
                return value.decode()
        except UnicodeDecodeError:
            pass
        raise malformed(key, value[:_MAX_VALUE].decode(errors="replace"))


def malformed(key: str, value: str) -> RendezvousError:
    return RendezvousError(
        f"malformed value at the rendezvous under {key!r}: '{printable(value, 60)}'. Another program, or another "
        "version of telegrad, writes to it: give this job a rendezvous of its own (MASTER_PORT, or another file)"
    )


def open_store(url: str, rank: int, world_size: int | None, timeout: float, *, local: bool) -> JobStore:
    """The store of an init method; rank 0 serves it where no file or launcher does.

    ``local``: the job has no secret, and is confined to this host.  Rank 0 then serves the store on loopback only.
    """
    parts = urlsplit(url)
    if parts.scheme == "env":
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as error:
            raise RendezvousError(
                f"init_method env:// needs the environment variable {error.args[0]}: start the program with "
                "'telegrad run' or 'torchrun', or set it to where rank 0 runs"
            ) from None
        except ValueError:
            raise RendezvousError(f"MASTER_PORT is not a number: {os.environ['MASTER_PORT']!r}") from None
        return _tcp_store(host, port, rank, world_size, timeout, local)
    if parts.scheme == "tcp":
        if not parts.hostname or not parts.port:
            raise UsageError(f"init_method {url!r} needs a host and a port: tcp://host:port")
        return _tcp_store(parts.hostname, parts.port, rank, world_size, timeout, local)
    if parts.scheme == "file":
        if not parts.path:
            raise UsageError(f"init_method {url!r} needs a path: file:///path")
        store = FileStore(parts.path, world_size or -1)
        store.set_timeout(timedelta(seconds=timeout))
        return JobStore(store)
    raise UsageError(f"init_method {url!r} is none of env://, tcp://host:port and file:///path")


def identity_in(url: str, rank: int, world_size: int | None) -> tuple[int, int | None]:
    """Rank and world size, from the arguments, the URL, or the environment, in this order."""
    query = parse_qs(urlsplit(url).query)
    is_env = urlsplit(url).scheme == "env"
    if rank < 0:
        found = query["rank"][0] if "rank" in query else os.environ.get("RANK") if is_env else None
        rank = _number("RANK", found) if found is not None else -1
    if not world_size:
        found = query["world_size"][0] if "world_size" in query else os.environ.get("WORLD_SIZE") if is_env else None
        world_size = (_number("WORLD_SIZE", found) if found is not None else 0) or None
    return rank, world_size


def _number(name: str, text: str) -> int:
    try:
        return max(int(text), 0)
    except ValueError:
        raise UsageError(f"{name} is not a number: {text!r}") from None


def _tcp_store(host: str, port: int, rank: int, world_size: int | None, timeout: float, local: bool) -> JobStore:
    from_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not from_launcher
    if local and not from_launcher:
        named, host = host, _loopback_for(host, port)
        if serves and not is_loopback(named):
            log.warning(
                "the rendezvous at %s:%d is served on loopback only, because the job has no secret. If the program "
                "also calls init_process_group at this port, call it before init_rpc, or set TELEGRAD_SECRET",
                named,
                port,
            )

    def connect(listen_fd: int | None = None) -> TCPStore:
        return TCPStore(
            host,
            port,
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # telegrad waits itself, and names the missing ranks
            multi_tenant=not from_launcher,  # the process group of the same job may use the same port
            master_listen_fd=listen_fd,
        )

    deadline = time.monotonic() + timeout
    watch: socket.socket | None = None
    try:
        if serves:
            return JobStore(_serve_on_loopback(host, port, connect) if local else connect())
        # Wait for the server with a plain socket: torch's store prints warnings while it waits.
        while (watch := _connection(host, port)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.05)
        return JobStore(_within(max(deadline - time.monotonic(), 0.0) + _GRACE, connect), watch)
    except BaseException as error:
        if watch is not None:
            watch.close()
        if isinstance(error, TimeoutError):
            raise _no_answer(host, port, timeout) from None
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError, OSError)) or type(error) is RuntimeError:
            raise _store_error(host, port, timeout, serves, error) from error
        raise


def _no_answer(host: str, port: int, timeout: float) -> RendezvousError:
    probe = _connection(host, port)
    if probe is not None:
        probe.close()
        return RendezvousError(
            f"something at {host}:{port} takes connections but is no rendezvous: another program has that port; "
            "choose another (MASTER_PORT)"
        )
    return RendezvousError(f"cannot reach the rendezvous at {host}:{port} within {timeout:g} s. Does rank 0 run there?")


def _store_error(host: str, port: int, timeout: float, serves: bool, error: BaseException) -> RendezvousError:
    text = str(error)
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    if taken or "EADDRINUSE" in text or "address already in use" in text.lower():
        return RendezvousError(
            f"port {port} on {host} is in use, by another job or by a second worker with rank 0: "
            "choose another port (MASTER_PORT)"
        )
    role = "serve" if serves else "reach"
    return RendezvousError(
        f"cannot {role} the rendezvous at {host}:{port} within {timeout:g} s: {_first_line(error)}. "
        "Does rank 0 run there?"
    )


def _serve_on_loopback(host: str, port: int, connect: Callable[[int | None], TCPStore]) -> TCPStore:
    """Serves a store on loopback.  torch itself would listen on all addresses, and lets any client read and write.

    A server that this process already has at that port, such as that of its process group, is used.  The constructor
    looks for one first; the descriptor -1 makes it fail when there is none.
    """
    try:
        return connect(-1)
    except DistNetworkError:
        pass
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        return connect(sock.detach())  # the server closes it, at its end


def _loopback_for(host: str, port: int) -> str:
    """The loopback address by which ``host`` is reached, which must be this host."""
    try:
        found = {(info[0], info[4]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        if host == socket.gethostname():
            return "127.0.0.1"
        raise RendezvousError(f"cannot reach the rendezvous at {host}:{port}: {error}") from error
    if not any(_can_bind(family, address) for family, address in found):
        raise RendezvousError(
            f"the rendezvous at {host}:{port} is on another host, and a job without a secret is confined to one host: "
            "set the same TELEGRAD_SECRET on every worker"
        )
    return "::1" if all(family == socket.AF_INET6 for family, _ in found) else "127.0.0.1"


def _can_bind(family: int, address: Any) -> bool:
    """Whether it is an address of this host: a socket cannot be bound to any other."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0])


def _within(timeout: float, action: Callable[[], T]) -> T:
    """Runs an action on a thread and waits ``timeout`` seconds: torch's stores may wait forever for a silent server."""
    outcome: Queue[T | BaseException] = Queue()

    def run() -> None:
        try:
            outcome.put(action())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="telegrad-rendezvous", daemon=True).start()
    try:
        found = outcome.get(timeout=timeout)
    except Empty:
        raise TimeoutError from None
    if isinstance(found, BaseException):
        raise found
    return found


def _connection(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_connection((host, port), 1.0)
    except OSError:
        return None
