"""Finds peers that are dead although their connections look open.

The kernel tells most of it: a process that ends closes its sockets, and TCP keepalives find a host that is gone from an
idle connection.  Two cases are left to look for: data is under way to a host that does not respond, and a process has
ended while a child of its holds its sockets open.  A process that is busy, holds the GIL or was stopped is not dead:
calls to it run into their own deadlines.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from telegrad._agent.peers import Peer
from telegrad._core.interface import Link


@dataclass(slots=True)
class _Process:
    """A peer's process, as the kernel knows it."""

    fd: int
    ended: bool = False  # at the last look


class Liveness:
    """``lost`` is told of a link whose peer is dead, and why."""

    def __init__(self, host_seconds: float, lost: Callable[[Link, str], None]) -> None:
        self._host_seconds = host_seconds
        self._lost = lost
        self._processes: dict[int, _Process] = {}  # by peer

    def adopt(self, link: Link) -> None:
        """A link begins.  Links of one peer have one process."""
        if link.pid is None or link.peer_id in self._processes:
            return
        with contextlib.suppress(OSError):  # no descriptor left, or the process has just ended: its socket tells
            process = _Process(os.pidfd_open(link.pid))
            if self._processes.setdefault(link.peer_id, process) is not process:
                os.close(process.fd)  # the peer's other link began at the same moment

    def look(self, peers: Iterable[Peer]) -> None:
        """Called about once a second."""
        for peer in peers:
            for link in peer.links:
                if link.host_is_silent(self._host_seconds):
                    self._lost(link, f"its host has not responded for {self._host_seconds:g} s")
            self._look_at_process(peer)

    def _look_at_process(self, peer: Peer) -> None:
        process = self._processes.get(peer.id)
        if process is None:
            return
        if not peer.links:
            self.forget(peer.id)
        elif process.ended:  # at the last look already, so its last messages have been read since
            for link in peer.links:
                self._lost(link, "its process has ended")
        else:
            process.ended = _has_ended(process.fd)

    def forget(self, peer: int) -> None:
        process = self._processes.pop(peer, None)
        if process is not None:
            os.close(process.fd)

    def close(self) -> None:
        for peer in list(self._processes):
            self.forget(peer)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
