"""Declared faults: what happens to the connections between the workers of a cluster.

The workers talk over sockets, so the faults are those of a stream of bytes: it stalls, is slow, ends in the middle of a
message, or ends in one direction.  A stream loses, repeats and reorders nothing while it is open, so there are no such
faults.  A fault names the message at which it happens and a pair of workers.  Nothing is random, and nothing sleeps
unless a fault says so.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from telegrad._transport.sockets import SocketStream
from telegrad._wire import codec
from telegrad._wire.frames import PREFIX
from telegrad._wire.messages import Message
from telegrad.errors import UsageError

Kind = Literal["stall", "delay", "cut", "half-close"]
_MESSAGES: dict[str, type] = {each.__name__: each for each in get_args(Message)}


@dataclass
class Fault:
    """What happens to a connection at certain messages.  :meth:`Cluster.fault` makes one.

    Attributes:
        kind (str): ``"stall"``: the message, and all after it on the same connection, is held back until the faults
            are cleared.  ``"delay"``: the same, for ``seconds``.  ``"cut"``: the connection ends after ``bytes`` of the
            message, or after all of it if it is shorter; both workers see the end.  ``"half-close"``: the message and
            all after it is lost, and the receiver sees the end of the stream; the other direction stays open until
            the receiver closes it.
        types (tuple): The messages at which it happens, or their names; empty: any.
        sender (int, optional): The id of the worker that sends them; None: any.
        receiver (int, optional): The id of the worker that they are for; None: any.
        count (int, optional): At how many messages it happens; None: at all that match.
        seconds (float): Of a delay.
        bytes (int): Before a cut.
        hits (int): At how many messages it has happened.

    Raises:
        UsageError: There is no such kind of fault or message, or a number is negative.
    """

    kind: Kind
    types: tuple[type | str, ...] = ()
    sender: int | None = None
    receiver: int | None = None
    count: int | None = None
    seconds: float = 0.0
    bytes: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"no fault {self.kind!r}: a connection can have {', '.join(map(repr, get_args(Kind)))}")
        if self.seconds < 0 or self.bytes < 0:
            raise UsageError(f"a {self.kind} of {self.seconds} s after {self.bytes} bytes: neither can be negative")
        self.types = tuple(map(_message_type, self.types))

    def matches(self, sender: int, receiver: int, message: Message) -> bool:
        """Whether it happens at this message.

        Args:
            sender (int): The id of the worker that sends it.
            receiver (int): The id of the worker that it is for.
            message (Message): The message.

        Returns:
            Whether the workers and the type are those of the fault, and its count is not used up.
        """
        if self.count is not None and self.hits >= self.count:
            return False
        if self.sender not in (None, sender) or self.receiver not in (None, receiver):
            return False
        return not self.types or type(message) in self.types


def _message_type(kind: type | str) -> type:
    found: type | None = _MESSAGES.get(kind if isinstance(kind, str) else kind.__name__)
    if found is None:
        raise UsageError(f"no message {kind!r}; there are {', '.join(sorted(_MESSAGES))}")
    return found


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
        """Ends all faults; what they held back arrives.  A connection that has ended stays so."""
        with self._lock:
            self.declared.clear()
            streams = list(self._streams)
        for stream in streams:
            stream.clear()

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


class _Held(NamedTuple):
    """A message on its way."""

    due: float  # not sent before this time
    fault: Fault | None
    frame: bytes


class FaultyStream(SocketStream):
    """The sending end of a connection from one worker to another; applies the faults to the messages."""

    def __init__(self, sock: socket.socket, faults: Faults, sender: int, receiver: int) -> None:
        super().__init__(sock)
        self._faults = faults
        self._sender = sender
        self._receiver = receiver
        self._unparsed = bytearray()  # of a frame that is not complete
        self._held: deque[_Held] = deque()
        self._returned = 0  # bytes that were processed but not taken by the socket: the link sends them again
        self._ended = False
        self._passing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._timer_due = 0.0
        faults.join(self)

    def send(
        self, buffers: Sequence[bytes | bytearray | memoryview], deadline: float = math.inf
    ) -> Sequence[memoryview]:
        left = max(deadline - time.monotonic(), 0.0)
        if not self._passing.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            return [memoryview(buffer).cast("B") for buffer in buffers]
        try:
            if self._ended:
                return ()
            data = b"".join(buffers)
            again = data[: self._returned]
            self._unparsed += data[self._returned :]
            self._returned = 0
            while (frame := self._next_frame()) is not None:
                self._look_at(*frame)
            return self._send_due(deadline, again)
        finally:
            self._passing.release()

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

    def _look_at(self, message: Message, frame: bytes) -> None:
        fault = self._faults.at(self._sender, self._receiver, message)
        due = 0.0
        if fault is not None and fault.kind == "stall":
            due = math.inf
        elif fault is not None and fault.kind == "delay":
            due = time.monotonic() + fault.seconds
        self._held.append(_Held(due, fault, frame))

    def _send_due(self, deadline: float, *first: bytes) -> Sequence[memoryview]:
        """Sends what is held back no longer; returns what the peer has not taken by the deadline."""
        frames, ending = list(first), None
        now = time.monotonic()
        while self._held and self._held[0].due <= now and ending is None:
            _, fault, frame = self._held.popleft()
            if fault is not None and fault.kind in ("cut", "half-close"):
                ending = socket.SHUT_RDWR if fault.kind == "cut" else socket.SHUT_WR
                frame = frame[: fault.bytes] if fault.kind == "cut" else b""
            frames.append(frame)
        rest = super().send(frames, deadline)
        if ending is not None:
            self._ended = True
            self._held.clear()
            with contextlib.suppress(OSError):  # the peer has closed it
                self._sock.shutdown(ending)
            return ()
        self._returned = sum(view.nbytes for view in rest)
        if self._held:
            self._send_at(self._held[0].due)
        return rest

    def _send_at(self, due: float) -> None:
        if due == math.inf or due == self._timer_due:
            return
        self._timer_due = due
        self._timer = threading.Timer(due - time.monotonic(), self._go_on)
        self._timer.name = "telegrad-fault"
        self._timer.daemon = True
        self._timer.start()
        if self._closed:  # it may have missed this timer
            self._timer.cancel()

    def _go_on(self) -> None:
        """Sends what is due, unless the link will call ``send`` again anyway."""
        with self._passing:
            if not self._returned and not self._ended:
                with contextlib.suppress(OSError):  # it was closed
                    self._send_due(math.inf)

    def clear(self) -> None:
        """What was held back is sent."""
        with self._passing:
            self._held = deque(_Held(0.0, None, frame) for _, _, frame in self._held)
        self._go_on()

    def close(self) -> None:
        super().close()
        if (timer := self._timer) is not None:
            timer.cancel()
