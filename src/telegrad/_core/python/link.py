"""Frames to and from one peer over one connection."""

from __future__ import annotations

import contextlib
import errno
import math
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telegrad._core.python.pending import PendingCall
from telegrad._core.python.scheduler import LinkSchedule
from telegrad._transport.base import Stream
from telegrad._wire import codec
from telegrad._wire.frames import Frame, FrameReader, prefix
from telegrad._wire.messages import Message
from telegrad.errors import ProtocolError

_JOIN_BELOW = 64 << 10  # bytes of small messages that are copied together for one system call
_HOST_IS_GONE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}  # how TCP keepalives end a connection


class LinkHost(Protocol):
    """What a link tells the data plane."""

    def finish_sending(self, link: PythonLink) -> None:
        """The peer does not take all at once: another thread should flush the link."""

    def link_closes(self, link: PythonLink) -> None:
        """The descriptor is about to be closed."""

    def link_broken(self, link: PythonLink, reason: str) -> None: ...


class PythonLink(LinkSchedule):
    def __init__(
        self,
        stream: Stream,
        peer_id: int,
        dialled: bool,
        pid: int | None,
        allocate: Callable[[int], Any],
        host: LinkHost,
    ) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.dialled = dialled
        self.pid = pid
        self.heard = False
        self.closed = False
        self.shares_memory = False
        self.held: dict[int, Any] = {}
        self.pending: dict[int, PendingCall] = {}
        self.kept: dict[int, Any] = {}  # by call id: what must not be freed before the answer comes, be it late
        self.fd = stream.fileno()
        self.watched = 0  # the events that the epoll watches it for
        self.poll = self.make_poll()
        # A Ctrl-C can come between taking a lock and noting that it is taken.  An RLock knows its owner, so an
        # interrupted thread can release what it holds.
        self.reading = threading.RLock()
        self.reader = 0  # the thread that reads answers
        self.in_frame = False  # the reader holds bytes that are in no frame yet
        self._sending = threading.RLock()
        self.sender = 0  # the thread that sends
        self.outbox: deque[tuple[bytes, Sequence[memoryview]]] = deque()
        self._stream = stream
        self._drains: bool = getattr(stream, "drain", False)  # TLS holds bytes that the descriptor does not announce
        self._frames = FrameReader(codec.decode, codec.stream_sizes, allocate)
        self._host = host
        self._closing = threading.Lock()

    def make_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return poll

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message, buffers: Sequence[memoryview] = (), deadline: float = math.inf) -> None:
        header = codec.encode(message)
        if buffers:
            size = sum(len(buffer) for buffer in buffers)
            self.flush(deadline, (prefix(len(header), size) + header, buffers))
        else:
            self.outbox.append((prefix(len(header), 0) + header, ()))
            self.flush(0.0)

    def send_last(self, message: Message, deadline: float) -> None:
        header = codec.encode(message)
        self.flush(deadline, (prefix(len(header), 0) + header, ()))

    @property
    def has_unsent(self) -> bool:
        return bool(self.outbox)

    def flush(self, deadline: float, last: tuple[bytes, Sequence[memoryview]] | None = None) -> None:
        """Sends all that waits, and then ``last``, or leaves it to the thread that is sending.

        What the peer has not taken by the deadline is left to another thread.
        """
        me = threading.get_ident()
        while last is not None or self.outbox:
            try:  # the sender is this thread if a signal handler, or a ``__del__``, has interrupted it
                acquired = self.sender != me and self._sending.acquire(blocking=False)
                if acquired:
                    self.sender = me
                    if last is not None:
                        self.outbox.append(last)
                    all_sent = self._send_all(deadline)
                    self.sender = 0
                    self._sending.release()
            except BaseException:
                if self.sender == me:
                    self.sender = 0
                try:  # no call before this one, in which another Ctrl-C could come
                    self._sending.release()
                except RuntimeError:  # the interrupt came before the lock was taken
                    pass
                raise
            if acquired and not all_sent:
                self._host.finish_sending(self)
                return
            if last is not None:
                if not acquired:
                    self.outbox.append((last[0], _copied(last[1])))
                last, deadline = None, 0.0  # what other threads have added is not waited for
            elif not acquired:
                return

    def _send_all(self, deadline: float) -> bool:
        """Whether the peer took all of it before the deadline."""
        outbox = self.outbox
        try:
            while outbox:
                head, buffers = outbox.popleft()
                if buffers:
                    rest = self._stream.send((head, *buffers), deadline)
                else:
                    rest = self._stream.send((self._joined(head) if outbox else head,), deadline)
                if rest:
                    unsent = [(b"", rest), *(outbox.popleft() for _ in range(len(outbox)))]
                    outbox.extendleft((head, _copied(buffers)) for head, buffers in reversed(unsent))
                    return False
        except OSError as error:
            self.fail(f"sending failed: {error}")
        except BaseException:
            self.fail("the sending thread was interrupted")  # perhaps after half a frame
            raise
        return True

    def _joined(self, head: bytes) -> bytes:
        """A message and the small ones behind it, as one."""
        heads, size = [head], len(head)
        while self.outbox and not self.outbox[0][1] and size < _JOIN_BELOW:
            heads.append(self.outbox.popleft()[0])
            size += len(heads[-1])
        return b"".join(heads)

    # --- receiving ----------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Reads what is there, without waiting.  One thread at a time."""
        frames: list[Frame] = []
        reader = self._frames
        receive = self._stream.recv_into
        try:
            while True:
                self.in_frame = True
                count = receive(reader.space())
                if not count:
                    self.fail("the connection was closed")
                    break
                frames += reader.advance(count)
                if not self._drains:
                    break
                receive = self._stream.recv_held  # type: ignore[attr-defined]
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self.fail(str(error))
        except Exception as error:  # a MemoryError too, for a large header
            silent = isinstance(error, OSError) and error.errno in _HOST_IS_GONE
            self.fail(f"its host does not respond: {error}" if silent else f"receiving failed: {error}")
        except BaseException:
            self.fail("the reading thread was interrupted")  # half a frame may be lost: the stream is of no use
            raise
        self.in_frame = False
        self.heard = self.heard or bool(frames)
        return frames

    # --- the end ------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Closes the connection and reports its end, once."""
        if self.close():
            self._host.link_broken(self, reason)

    def close(self) -> bool:
        """Closes the connection; False if it was closed."""
        if not self._closing.acquire(blocking=False):  # never released, so that nothing waits for it
            return False
        self.closed = True
        self._host.link_closes(self)
        with contextlib.suppress(OSError):
            self._stream.close()
        self.held.clear()
        self.kept.clear()
        return True

    def disown(self) -> None:
        self.closed = True
        self._stream.disown()

    def host_is_silent(self, seconds: float) -> bool:
        return self._stream.host_is_silent(seconds)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Link {'to' if self.dialled else 'from'} {self.peer_id}, {state}, {type(self._stream).__name__}>"


def _copied(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Copies of those that are not copies already."""
    return [view if type(view.obj) is bytes else memoryview(bytes(view)) for view in buffers]
