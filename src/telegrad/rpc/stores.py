"""torch's own stores, by URL: where the workers of a job first meet."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, Queue
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from telegrad._torch import FileStore, Store, TCPStore
from telegrad.errors import RendezvousError, UsageError

T = TypeVar("T")

_GRACE = 1.0  # after its own timeout, in which torch has the first word


def open_store(url: str, rank: int, world_size: int | None, timeout: float) -> Store:
    """The store of an init method; rank 0 serves it where no file or launcher does."""
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
        return _tcp_store(host, port, rank, world_size, timeout)
    if parts.scheme == "tcp":
        if not parts.hostname or not parts.port:
            raise UsageError(f"init_method {url!r} needs a host and a port: tcp://host:port")
        return _tcp_store(parts.hostname, parts.port, rank, world_size, timeout)
    if parts.scheme == "file":
        if not parts.path:
            raise UsageError(f"init_method {url!r} needs a path: file:///path")
        store = FileStore(parts.path, world_size or -1)
        store.set_timeout(timedelta(seconds=timeout))
        return store
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


def _tcp_store(host: str, port: int, rank: int, world_size: int | None, timeout: float) -> Store:
    from_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not from_launcher

    def connect() -> TCPStore:
        return TCPStore(
            host,
            port,
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # we wait ourselves, and can say who is missing
            multi_tenant=not from_launcher,  # the process group of the same job may use the same port
        )

    deadline = time.monotonic() + timeout
    try:
        if serves:
            return connect()
        # Wait for the server with a plain socket: torch's store would fill the terminal while it waits.
        while not _listens(host, port):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.05)
        return _within(max(deadline - time.monotonic(), 0.0) + _GRACE, connect)
    except TimeoutError:
        if _listens(host, port):
            raise RendezvousError(
                f"something at {host}:{port} takes connections but is no rendezvous: another program has that port; "
                "choose another (MASTER_PORT)"
            ) from None
        raise RendezvousError(
            f"cannot reach the rendezvous at {host}:{port} within {timeout:g} s. Does rank 0 run there?"
        ) from None
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise RendezvousError(
                f"port {port} on {host} is in use, by another job or by a second worker with rank 0: "
                "choose another port (MASTER_PORT)"
            ) from error
        role = "serve" if serves else "reach"
        raise RendezvousError(
            f"cannot {role} the rendezvous at {host}:{port} within {timeout:g} s: {text.splitlines()[0]}. "
            "Does rank 0 run there?"
        ) from error


def _within(timeout: float, action: Callable[[], T]) -> T:
    """Runs something that may never return, as torch's stores do with a server that does not answer, on a thread."""
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


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
