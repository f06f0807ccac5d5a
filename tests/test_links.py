"""What every link must do, over every transport."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from telegrad._agent.backlog import Work
from telegrad._agent.link import StreamLink
from telegrad._agent.loopback import Direct, connect
from telegrad._agent.pool import Pool

from support import AT_ONCE, PATIENCE, eventually, in_thread, no_new_threads
from telegrad._agent.agent import Agent
from telegrad._transport.buffers import BufferPool
from telegrad._transport.shared_memory import SegmentPool
from telegrad._transport.sockets import SocketStream, connect_tcp, listen_tcp
from telegrad._transport.tls import TlsStream, make_authority, tls_end
from telegrad._wire.frames import PREFIX, Frame, prefix
from telegrad._wire.messages import Body, Call, Goodbye, Node, Reply
from telegrad.errors import UsageError


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_new_threads():
        yield


class Side:
    """The least agent: it remembers what arrives, and answers calls if told to."""

    def __init__(self, name: str, worker_id: int) -> None:
        self.me = SimpleNamespace(worker_id=worker_id)
        self.pool = Pool(name, 4)
        self.buffers = BufferPool()
        self.frames: list[Frame] = []
        self.broken: list[str] = []
        self.answers = False
        self.link: Any = None

    def arrived(self, link: Any, frames: Iterable[Frame]) -> Sequence[Work]:
        frames = list(frames)
        self.frames.extend(frames)
        if not self.answers:
            return ()
        return [
            (
                lambda link, frame: link.send(Reply(frame.message.call_id, frame.message.body), frame.buffers),
                link,
                frame,
            )
            for frame in frames
        ]

    def link_broken(self, link: Any, reason: str) -> None:
        self.broken.append(reason)

    def got(self, count: int) -> list[Frame]:
        assert eventually(lambda: len(self.frames) >= count), f"{len(self.frames)} of {count} frames; {self.broken}"
        return self.frames


Pair = tuple[Side, Side]


def _unix() -> tuple[Any, Any]:
    one, two = socket.socketpair()
    return SocketStream(one), SocketStream(two)


def _tcp() -> tuple[Any, Any]:
    door, (host, port) = listen_tcp("127.0.0.1", 0)
    with door:
        one = connect_tcp(host, port, PATIENCE)
        two, _ = door.accept()
    return SocketStream(one), SocketStream(two)


def _tls() -> tuple[Any, Any]:
    raw_one, raw_two = _tcp()
    authority = make_authority(b"the key of a job")
    one = TlsStream(raw_one, tls_end(authority.sign("caller"), authority, server_side=False))
    two = TlsStream(raw_two, tls_end(authority.sign("callee"), authority, server_side=True))
    done = [False, False]
    assert eventually(lambda: all(_step(done, one, two)))
    one.trust()
    two.trust()
    return one, two


def _step(done: list[bool], *streams: TlsStream) -> list[bool]:
    done[:] = [was or stream.handshake_step() for was, stream in zip(done, streams, strict=True)]
    return done


STREAMS: dict[str, Callable[[], tuple[Any, Any]]] = {"unix": _unix, "tcp": _tcp, "tls": _tls}


def linked(transport: str) -> Pair:
    caller, callee = Side("caller", 1), Side("callee", 2)
    if transport == "memory":
        caller.link, callee.link = connect(caller, callee, Direct())
    else:
        for side, stream, other in zip((caller, callee), STREAMS[transport](), (callee, caller), strict=True):
            side.link = StreamLink(stream, other.me.worker_id, side is caller, side.pool, side, side.buffers.lend)
        caller.link.start()
        callee.link.start()
    return caller, callee


def unlink(*sides: Side) -> None:
    for side in sides:
        side.link.close()
    for side in sides:
        side.pool.close(PATIENCE)


@pytest.fixture(params=["memory", *STREAMS])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    sides = linked(request.param)
    yield sides
    unlink(*sides)


@pytest.fixture(params=list(STREAMS))
def stream_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    sides = linked(request.param)
    yield sides
    unlink(*sides)


def big(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def send_big(link: Any, call_id: int, *buffers: bytes) -> None:
    link.send(Call(call_id, "f", Body(buffers=tuple(map(len, buffers)))), [memoryview(buffer) for buffer in buffers])


def taken(lock: Any) -> bool:
    """Whether another thread has it."""
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return not free


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    caller, callee = pair
    for number in range(300):
        caller.link.send(Call(number, "f" * (number % 50), Body(tree=Node(0, ["x" * (37 * number)]))))
    frames = callee.got(300)
    assert [frame.message.call_id for frame in frames] == list(range(300))
    assert all(frame.message.body.tree == Node(0, ["x" * (37 * number)]) for number, frame in enumerate(frames))


def test_big_buffers_and_small_messages_between_them(pair: Pair) -> None:
    caller, callee = pair
    sizes = [5 << 20, 1, 70_000, 1 << 20]
    data = [big(size, size) for size in sizes]
    caller.link.send(Goodbye())
    send_big(caller.link, 1, *data)
    caller.link.send(Call(2, "after"))
    send_big(caller.link, 3, data[1], data[2])
    frames = callee.got(4)
    assert [bytes(buffer) for buffer in frames[1].buffers] == data
    assert frames[2].message == Call(2, "after")
    assert [bytes(buffer) for buffer in frames[3].buffers] == data[1:3]


def test_a_received_buffer_is_writable_and_ones_own(pair: Pair) -> None:
    caller, callee = pair
    data = bytearray(big(1 << 20, 1))
    send_big(caller.link, 1, data)
    received = memoryview(callee.got(1)[0].buffers[0])
    before = bytes(data)
    data[:4] = b"over"
    assert bytes(received) == before
    received[:4] = b"mine"
    assert bytes(data[:4]) == b"over"


def test_both_directions_at_once(pair: Pair) -> None:
    """Each sends more than any socket holds before it reads: both must go on reading while they send."""
    data = big(5 << 20, 2)

    def send(side: Side) -> None:
        for number in range(4):
            send_big(side.link, number, data)

    for join in [in_thread(lambda side=side: send(side)) for side in pair]:
        join()
    for side in pair:
        assert all(bytes(frame.buffers[0]) == data for frame in side.got(4))


def test_many_threads_send(pair: Pair) -> None:
    caller, callee = pair
    payload = big(20_000, 3)

    def send(thread: int) -> None:
        for number in range(40):
            if number % 4:
                caller.link.send(Call(number, str(thread)), more=bool(number % 3))
            else:
                caller.link.send(Call(number, str(thread), Body(buffers=(len(payload),))), [memoryview(payload)])

    for join in [in_thread(lambda thread=thread: send(thread)) for thread in range(8)]:
        join()
    frames = callee.got(320)
    assert len(frames) == 320
    for thread in range(8):
        mine = [frame for frame in frames if frame.message.function == str(thread)]
        assert [frame.message.call_id for frame in mine] == list(range(40))
        assert all(bytes(frame.buffers[0]) == payload for frame in mine if frame.buffers)


def test_what_is_posted_goes_with_the_next_message_or_a_flush(pair: Pair) -> None:
    caller, callee = pair
    caller.link.post(Call(1, "posted"))
    caller.link.send(Call(2, "sent"))
    assert [frame.message.call_id for frame in callee.got(2)] == [1, 2]
    caller.link.post(Call(3, "posted"))
    caller.link.flush()
    assert callee.got(3)[2].message.call_id == 3
    assert not caller.link.has_posted()


@pytest.mark.parametrize("closer", [0, 1], ids=["caller", "callee"])
def test_the_other_side_notices_a_close_once(pair: Pair, closer: int) -> None:
    one, other = pair[closer], pair[1 - closer]
    one.link.send(Call(1, "last words"))
    other.got(1)
    one.link.close()
    one.link.close()
    assert eventually(lambda: other.broken)
    for side in pair:
        side.link.send(Goodbye())  # to nobody: no error, and no second loss
    time.sleep(0.05)
    assert other.broken == ["the connection was closed"]
    assert one.broken == []
    assert "closed" in repr(one.link)


def test_a_waiting_thread_reads_its_own_answer(pair: Pair) -> None:
    caller, callee = pair
    callee.answers = True
    for number in range(20):
        caller.link.send(Call(number, "f"))
        caller.link.help_read(lambda number=number: len(caller.frames) > number, time.monotonic() + PATIENCE)
        assert caller.got(number + 1)[number].message.call_id == number


def test_many_threads_wait_for_their_answers(pair: Pair) -> None:
    caller, callee = pair
    callee.answers = True
    payload = big(100_000, 4)

    def answered(call_id: int) -> bool:
        return any(frame.message.call_id == call_id for frame in list(caller.frames))

    def call(thread: int) -> None:
        for number in range(10):
            call_id = 100 * thread + number
            send_big(caller.link, call_id, payload)
            caller.link.help_read(lambda call_id=call_id: answered(call_id), time.monotonic() + PATIENCE)
            assert eventually(lambda call_id=call_id: answered(call_id))

    for join in [in_thread(lambda thread=thread: call(thread)) for thread in range(6)]:
        join()
    assert len(caller.frames) == 60
    assert all(bytes(frame.buffers[0]) == payload for frame in caller.frames)


def test_help_ends_at_its_deadline_and_at_a_close(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    start = time.monotonic()
    assert caller.link.help_read(lambda: False, start + 0.05)
    assert 0.05 <= time.monotonic() - start < AT_ONCE
    helping = in_thread(lambda: caller.link.help_read(lambda: False, time.monotonic() + PATIENCE))
    assert eventually(lambda: taken(caller.link._reading))
    assert not caller.link.help_read(lambda: False, time.monotonic() + PATIENCE)  # one at a time
    callee.link.close()
    assert helping() is True
    assert caller.broken == ["the connection was closed"]


def test_a_close_on_this_side_ends_the_help_too(stream_pair: Pair) -> None:
    caller, _ = stream_pair
    helping = in_thread(lambda: caller.link.help_read(lambda: False, time.monotonic() + PATIENCE))
    assert eventually(lambda: taken(caller.link._reading))
    caller.link.close()
    assert helping() is True
    assert caller.broken == []


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame begins with"),
        (prefix(5, 0) + b"\xc1\xc1\xc1\xc1\xc1", "is not a message"),
        (PREFIX.pack(b"tgr\x01", 0xFFFFFFFF, 0), "is larger than"),
        (prefix(2, 10) + b"\x91\x09" + bytes(10), "bytes follow a header|is not a message"),
    ],
    ids=["magic", "header", "length", "stream"],
)
def test_garbage_breaks_the_link_and_nothing_else(stream_pair: Pair, garbage: bytes, reason: str) -> None:
    caller, callee = stream_pair
    caller.link.send(Call(1, "before"))
    callee.got(1)
    caller.link._stream.send([garbage])
    assert eventually(lambda: callee.broken)
    assert len(callee.broken) == 1
    assert pytest.raises(AssertionError, match=reason).matches(AssertionError(callee.broken[0]))
    assert len(callee.frames) == 1
    assert eventually(lambda: caller.broken)


def test_half_a_frame_and_a_close(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    caller.link._stream.send([prefix(100, 0) + b"only the beginning"])
    caller.link.close()
    assert eventually(lambda: callee.broken == ["the connection was closed"])
    assert callee.frames == []


def test_a_close_wakes_a_sender_that_the_peer_does_not_hear(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    callee.pool.forget(callee.link._fd, callee.link)  # it stops reading
    stuck = in_thread(lambda: [send_big(caller.link, number, big(4 << 20, 5)) for number in range(8)])
    assert eventually(lambda: taken(caller.link._sending))
    closer = threading.Timer(0.05, caller.link.close)
    closer.start()
    stuck()
    closer.join()
    assert caller.broken == []


# --- a peer that reads nothing: its process was stopped, or does not let go of the GIL --------------------------------


def stop_reading(side: Side) -> None:
    side.pool.forget(side.link._fd, side.link)


def test_small_messages_to_a_peer_that_reads_nothing_block_no_caller(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    stop_reading(callee)
    text = "x" * 10_000
    in_thread(lambda: [caller.link.send(Call(number, text)) for number in range(2000)])()  # 20 MB: the kernel is full
    assert caller.link.has_posted() or taken(caller.link._sending)
    callee.link.start()
    frames = callee.got(2000)
    assert [frame.message for frame in frames] == [Call(number, text) for number in range(2000)]
    assert eventually(lambda: not caller.link.has_posted())
    assert caller.broken == callee.broken == []


def test_a_big_message_blocks_its_caller_until_the_deadline_and_goes_on_without_it(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    stop_reading(callee)
    data = big(20 << 20, 7)
    body = Body(buffers=(len(data),))
    deadline = time.monotonic() + 0.2
    caller.link.send(Call(1, "f", body), [memoryview(data)], deadline=deadline)
    assert time.monotonic() >= deadline
    caller.link.send(Call(2, "small"))
    caller.link.send(Call(3, "f", body), [memoryview(data)], deadline=time.monotonic() + 0.05)
    assert eventually(lambda: taken(caller.link._sending)), "a thread of the pool waits for the peer"
    assert eventually(lambda: not caller.pool.running()), "and does not count as one that runs"
    callee.link.start()
    frames = callee.got(3)
    assert [frame.message.call_id for frame in frames] == [1, 2, 3]
    assert bytes(frames[0].buffers[0]) == bytes(frames[2].buffers[0]) == data
    assert eventually(lambda: not caller.link.has_posted())
    assert caller.broken == callee.broken == []


def test_a_flush_ends_at_its_deadline(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    stop_reading(callee)
    for number in range(2000):
        caller.link.post(Call(number, "x" * 10_000))
    caller.link.flush(0.0)
    assert eventually(lambda: taken(caller.link._sending))
    callee.link.start()
    assert [frame.message.call_id for frame in callee.got(2000)] == list(range(2000))


def test_when_a_send_returns_the_caller_may_change_its_memory(stream_pair: Pair) -> None:
    """The first message is cut off by its deadline, and the others wait behind it, without a thread of their own."""
    caller, callee = stream_pair
    stop_reading(callee)
    data = [bytearray(big(20 << 20, number)) for number in range(3)]
    expected = [bytes(each) for each in data]
    body = Body(buffers=(len(data[0]),))
    for number, each in enumerate(data):
        deadline = time.monotonic() + 0.1
        caller.link.send(Call(number, "f", body), [memoryview(each)], deadline=deadline)
        each[:] = bytes(len(each))
        assert eventually(lambda: taken(caller.link._sending)), "a thread of the pool waits for the peer"
    callee.link.start()
    frames = callee.got(3)
    assert [bytes(frame.buffers[0]) for frame in frames] == expected


def test_a_reader_stops_at_its_deadline_while_much_is_coming(stream_pair: Pair) -> None:
    """A flood of small messages, of which none is the one that is waited for."""
    caller, callee = stream_pair
    stop_reading(caller)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            callee.link.send(Reply(1, Body(tree="x" * 1000)), deadline=time.monotonic() + 1)
            while callee.link.has_posted() and not over.is_set():
                time.sleep(0.001)

    join = in_thread(flood)
    try:
        read = in_thread(lambda: caller.link.help_read(lambda: False, time.monotonic() + 0.5))
        assert read() is True
    finally:
        over.set()
        join()
    assert caller.frames


def test_a_close_ends_the_wait_for_a_peer_that_reads_nothing(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    stop_reading(callee)
    data = big(20 << 20, 8)
    caller.link.send(Call(1, "f", Body(buffers=(len(data),))), [memoryview(data)], deadline=time.monotonic() + 0.05)
    assert eventually(lambda: taken(caller.link._sending))
    caller.link.close()
    assert eventually(lambda: not taken(caller.link._sending))
    assert caller.broken == []


def test_the_host_of_a_peer_that_reads_nothing_is_not_silent(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    stop_reading(callee)
    in_thread(lambda: caller.link.send(Call(1, "x" * (8 << 20))))()
    assert not caller.link.host_is_silent(0.0)


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closer", [0, 1], ids=["caller", "callee"])
def test_segments_that_were_not_given_back_are_let_go_with_the_link(pair: Pair, closer: int) -> None:
    """The receiver's tensors live on theirs, so nobody may use them again; see ``_transport/shared_memory.py``."""
    pool = SegmentPool(bytes(32))
    data = big(100_000, 6)
    for side in pair:
        segment = pool.put(np.frombuffer(data, np.uint8).ctypes.data, len(data))
        assert segment is not None
        side.link.held[segment.number] = segment
    del segment
    assert repr(pool) == "<SegmentPool 2 segments, 0 bytes idle>"
    pair[closer].link.close()
    assert eventually(lambda: not pair[0].link.held and not pair[1].link.held)
    assert eventually(lambda: repr(pool) == "<SegmentPool 0 segments, 0 bytes idle>")


# --- interruptions: by a Ctrl-C, and by a signal handler that uses the link itself -------------------------------


class Interrupted:
    """Like the other object, but a Ctrl-C comes right after the first call of one method, or before it."""

    def __init__(self, other: Any, method: str, before: bool = False) -> None:
        self._other = other
        self._method = method
        self._before = before
        self.came = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._other, name)
        if name != self._method or self.came:
            return real

        def interrupted(*args: Any, **options: Any) -> None:
            self.came = True
            if not self._before:
                real(*args, **options)
            raise KeyboardInterrupt

        return interrupted


def assert_works(caller: Side, callee: Side) -> None:
    """The pool reads, another thread reads, and what was left behind goes out with the next message."""
    callee.link.send(Goodbye())
    caller.got(1)
    helped = lambda: caller.link.help_read(lambda: True, time.monotonic() + PATIENCE)  # noqa: E731
    assert eventually(lambda: in_thread(helped)())  # once the pool is through
    assert in_thread(lambda: caller.link.send(Call(2, "later")))() is None
    assert eventually(lambda: callee.frames and callee.frames[-1].message == Call(2, "later"))
    assert caller.broken == callee.broken == []


def helps(side: Side) -> None:
    side.link.help_read(lambda: True, time.monotonic() + PATIENCE)


def attends(side: Side) -> None:
    peer = SimpleNamespace(accepted={side.link})
    agent: Any = SimpleNamespace(peer=lambda _: peer, pool=side.pool)
    Agent.attend(agent, 2, lambda: True)


@pytest.mark.parametrize("reads", [helps, attends])
@pytest.mark.parametrize("moment", ["acquire", "disarm", "release", "arm"])
def test_a_ctrl_c_at_any_moment_of_a_read_leaves_the_link_to_others(
    stream_pair: Pair, reads: Callable[[Side], None], moment: str
) -> None:
    caller, callee = stream_pair
    if moment in ("acquire", "release"):
        trap = caller.link._reading = Interrupted(caller.link._reading, moment)
    else:
        trap = caller.link._pool = Interrupted(caller.pool, moment, before=True)
    with pytest.raises(KeyboardInterrupt):
        reads(caller)
    assert trap.came
    assert_works(caller, callee)


def test_a_ctrl_c_right_after_the_beginning_of_attending_ends_it(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    link = caller.link
    caller.link = Interrupted(link, "begin_attending")
    with pytest.raises(KeyboardInterrupt):
        attends(caller)
    caller.link = link
    assert_works(caller, callee)


@pytest.mark.parametrize("moment", ["acquire", "release"])
def test_a_ctrl_c_around_a_send_leaves_the_link_to_others(stream_pair: Pair, moment: str) -> None:
    caller, callee = stream_pair
    caller.link._sending = Interrupted(caller.link._sending, moment)
    with pytest.raises(KeyboardInterrupt):
        caller.link.send(Call(1, "interrupted"))
    assert_works(caller, callee)
    assert callee.frames[0].message == Call(1, "interrupted")


def test_a_ctrl_c_while_another_thread_has_the_lock_leaves_it_to_that(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    helping = in_thread(lambda: caller.link.help_read(lambda: bool(caller.frames), time.monotonic() + PATIENCE))
    assert eventually(lambda: taken(caller.link._reading))
    real = caller.link._reading
    caller.link._reading = Interrupted(real, "acquire")
    with pytest.raises(KeyboardInterrupt):
        helps(caller)
    assert taken(real)
    callee.link.send(Goodbye())
    assert helping() is True
    assert_works(caller, callee)


@pytest.mark.parametrize("before", [True, False])
def test_a_ctrl_c_in_the_middle_of_a_send_breaks_the_link_aloud(stream_pair: Pair, before: bool) -> None:
    """Nobody can know how much of the message is out."""
    caller, callee = stream_pair
    caller.link._stream = Interrupted(caller.link._stream, "send", before)
    with pytest.raises(KeyboardInterrupt):
        caller.link.send(Call(1, "interrupted"))
    assert caller.broken == ["the sending thread was interrupted"]
    assert eventually(lambda: callee.broken)
    assert not in_thread(lambda: taken(caller.link._sending))()


def test_a_signal_handler_reads_while_its_thread_waits(stream_pair: Pair) -> None:
    caller, callee = stream_pair
    callee.answers = True
    me = threading.get_ident()
    seen: list[int] = []

    def call(*_: Any) -> None:
        caller.link.send(Call(1, "from the handler"))
        assert caller.link.help_read(lambda: bool(caller.frames), time.monotonic() + PATIENCE)
        seen.extend(frame.message.call_id for frame in caller.frames)

    def disturb() -> None:
        assert eventually(lambda: taken(caller.link._reading))
        signal.pthread_kill(me, signal.SIGUSR1)
        assert eventually(lambda: seen)
        caller.link.send(Call(2, "for the one who waits"))

    before = signal.signal(signal.SIGUSR1, call)
    try:
        disturbing = in_thread(disturb)
        assert caller.link.help_read(lambda: len(caller.frames) == 2, time.monotonic() + PATIENCE)
        disturbing()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]
    assert [frame.message.call_id for frame in caller.frames] == [1, 2]
    assert eventually(lambda: not in_thread(lambda: taken(caller.link._reading))())


@pytest.mark.parametrize("method", ["recv_into", "send"])
def test_a_signal_handler_in_the_middle_of_a_message_is_told_that_it_cannot_wait(
    stream_pair: Pair, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    caller, callee = stream_pair
    callee.answers = True
    refusals: list[str] = []
    me = threading.get_ident()
    stream = caller.link._stream
    real = getattr(stream, method)

    def interrupted(*args: Any) -> Any:
        if threading.get_ident() == me and not refusals:
            refusals.append("")
            caller.link.send(Call(2, "from the handler"))
            with pytest.raises(UsageError, match="waits for worker 2") as refusal:
                caller.link.help_read(lambda: False, time.monotonic() + PATIENCE)
            refusals[0] = str(refusal.value)
        return real(*args)

    monkeypatch.setattr(stream, method, interrupted)
    caller.pool.disarm(caller.link._fd, caller.link)  # this thread is to read, and not the pool
    caller.link.send(Call(1, "f"))
    caller.link.help_read(lambda: len(caller.frames) == 2, time.monotonic() + PATIENCE)
    assert "in the middle of a message" in refusals[0]
    assert sorted(frame.message.call_id for frame in caller.got(2)) == [1, 2]
    assert caller.broken == callee.broken == []
