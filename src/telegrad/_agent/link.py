"""A link: frames to and from one peer over one connection.

Each pair of workers has up to two, one for the calls of each side, so the dialling side of a link reads answers only.
That lets a thread that waits for its answer read the socket itself, with no thread in between (10-30 us a hop).
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from telegrad._agent.backlog import Work
from telegrad._agent.pool import Pool
from telegrad._agent.spin import LONG_BUDGET, Spin
from telegrad._transport.base import Stream
from telegrad._wire import codec
from telegrad._wire.frames import Frame, FrameReader, prefix
from telegrad._wire.messages import Message
from telegrad.errors import ProtocolError, UsageError

_JOIN_BELOW = 64 << 10
_CORKED_MOST = 256
_HOST_IS_GONE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}  # what TCP keepalives end with
_LONGEST_NAP = 1.0  # seconds: a link that another thread closed is noticed after this at the latest


class Link(Protocol):
    """What the agent asks of a way to a peer."""

    peer_id: int  # authenticated: see ``rpc.network``
    dialled: bool  # by this side
    pid: int | None  # the peer's process, where the kernel vouches for it: on a Unix socket
    brings_calls: bool  # and not only notes: a thread that served one looks out for the next
    shares_memory: bool  # the peer can read our segments
    heard: bool  # the peer has sent something on it
    held: dict[int, Any]  # the segments that the peer has not given back, by number

    def send(
        self,
        message: Message,
        stream: Sequence[memoryview] = (),
        more: bool = False,
        deadline: float = math.inf,
    ) -> None:
        """Sends a message; with ``more``, perhaps together with those that will follow in a moment.

        While the peer reads nothing, a message with a ``stream`` blocks until the deadline; then, and without a stream
        at once, another thread goes on with it.
        """

    def post(self, message: Message) -> None:
        """Sends a message along with the next one, or when ``flush`` is called."""

    def has_posted(self) -> bool: ...

    def flush(self, deadline: float = math.inf) -> None:
        """Sends what waits; see ``send`` for the deadline."""

    def help_read(self, done: Callable[[], bool], deadline: float, look: bool = True) -> bool:
        """Reads on the calling thread until ``done``; False at once if another thread reads (or none needs to).

        ``look``: it may look for what it waits for a while before it sleeps.
        """

    def begin_attending(self) -> bool:
        """From now on only the calling thread reads, with ``take``; False if another does."""

    def end_attending(self) -> None:
        """May be called again, and when the calling thread does not attend (any more)."""

    def take(self, done: Callable[[], bool]) -> Sequence[Work] | None:
        """What comes within moments, for the caller to run; None if nothing does."""

    def host_is_silent(self, seconds: float) -> bool:
        """Whether the peer's host does not respond (``transport.base.Stream``)."""

    def close(self) -> None: ...


class LinkEvents(Protocol):
    """What a link tells the agent."""

    def arrived(self, link: Any, frames: Iterable[Frame]) -> Sequence[Work]:
        """Frames came; what is left to do with them, on a thread that may block."""

    def link_broken(self, link: Any, reason: str) -> None: ...


class StreamLink:
    """A link over a stream of bytes."""

    def __init__(
        self,
        stream: Stream,
        peer_id: int,
        dialled: bool,
        pool: Pool,
        events: LinkEvents,
        allocate: Callable[[int], Any],
        pid: int | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.dialled = dialled
        self.pid = pid
        self.brings_calls = False
        self.shares_memory = False
        self.heard = False
        self.held: dict[int, Any] = {}
        self._stream = stream
        self._fd = stream.fileno()
        self._pool = pool
        self._events = events
        self._reader = FrameReader(codec.decode, codec.stream_sizes, allocate)
        self._drain: bool = getattr(stream, "drain", False)
        # A Ctrl-C may come between the taking of a lock and whatever would note it.  These know their owner themselves,
        # so an interrupted thread lets go of what it has.  None is ever taken twice: we ask before.
        self._reading = threading.RLock()
        self._reads_here: Callable[[], bool] = self._reading._is_owned  # type: ignore[attr-defined]
        self._midway = False  # the reader's thread holds bytes that are in no frame yet
        self._sending = threading.RLock()
        self._sends_here: Callable[[], bool] = self._sending._is_owned  # type: ignore[attr-defined]
        self._outbox: deque[tuple[bytes, Sequence[memoryview]]] = deque()
        self._spin = Spin(pool.running)
        self._visitor = 0  # the thread, none of the pool's, that read here last
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._closed = False
        self._shutting = threading.Lock()

    def start(self) -> None:
        """From now on the pool reads here, unless the link was closed meanwhile: its descriptor may be another's."""
        with self._shutting:
            if not self._closed:
                self._pool.watch(self._fd, self)

    # --- sending ------------------------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        stream: Sequence[memoryview] = (),
        more: bool = False,
        deadline: float = math.inf,
    ) -> None:
        """A broken link is reported to the agent, not raised."""
        header = codec.encode(message)
        if stream:
            self._send_stream(header, stream, deadline)
            return
        self._outbox.append((prefix(len(header), 0) + header, ()))
        if not (more and len(self._outbox) < _CORKED_MOST and self._pool.cork(self)):
            self.flush(0.0)

    def _send_stream(self, header: bytes, stream: Sequence[memoryview], deadline: float) -> None:
        """Sends the buffers, or copies them: when this returns, the caller may change its tensors."""
        head = prefix(len(header), sum(len(buffer) for buffer in stream)) + header
        try:
            if self._sends_here() or not self._sending.acquire(blocking=False):
                self._outbox.append((head, [memoryview(bytes(buffer)) for buffer in stream]))
            else:
                self._outbox.append((head, stream))
                all_sent = self._send_all(deadline)
                self._sending.release()
                if not all_sent:
                    self._pool.submit((_flush_and_wait, self, self._pool))
                    return
        except BaseException:
            _release(self._sending)
            raise
        self.flush(0.0)  # what came meanwhile

    def post(self, message: Message) -> None:
        header = codec.encode(message)
        self._outbox.append((prefix(len(header), 0) + header, ()))

    def has_posted(self) -> bool:
        return bool(self._outbox)

    def flush(self, deadline: float = math.inf) -> None:
        """Sends all that waits, or leaves it to the thread that is sending just now.

        That may be this very thread, interrupted by a signal handler.  What an interrupted thread leaves behind goes
        out with the next message, or when the clock comes by.  What the peer has not taken by the deadline is left to a
        thread of the pool, which waits for it.
        """
        while self._outbox and not self._sends_here():
            try:
                if not self._sending.acquire(blocking=False):
                    return
                all_sent = self._send_all(deadline)
                self._sending.release()
            except BaseException:
                _release(self._sending)
                raise
            if not all_sent:
                self._pool.submit((_flush_and_wait, self, self._pool))
                return

    def _send_all(self, deadline: float) -> bool:
        outbox = self._outbox
        try:
            while outbox:
                head, stream = outbox.popleft()
                buffers: Sequence[bytes | memoryview] = (head, *stream) if stream else (head,)
                if outbox and not stream:
                    parts, size = [head], len(head)
                    while outbox and not outbox[0][1] and size < _JOIN_BELOW:
                        part = outbox.popleft()[0]
                        parts.append(part)
                        size += len(part)
                    buffers = (b"".join(parts),)
                rest = self._stream.send(buffers, deadline)
                if rest:
                    if deadline:  # the caller gives up, and may change its tensors now
                        rest = [memoryview(bytes(view)) for view in rest]
                    outbox.appendleft((b"", rest))
                    return False
        except OSError as error:
            self._break(f"sending failed: {error}")
        except BaseException:
            self._break("the sending thread was interrupted")  # perhaps after half a frame
            raise
        return True

    # --- receiving ----------------------------------------------------------------------------------------------

    def readable(self) -> Sequence[Work]:
        """The pool saw bytes.  A thread that reads for itself has the lock and arms the descriptor when it leaves."""
        if not self._reading.acquire(blocking=False):
            return ()
        try:
            return self._receive()
        finally:
            self._reading.release()
            self._pool.arm(self._fd, self)

    def linger(self) -> Sequence[Work] | None:
        """Looks for the next request of a caller that just got its answer, without waking another thread for it."""
        if not self.brings_calls or self._closed or self._spin.rests() or not self._reading.acquire(blocking=False):
            return None
        try:
            self._pool.disarm(self._fd, self)
            return self._receive() if self._look() else None
        finally:
            self._reading.release()
            self._pool.arm(self._fd, self)

    def help_read(self, done: Callable[[], bool], deadline: float, look: bool = True) -> bool:
        if self._reads_here() or self._sends_here():
            self._help_within(done, deadline)
            return True
        try:
            if not self._reading.acquire(blocking=False):
                return False
            alone = self._pool.runs_here() or not self._visitors_changed()
            self._pool.disarm(self._fd, self)
            self._read_until(done, deadline, self._poll, look and alone)
            self._reading.release()
            self._pool.arm(self._fd, self)
            return True
        except BaseException:
            self._stop_reading()  # whatever of it was done before the Ctrl-C
            raise

    def _help_within(self, done: Callable[[], bool], deadline: float) -> None:
        """For a signal handler, or a ``__del__``, that has interrupted this very thread while it used the link.

        It may read while the thread waits for bytes.  In the middle of a frame nobody can.
        """
        if self._midway or self._sends_here():
            raise UsageError(
                f"a signal handler or __del__ waits for worker {self.peer_id}, but has interrupted its own thread in "
                "the middle of a message to or from there: let another thread make the call"
            )
        poll = select.poll()  # the interrupted thread may be inside of the other one
        poll.register(self._fd, select.POLLIN)
        self._read_until(done, deadline, poll, look=False)

    def _read_until(self, done: Callable[[], bool], deadline: float, poll: select.poll, look: bool) -> None:
        while not done() and not self._closed:
            wait = deadline - time.monotonic()
            if wait <= 0:
                break
            if (look and self._look()) or poll.poll(min(wait, _LONGEST_NAP) * 1000 + 1):
                work = self._receive()
                if work:
                    self._pool.submit_all(work)

    def _stop_reading(self) -> None:
        """Lets others read.  May be called again, and when the calling thread does not read."""
        try:
            _release(self._reading)
            self._pool.arm(self._fd, self)
        except BaseException:  # a Ctrl-C: without the arming the pool would never read here again
            _release(self._reading)
            self._pool.arm(self._fd, self)
            raise

    def _visitors_changed(self) -> bool:
        """Whether the program calls from several threads; the others want the GIL then, and nobody should look."""
        before, self._visitor = self._visitor, threading.get_ident()
        return before not in (0, self._visitor)

    def begin_attending(self) -> bool:
        if self._closed or self._reads_here():
            return False
        try:
            if not self._reading.acquire(blocking=False):
                return False
            self._pool.disarm(self._fd, self)
            return True
        except BaseException:
            self._stop_reading()
            raise

    def end_attending(self) -> None:
        if self._reads_here() and not self._midway:
            self._stop_reading()

    def take(self, done: Callable[[], bool]) -> Sequence[Work] | None:
        mine = self._reads_here()  # it may have let go, and another may have begun
        look: Callable[[], object] = lambda: done() or self._glance()  # noqa: E731
        if mine and not self._closed and self._spin.look(look, LONG_BUDGET, mine=self._pool.runs_here()):
            return () if done() else self._receive()
        return None

    def _look(self) -> list[tuple[int, int]]:
        """What can be read within moments."""
        return self._spin.look(self._glance)

    def _glance(self) -> list[tuple[int, int]]:
        return self._poll.poll(0)

    def _receive(self) -> Sequence[Work]:
        """Reads once, and then what the stream holds already and the descriptor does not announce (TLS)."""
        reader = self._reader
        receive = self._stream.recv_into
        work: list[Work] = []
        try:
            while True:
                self._midway = True
                count = receive(reader.space())
                if count == 0:
                    self._break("the connection was closed")
                    return work
                frames = reader.advance(count)
                self._midway = self._drain  # TLS may have more, which no poll would see
                if frames:
                    self.heard = True
                    work += self._events.arrived(self, frames)
                if not self._drain:
                    return work
                receive = self._stream.recv_held  # type: ignore[attr-defined]
        except BlockingIOError:
            self._midway = False
            return work
        except ProtocolError as error:
            self._break(str(error))
        except (OSError, ValueError) as error:
            silent = isinstance(error, OSError) and error.errno in _HOST_IS_GONE
            self._break(f"its host does not respond: {error}" if silent else f"receiving failed: {error}")
        except BaseException:
            self._break("the reading thread was interrupted")  # half a frame may be lost: the stream is of no use
            raise
        return work

    # --- the end ------------------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        if self._shut():
            self._events.link_broken(self, reason)

    def host_is_silent(self, seconds: float) -> bool:
        return self._stream.host_is_silent(seconds)

    def close(self) -> None:
        self._shut()

    def _shut(self) -> bool:
        """Closes the stream; whether this call was the first."""
        with self._shutting:
            if self._closed:
                return False
            self._closed = True
        self._pool.forget(self._fd, self)
        with contextlib.suppress(OSError):
            self._stream.close()
        self.held.clear()
        return True

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptor, and leaves the connection to the parent."""
        self._closed = True
        self._stream.disown()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<StreamLink {'to' if self.dialled else 'from'} {self.peer_id}, {state}, {type(self._stream).__name__}>"


def _release(lock: threading.RLock) -> None:
    """Only if the calling thread has it.  One call that does both: a Ctrl-C may come between any two."""
    try:
        lock.release()
    except RuntimeError:
        pass


def _flush_and_wait(link: StreamLink, pool: Pool) -> None:
    """On a thread of the pool, which does not count as running while the peer reads nothing."""
    with pool.blocked():
        link.flush()
