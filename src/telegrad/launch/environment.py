"""The environment variables of the workers of a job on one host, and the port on which the workers meet."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping

from telegrad.errors import UsageError

__all__ = ["free_port", "job_environment", "worker_environment"]

LOOPBACK = "127.0.0.1"
_NOT_EPHEMERAL = range(20_000, 32_768)  # Linux gives the ports above to outgoing connections of any process


def job_environment(base: Mapping[str, str], workers: int, master_port: int | None = None) -> dict[str, str]:
    """Returns the environment that all workers of one job on this host share.

    It has the place where they meet (``MASTER_ADDR``, ``MASTER_PORT``), their number (``WORLD_SIZE``,
    ``LOCAL_WORLD_SIZE``) and ``TELEGRAD_SECRET``, a new one unless ``base`` has one. For several workers it also has
    ``OMP_NUM_THREADS=1`` and a ``PYTHONBREAKPOINT`` that explains why no debugger opens, unless ``base`` has these.

    Args:
        base (Mapping): The environment to start from.
        workers (int): The number of workers.
        master_port (int, optional): The port on which the workers meet (default: a free one).

    Returns:
        A new dict.

    Raises:
        UsageError: The port cannot be used.
    """
    job = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    job["WORLD_SIZE"] = job["LOCAL_WORLD_SIZE"] = str(workers)
    job["MASTER_ADDR"] = LOOPBACK
    job["MASTER_PORT"] = str(free_port(master_port or 0))
    job["TELEGRAD_SECRET"] = base.get("TELEGRAD_SECRET") or secrets.token_hex(32)
    if workers > 1:
        job.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        job.setdefault("PYTHONBREAKPOINT", "telegrad.launch.process.refuse_breakpoint")
    return job


def worker_environment(job: Mapping[str, str], rank: int) -> dict[str, str]:
    """Returns the environment of one worker: that of the job, with ``RANK`` and ``LOCAL_RANK``.

    Args:
        job (Mapping): What :func:`job_environment` gave.
        rank (int): The rank of the worker.

    Returns:
        A new dict.

    Example::

        >>> from telegrad.launch import job_environment, worker_environment
        >>> environment = worker_environment(job_environment({}, workers=2), rank=1)
        >>> environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]
        ('1', '2', '127.0.0.1')
    """
    return {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def free_port(port: int = 0) -> int:
    """Finds a TCP port on loopback that no other process listens on.

    Nothing holds the port until a worker uses it.

    Args:
        port (int, optional): The port to check; 0 for any free one (default: 0).

    Returns:
        The port.

    Raises:
        UsageError: The port is in use, or no port at all.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port; choose one from 1 to 65535")
    if port:
        return _port_to_listen_on(port)
    for _ in range(20):
        with contextlib.suppress(UsageError):
            return _port_to_listen_on(secrets.choice(_NOT_EPHEMERAL))
    return _port_to_listen_on(0)


def _port_to_listen_on(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()  # on Linux two sockets may bind one port with SO_REUSEADDR, but only one may listen
        except OSError as error:
            raise UsageError(
                f"cannot use port {port} on {LOOPBACK}: {error.strerror}; leave the port out and a free one is chosen"
            ) from error
        return int(probe.getsockname()[1])
