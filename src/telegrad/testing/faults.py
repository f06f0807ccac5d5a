"""Declared faults: what happens to the connections between workers of one process.

The workers talk over sockets, so the faults are those of a stream of bytes: it stalls, is slow, ends in the middle of a
message, or ends in one direction.  A fault names the message at which it happens and a pair of workers.  Nothing is
random and nothing sleeps unless a fault says so.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from telegrad._transport.sockets import SocketStream
from telegrad._wire import codec
from telegrad._wire.frames import PREFIX
from telegrad._wire.messages import Message

Kind = Literal["stall", "delay", "cut", "half-close"]


@dataclass
class Fault:
    """What happens to a connection at the next ``count`` matching messages (None: at all of them).

    ``stall``
        The message, and all behind it on the same connection, is held back until the fault is cleared.
    ``delay``
        The same, for ``seconds``.
    ``cut``
        The connection is closed after ``bytes`` of the message.
    ``half-close``
        The message and all behind it is lost, and the receiver sees the end of the stream; the other direction stays.
    """

    kind: Kind
    types: tuple[type, ...] = ()  # empty: any
    sender: int | None = None
    receiver: int | None = None
    count: int | None = None
    seconds: float = 0.0
    bytes: int = 0
    hits: int = 0

    def matches(self, sender: int, receiver: int, message: Message) -> bool:
        if self.count is not None and self.hits >= self.count:
            return False
        if self.sender not in (None, sender) or self.receiver not in (None, receiver):
            return False
        return not self.types or isinstance(message, self.types)


@dataclass
class Faults:
    """The faults of one cluster.  The first that matches decides."""

    declared: list[Fault] = field(default_factory=list)
    carried: int = 0  # messages
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: list[FaultyStream] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self.declared.append(fault)
        return fault

    def clear(self) -> None:
        """Ends all faults; what they held back arrives."""
        with self._lock:
            self.declared.clear()
            streams = list(self._streams)
        for stream in streams:
            stream.go_on()

    def join(self, stream: FaultyStream) -> None:
        with self._lock:
            self._streams.append(stream)

    def at(self, sender: int, receiver: int, message: Message) -> Fault | None:
        with self._lock:
            self.carried += 1
            fault = next((each for each in self.declared if each.matches(sender, receiver, message)), None)
            if fault is not None:
                fault.hits += 1
            return fault


class FaultyStream(SocketStream):
    """The sending end of a connection from one worker to another, which looks at the messages that pass."""

    def __init__(self, sock: socket.socket, faults: Faults, sender: int, receiver: int) -> None:
        super().__init__(sock)
        self._faults = faults
        self._sender = sender
        self._receiver = receiver
        self._unparsed = bytearray()  # of a frame that is not complete
        self._held = bytearray()  # what a fault holds back
        self._holds = False
        self._ended = False
        self._passing = threading.Lock()
        faults.join(self)

    def send(
        self, buffers: Sequence[bytes | bytearray | memoryview], deadline: float = math.inf
    ) -> Sequence[memoryview]:
        with self._passing:
            for buffer in buffers:
                self._unparsed += buffer
            while (frame := self._next_frame()) is not None:
                self._pass(*frame)
        return ()

    def _next_frame(self) -> tuple[Message, bytes] | None:
        data = self._unparsed
        if len(data) < PREFIX.size:
            return None
        _, header_size, stream_size = PREFIX.unpack_from(data)
        size = PREFIX.size + header_size + stream_size
        if len(data) < size:
            return None
        frame = bytes(data[:size])
        del data[:size]
        return codec.decode(frame[PREFIX.size : PREFIX.size + header_size]), frame

    def _pass(self, message: Message, frame: bytes) -> None:
        if self._ended:
            return
        fault = self._faults.at(self._sender, self._receiver, message)
        if self._holds:
            self._held += frame
            return
        if fault is None:
            super().send((frame,))
            return
        match fault.kind:
            case "stall":
                self._hold(frame)
            case "delay":
                self._hold(frame)
                later = threading.Timer(fault.seconds, self.go_on)
                later.daemon = True
                later.start()
            case "cut":
                super().send((frame[: fault.bytes],))
                self.close()
            case "half-close":
                self._ended = True
                self._sock.shutdown(socket.SHUT_WR)

    def _hold(self, frame: bytes) -> None:
        self._holds = True
        self._held += frame

    def go_on(self) -> None:
        """What was held back goes out."""
        with self._passing:
            self._holds = False
            held, self._held = bytes(self._held), bytearray()
            if held and not self._closed:
                with contextlib.suppress(OSError):
                    super().send((held,))
