"""What a worker knows of the others."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from telegrad._transport.dial import Address
from telegrad._wire.values import Route

if TYPE_CHECKING:
    from telegrad._core.interface import Link


class WorkerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a worker publishes of itself at the rendezvous."""

    worker_id: int
    name: str
    pid: int = 0
    host: str = ""  # equal on two workers that share a kernel, a network namespace and a namespace of processes
    addresses: tuple[Address, ...] = ()
    shared_memory_fd: int = -1
    shared_memory_token: bytes = b""
    main: str = ""  # the program that runs as __main__
    allow_pickle: bool = True
    world_size: int = 0  # how many workers it expects; 0: any number
    nonce: bytes = b""  # random, drawn by the worker for this join


class PeerState(enum.Enum):
    KNOWN = "known"
    LEFT = "shut down"
    LOST = "lost"


@dataclass(eq=False)
class Peer:
    """One other worker (or oneself)."""

    record: WorkerRecord
    route: Route
    state: PeerState = PeerState.KNOWN
    reason: str = ""
    link: Link | None = None  # the one that we dialled, for our calls
    accepted: set[Link] = field(default_factory=set)
    spare: set[Link] = field(default_factory=set)
    unsent: list[Any] = field(default_factory=list)  # internal messages that wait until the peer is reached
    dialling: threading.RLock = field(default_factory=threading.RLock)  # a signal handler may dial within a dial

    def __post_init__(self) -> None:
        self.id = self.record.worker_id
        self.name = self.record.name

    @property
    def links(self) -> list[Link]:
        link = self.link
        return [*self.accepted, *self.spare, link] if link is not None else [*self.accepted, *self.spare]

    def dialled(self, link: Link) -> None:
        """The first that is there carries our calls.  A second one, of a dial that was interrupted by a dial, stays
        open and idle: to close it would look like our end over there."""
        if self.link is None:
            self.link = link
        else:
            self.spare.add(link)

    def forget(self, link: Link) -> None:
        self.accepted.discard(link)
        self.spare.discard(link)
        if self.link is link:
            self.link = None

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} ({self.id}), {self.state.value}>"
