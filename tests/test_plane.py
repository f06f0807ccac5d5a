"""What every data plane does with its links: messages, calls and the end, over every stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from planes import IMPLEMENTATIONS, STREAMS, Pair, big, linked, run_together
from support import AT_ONCE, PATIENCE, eventually, in_thread
from telegrad._ids import GlobalId
from telegrad._transport.shared_memory import SegmentPool
from telegrad._wire.frames import PREFIX, prefix
from telegrad._wire.messages import Body, Call, Goodbye, RemoteCall, Reply
from telegrad.errors import RpcTimeoutError, WorkerLostError


@pytest.fixture(params=IMPLEMENTATIONS)
def make_plane(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=["loopback", *STREAMS])
def pair(request: pytest.FixtureRequest, make_plane: Any) -> Iterator[Pair]:
    with linked(make_plane, request.param) as ends:
        yield ends


@pytest.fixture(params=STREAMS)
def stream_pair(request: pytest.FixtureRequest, make_plane: Any) -> Iterator[Pair]:
    with linked(make_plane, request.param) as ends:
        yield ends


@pytest.fixture(params=["loopback", *STREAMS])
def deaf_pair(request: pytest.FixtureRequest, make_plane: Any) -> Iterator[Pair]:
    """The callee reads nothing before its ``start_reading``: its process was stopped, or holds the GIL."""
    with linked(make_plane, request.param, reading=False) as ends:
        yield ends


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    caller, callee = pair
    for number in range(300):
        caller.note(number, "x" * (37 * number))
    frames = callee.got(300)
    assert [(frame.message.call_id, frame.message.function) for frame in frames] == [
        (number, "x" * (37 * number)) for number in range(300)
    ]


def test_big_buffers_and_small_messages_between_them(pair: Pair) -> None:
    caller, callee = pair
    data = [big(size, size) for size in (5 << 20, 1, 70_000, 1 << 20)]
    caller.link.send(Goodbye())
    caller.note(1, "f", *data)
    caller.note(2, "after")
    caller.note(3, "f", data[1], data[2])
    frames = callee.got(4)
    assert frames[0].message == Goodbye()
    assert [bytes(buffer) for buffer in frames[1].buffers] == data
    assert frames[2].message.function == "after"
    assert [bytes(buffer) for buffer in frames[3].buffers] == data[1:3]


def test_a_received_buffer_is_writable_and_the_receivers_own(pair: Pair) -> None:
    caller, callee = pair
    data = bytearray(big(1 << 20, 1))
    caller.note(1, "f", data)
    received = memoryview(callee.got(1)[0].buffers[0])
    before = bytes(data)
    data[:4] = b"over"
    assert bytes(received) == before
    received[:4] = b"mine"
    assert bytes(data[:4]) == b"over"


def test_both_directions_at_once(pair: Pair) -> None:
    """Each end sends more than any socket holds before it reads: both must go on reading while they send."""
    caller, callee = pair
    data = big(5 << 20, 2)

    def answer_unasked() -> None:
        for number in range(4):
            callee.link.send(Reply(1000 + number, Body(buffers=(len(data),))), [memoryview(data)])

    run_together([lambda: [caller.note(number, "f", data) for number in range(4)], answer_unasked])
    assert all(bytes(frame.buffers[0]) == data for frame in callee.got(4))
    assert eventually(lambda: len(caller.answers) == 4)
    assert all(bytes(frame.buffers[0]) == data for frame in caller.answers)


def test_many_threads_send(pair: Pair) -> None:
    caller, callee = pair
    payload = big(20_000, 3)

    def send(thread: int) -> None:
        for number in range(40):
            caller.note(number, str(thread), *([] if number % 4 else [payload]))

    run_together([lambda thread=thread: send(thread) for thread in range(8)])
    frames = callee.got(320)
    assert len(frames) == 320
    for thread in range(8):
        mine = [frame for frame in frames if frame.message.function == str(thread)]
        assert [frame.message.call_id for frame in mine] == list(range(40))
        assert all(bytes(frame.buffers[0]) == payload for frame in mine if frame.buffers)


def test_a_last_message_is_sent_after_those_before_it(pair: Pair) -> None:
    caller, callee = pair
    caller.note(1)
    caller.link.send_last(Goodbye(), time.monotonic() + PATIENCE)
    assert not caller.link.has_unsent
    assert callee.got(2)[1].message == Goodbye()


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_gets_its_answer(pair: Pair) -> None:
    caller, _ = pair
    for number in range(50):
        assert caller.ask(text=f"call {number}").message.body.tree == f"call {number}"
    assert not caller.plane.pending
    assert eventually(lambda: not caller.plane.unfinished)


def test_many_threads_wait_for_their_answers(pair: Pair) -> None:
    caller, callee = pair

    def call(thread: int) -> None:
        payload = big(100_000, thread)
        for number in range(10):
            answer = caller.ask("echo", payload, text=f"{thread} {number}")
            assert answer.message.body.tree == f"{thread} {number}"
            assert bytes(answer.buffers[0]) == payload

    run_together([lambda thread=thread: call(thread) for thread in range(6)])
    assert not caller.plane.pending
    assert eventually(lambda: not callee.plane.unfinished)


def test_a_wait_ends_at_its_deadline_and_a_late_answer_is_told(pair: Pair) -> None:
    caller, callee = pair
    gate = threading.Event()

    def late(link: Any, frame: Any) -> None:
        assert gate.wait(PATIENCE)
        link.send(Reply(frame.message.call_id))

    callee.worker.functions["late"] = late
    pending = caller.call("late", timeout=0.05)
    started = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        caller.result(pending)
    gate.set()
    assert time.monotonic() - started < AT_ONCE
    assert eventually(lambda: [frame.message.call_id for frame in caller.answers] == [pending.call_id])


def test_a_large_late_answer_is_read_although_no_call_is_pending(pair: Pair) -> None:
    """It blocks a thread of the callee until it is read."""
    caller, callee = pair
    data = big(64 << 20, 9)
    gate = threading.Event()

    def late(link: Any, frame: Any) -> None:
        assert gate.wait(PATIENCE)
        link.send(Reply(frame.message.call_id, Body(buffers=(len(data),))), [memoryview(data)])

    callee.worker.functions["late"] = late
    with pytest.raises(RpcTimeoutError):
        caller.ask("late", timeout=0.05)
    gate.set()
    assert eventually(lambda: caller.answers)
    assert bytes(caller.answers[0].buffers[0]) == data
    assert eventually(lambda: not callee.plane.unfinished)


def test_a_call_is_settled_once(pair: Pair) -> None:
    caller, _ = pair
    pending = caller.call("nothing")
    assert caller.plane.settle(pending, RpcTimeoutError("once"))
    assert not caller.plane.settle(pending, RpcTimeoutError("twice"))
    assert caller.plane.wait(pending)
    assert str(pending.take_outcome()) == "once"
    assert pending.take_outcome() is None


def test_a_call_that_no_thread_waits_for_ends_at_its_deadline(pair: Pair) -> None:
    caller, _ = pair
    done: list[Any] = []
    caller.call("nothing", timeout=0.05, then=lambda link, pending: done.append(pending.take_outcome()))
    assert eventually(lambda: done, AT_ONCE)
    assert isinstance(done[0], RpcTimeoutError)


def test_a_wait_ends_at_its_deadline_while_much_is_coming(pair: Pair) -> None:
    """A flood of answers, of which none is the one that is waited for."""
    caller, callee = pair
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            callee.link.send(Reply(1_000_000, Body(tree="x" * 1000)))
            while callee.link.has_unsent and not over.is_set():
                time.sleep(0.001)

    join = in_thread(flood)
    try:
        with pytest.raises(RpcTimeoutError):
            caller.ask("nothing", timeout=0.3)
    finally:
        over.set()
        join()
    assert eventually(lambda: caller.answers)


def test_a_callback_may_call_again(pair: Pair) -> None:
    caller, _ = pair
    answers: list[Any] = []

    def then(link: Any, pending: Any) -> None:
        if isinstance(pending.take_outcome(), Exception):
            return
        answers.append(caller.ask(text="again").message.body.tree)

    for _ in range(200):
        caller.call(then=then)
    assert eventually(lambda: len(answers) == 200), len(answers)
    assert set(answers) == {"again"}


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closer", [0, 1], ids=["caller", "callee"])
def test_the_other_end_notices_a_close_once(pair: Pair, closer: int) -> None:
    one, other = pair[closer], pair[1 - closer]
    pair[0].note(1, "last words")
    pair[1].got(1)
    assert one.link.close()
    assert not one.link.close()
    assert eventually(lambda: other.broken)
    for end in pair:
        end.link.send(Goodbye())  # nothing reads it: no error, and no second loss
    assert eventually(lambda: not one.plane.unfinished and not other.plane.unfinished)
    assert other.broken == ["the connection was closed"]
    assert one.broken == []
    assert "closed" in repr(one.link)


def test_a_close_of_the_peer_ends_all_waits(pair: Pair) -> None:
    caller, callee = pair
    calls = [caller.call("nothing") for _ in range(4)]
    done: list[Any] = []
    caller.call("nothing", then=lambda link, pending: done.append(pending.take_outcome()))
    waits = [in_thread(lambda pending=pending: caller.result(pending)) for pending in calls]
    callee.link.close()
    for wait in waits:
        with pytest.raises(WorkerLostError):
            wait()
    assert eventually(lambda: done)
    assert isinstance(done[0], WorkerLostError)


def test_a_close_on_this_side_ends_the_waits_too(pair: Pair) -> None:
    caller, callee = pair
    waits = [in_thread(lambda: caller.ask("nothing")) for _ in range(4)]
    assert eventually(lambda: len(caller.plane.pending) == 4)
    assert eventually(lambda: not callee.plane.unfinished)
    caller.link.close()
    caller.worker.fail_calls(caller.link, "closed here")
    for wait in waits:
        with pytest.raises(WorkerLostError, match="closed"):
            wait()
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
@pytest.mark.parametrize("transport", STREAMS)
def test_garbage_breaks_the_link_and_nothing_else(make_plane: Any, transport: str, garbage: bytes, reason: str) -> None:
    one, two = STREAMS[transport]()
    with linked(make_plane, "unix") as (other, _):
        victim = other.plane.adopt(two, 3, False)
        other.plane.start_reading(victim)
        one.send([garbage])
        assert eventually(lambda: other.worker.broken)
        ((link, told),) = other.worker.broken
        assert link is victim
        assert pytest.raises(AssertionError, match=reason).matches(AssertionError(told))
        assert isinstance(other.ask().message, Reply)
        one.close()


def test_half_a_frame_and_a_close(make_plane: Any) -> None:
    for streams in STREAMS.values():
        one, two = streams()
        with linked(make_plane, "unix") as (end, _):
            link = end.plane.adopt(two, 3, False)
            end.plane.start_reading(link)
            one.send([prefix(100, 0) + b"only the beginning"])
            one.close()
            assert eventually(lambda end=end: end.worker.broken)
            assert [reason for _, reason in end.worker.broken] == ["the connection was closed"]
            assert end.worker.arrived == []


def test_a_message_that_only_the_dialling_side_may_send_breaks_the_link(pair: Pair) -> None:
    caller, callee = pair
    pending = caller.call("nothing")
    callee.link.send(Call(1, "echo"))
    with pytest.raises(WorkerLostError, match="sent a Call on a connection that this worker made"):
        caller.result(pending)
    assert len(caller.broken) == 1


@pytest.mark.parametrize("closer", [0, 1], ids=["caller", "callee"])
def test_segments_that_were_not_given_back_are_let_go_with_the_link(pair: Pair, closer: int) -> None:
    """The receiver's tensors live on theirs, so they are not used again; see ``_transport/shared_memory.py``."""
    pool = SegmentPool(bytes(32))
    data = big(100_000, 6)
    for end in pair:
        segment = pool.put(np.frombuffer(data, np.uint8).ctypes.data, len(data))
        assert segment is not None
        end.link.held[segment.number] = segment
    del segment
    assert repr(pool) == "<SegmentPool 2 segments, 0 bytes idle>"
    pair[closer].link.close()
    assert eventually(lambda: not pair[0].link.held and not pair[1].link.held)
    assert eventually(lambda: repr(pool) == "<SegmentPool 0 segments, 0 bytes idle>")
    pool.close()


# --- a peer that reads nothing ----------------------------------------------------------------------------------------


def test_small_messages_to_a_peer_that_reads_nothing_do_not_block(deaf_pair: Pair) -> None:
    caller, callee = deaf_pair
    text = "x" * 10_000
    in_thread(lambda: [caller.note(number, text) for number in range(2000)])()  # 20 MB: the kernel is full
    callee.start_reading()
    frames = callee.got(2000)
    assert [frame.message.call_id for frame in frames] == list(range(2000))
    assert {frame.message.function for frame in frames} == {text}
    assert eventually(lambda: not caller.link.has_unsent)
    assert caller.broken == callee.broken == []


def test_a_big_message_blocks_until_its_deadline_and_is_sent_later(deaf_pair: Pair) -> None:
    caller, callee = deaf_pair
    data = big(20 << 20, 7)
    deadline = time.monotonic() + 0.2
    caller.note(1, "f", data, deadline=deadline)
    assert time.monotonic() >= deadline
    caller.note(2, "small")
    caller.note(3, "f", data, deadline=time.monotonic() + 0.05)
    assert not caller.plane.calls_running
    callee.start_reading()
    frames = callee.got(3)
    assert [frame.message.call_id for frame in frames] == [1, 2, 3]
    assert bytes(frames[0].buffers[0]) == bytes(frames[2].buffers[0]) == data
    assert eventually(lambda: not caller.link.has_unsent)
    assert eventually(lambda: not caller.plane.unfinished)
    assert caller.broken == callee.broken == []


def test_a_last_message_waits_for_the_peer_until_its_deadline(deaf_pair: Pair) -> None:
    caller, callee = deaf_pair
    body = Body(tree="x" * (20 << 20))  # more than the kernel holds
    deadline = time.monotonic() + 0.2
    in_thread(lambda: caller.link.send_last(RemoteCall(1, "f", GlobalId(1, 1), GlobalId(1, 2), body), deadline))()
    assert time.monotonic() >= deadline
    callee.start_reading()
    assert [frame.message.call_id for frame in callee.got(1)] == [1]


def test_when_a_send_returns_the_caller_may_change_its_memory(deaf_pair: Pair) -> None:
    """The first message is cut off by its deadline, and the others wait behind it."""
    caller, callee = deaf_pair
    data = [bytearray(big(20 << 20, number)) for number in range(3)]
    expected = [bytes(each) for each in data]
    for number, each in enumerate(data):
        caller.note(number, "f", each, deadline=time.monotonic() + 0.1)
        each[:] = bytes(len(each))
    callee.start_reading()
    assert [bytes(frame.buffers[0]) for frame in callee.got(3)] == expected


def test_a_close_wakes_a_thread_that_sends_to_a_peer_that_reads_nothing(deaf_pair: Pair) -> None:
    caller, _ = deaf_pair
    data = bytes(64 << 20)
    sending = in_thread(lambda: caller.note(1, "f", data))
    time.sleep(0.1)  # so that the thread blocks; what is asserted holds without it too
    caller.link.close()
    sending()
    assert caller.broken == []


def test_a_close_ends_the_thread_that_sends_the_rest(deaf_pair: Pair) -> None:
    caller, _ = deaf_pair
    caller.note(1, "f", big(20 << 20, 8), deadline=time.monotonic() + 0.05)
    assert caller.plane.unfinished
    caller.link.close()
    assert eventually(lambda: not caller.plane.unfinished)
    assert caller.broken == []


def test_the_host_of_a_peer_that_reads_nothing_is_not_silent(deaf_pair: Pair) -> None:
    caller, _ = deaf_pair
    caller.note(1, "x" * (8 << 20))
    assert not caller.link.host_is_silent(0.0)
