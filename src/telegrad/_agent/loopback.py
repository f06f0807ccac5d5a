"""Links inside one process: what tests run on, and how a worker calls itself.

Messages go through the same codec as on a socket, and the receiver gets copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telegrad._agent.pool import Pool
from telegrad._wire import codec
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Message
from telegrad.errors import ProtocolError


class Carrier(Protocol):
    """Takes a message from one worker to another: at once, late, twice, or never."""

    def carry(self, sender: int, receiver: int, message: Message, deliver: Callable[[], None]) -> None: ...


class Direct:
    """The carrier that loses nothing."""

    def carry(self, sender: int, receiver: int, message: Message, deliver: Callable[[], None]) -> None:
        deliver()


class MemoryLink:
    """One end of a link between two agents of this process."""

    def __init__(self, peer_id: int, dialled: bool, agent: Any, pool: Pool, carrier: Carrier) -> None:
        self.peer_id = peer_id
        self.dialled = dialled
        self.pid: int | None = None
        self.brings_calls = False
        self.shares_memory = False
        self.heard = False
        self.held: dict[int, Any] = {}
        self._agent = agent
        self._pool = pool
        self._carrier = carrier
        self._twin: MemoryLink | None = None
        self._closed = False

    def send(
        self,
        message: Message,
        stream: Sequence[memoryview] = (),
        more: bool = False,
        deadline: float = math.inf,
    ) -> None:
        twin = self._twin
        if self._closed or twin is None:
            return
        header = codec.encode(message)
        copies = [bytes(buffer) for buffer in stream]
        self._carrier.carry(twin.peer_id, self.peer_id, message, lambda: twin._take(header, copies))

    def post(self, message: Message) -> None:
        self.send(message)

    def has_posted(self) -> bool:
        return False

    def flush(self, deadline: float = math.inf) -> None:
        pass

    def _take(self, header: bytes, buffers: list[bytes]) -> None:
        if self._closed:
            return
        frame = Frame(codec.decode(header), [bytearray(buffer) for buffer in buffers])
        self.heard = True
        try:
            work = self._agent.arrived(self, (frame,))
        except ProtocolError as error:
            self.close()
            self._agent.link_broken(self, str(error))
            return
        if work:
            self._pool.submit_all(work)

    def help_read(self, done: Callable[[], bool], deadline: float, look: bool = True) -> bool:
        return False

    def begin_attending(self) -> bool:
        return False

    def end_attending(self) -> None:
        pass

    def take(self, done: Callable[[], bool]) -> None:
        return None

    def host_is_silent(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        """The other end notices, as it would on a socket."""
        if self._closed:
            return
        self._closed = True
        self.held.clear()
        twin = self._twin
        if twin is not None and not twin._closed:
            twin._closed = True
            twin.held.clear()
            twin._agent.link_broken(twin, "the connection was closed")

    def __repr__(self) -> str:
        return f"<MemoryLink {'to' if self.dialled else 'from'} {self.peer_id}{', closed' if self._closed else ''}>"


def connect(caller: Any, callee: Any, carrier: Carrier) -> tuple[MemoryLink, MemoryLink]:
    """A link from one agent to another: the caller's end and the callee's."""
    here = MemoryLink(callee.me.worker_id, True, caller, caller.pool, carrier)
    there = MemoryLink(caller.me.worker_id, False, callee, callee.pool, carrier)
    here._twin, there._twin = there, here
    return here, there
