"""Marshal over one link: which buffers go through shared memory, when their segments come back, and when not."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from telegrad._agent import marshal
from telegrad._agent.marshal import Marshal
from telegrad._agent.peers import Peer, WorkerRecord
from telegrad._ids import GlobalId
from telegrad._transport import shared_memory
from telegrad._transport.buffers import size_class
from telegrad._transport.shared_memory import SHARED_FROM, PeerSegments
from telegrad._wire import codec
from telegrad._wire.messages import Body, InSegment, Node, Reply, RRefFork, SegmentReleased
from telegrad._wire.values import PACKED_NONE, PackedValue, Route
from telegrad.errors import ProtocolError, SerializationError, WorkerLostError

BIG = 100_000  # bytes
TOKEN = bytes(range(32))


class FakeLink:
    """One end of a link: holds what was lent, and remembers what is to be said."""

    def __init__(self, peer_id: int, shares_memory: bool = True, pid: int | None = None) -> None:
        self.peer_id = peer_id
        self.pid = pid
        self.shares_memory = shares_memory
        self.held: dict[int, Any] = {}
        self.posted: list[SegmentReleased] = []

    def send(self, message: SegmentReleased) -> None:
        self.posted.append(message)


class Pair:
    """A sender and a receiver, and both ends of the link between them."""

    def __init__(self, shares_memory: bool = True) -> None:
        self.out, self.back = FakeLink(1, shares_memory), FakeLink(0, pid=os.getpid())
        self.to = Peer(WorkerRecord(1, "receiver"), Route(1))
        self.peers = {
            0: Peer(WorkerRecord(0, "sender", pid=os.getpid(), shared_memory_token=TOKEN), Route(0)),
            1: self.to,
        }
        self.sender = Marshal(self.peers.__getitem__, True, TOKEN)
        self.receiver = Marshal(self.peers.__getitem__, True, bytes(32))

    def pack(self, value: Any) -> PackedValue:
        return self.sender.pack(self.to, self.out, value)

    def open(self, packed: PackedValue) -> Any:
        body = arrived(packed)
        return self.receiver.open(self.back, body, [bytearray(memory) for memory in packed.stream])[0]

    def deliver(self) -> list[SegmentReleased]:
        """Brings what the receiver has to say to the sender."""
        said, self.back.posted = self.back.posted, []
        for message in said:
            self.sender.segment_released(self.out, message)
        return said

    @property
    def idle(self) -> int:
        return self.sender.segments._idle.bytes

    @property
    def segments(self) -> int:
        return len(self.sender.segments._segments)


def arrived(packed: PackedValue) -> Body:
    message = codec.decode(codec.encode(Reply(1, packed.body)))
    assert isinstance(message, Reply)
    return message.body


def tensor(value: int, size: int = BIG) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def is_all(what: torch.Tensor, value: int) -> bool:
    return bool((what == value).all())


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(marshal, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# --- which way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "shared"), [(SHARED_FROM - 1, False), (SHARED_FROM, True), (9 << 20, True)])
def test_big_buffers_go_through_shared_memory(pair: Pair, size: int, shared: bool) -> None:
    packed = pair.pack([tensor(5, size)])
    assert [type(buffer) for buffer in packed.body.buffers] == [InSegment if shared else int]
    assert list(pair.out.held.values()) == list(packed.segments)
    assert len(pair.out.held) == shared
    assert is_all(pair.open(packed)[0], 5)


def test_without_shared_memory_big_buffers_go_by_the_stream() -> None:
    pair = Pair(shares_memory=False)
    packed = pair.pack([tensor(5, 9 << 20)])
    assert packed.segments == []
    assert pair.out.held == {}
    assert is_all(pair.open(packed)[0], 5)
    assert pair.segments == 0


def test_the_memory_of_a_process_is_read_only_where_the_kernel_vouches_for_that_process(pair: Pair) -> None:
    """On TCP a peer could name the process of another worker of this host."""
    packed = pair.pack([tensor(5)])
    pair.back.pid = None
    with pytest.raises(ProtocolError, match="worker 'sender' names shared memory, but is not on this host"):
        pair.open(packed)
    assert pair.receiver._peer_segments == {}
    assert pair.back.posted == []


def test_the_process_is_the_one_at_the_other_end_whatever_the_record_says(pair: Pair) -> None:
    pair.peers[0].record = WorkerRecord(0, "sender", pid=1, shared_memory_token=TOKEN)
    assert is_all(pair.open(pair.pack([tensor(5)]))[0], 5)


def test_beyond_the_last_segment_buffers_go_by_the_socket(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_SEGMENTS", 2)
    packed = pair.pack([tensor(number) for number in range(5)])
    assert [type(buffer) for buffer in packed.body.buffers] == [InSegment] * 2 + [int] * 3
    got = pair.open(packed)
    assert all(is_all(one, number) for number, one in enumerate(got))
    del got, packed
    pair.receiver.give_back()
    pair.deliver()
    assert len(pair.pack([tensor(1), tensor(2)]).segments) == 2


def test_a_value_that_cannot_be_sent_holds_nothing(pair: Pair) -> None:
    with pytest.raises(SerializationError):
        pair.pack([tensor(1), (x for x in ())])
    gc.collect()
    assert pair.out.held == {}
    assert pair.segments == 0


def test_none_is_the_packed_none_unless_the_interceptor_has_something_to_say(pair: Pair) -> None:
    assert pair.pack(None) is PACKED_NONE
    pair.to.route.outgoing = lambda to, tensors: [to, len(tensors)]
    packed = pair.pack(None)
    assert packed.body == Body(extra=[1, 0])
    heard: list[Any] = []
    pair.receiver.incoming = lambda sender, extra, tensors: heard.append((sender, extra, tensors))
    assert pair.open(packed) is None
    assert heard == [(0, [1, 0], [])]


# --- bundles --------------------------------------------------------------------------------------------------------


def test_a_bundle_copies_big_tensors_to_segments_and_the_link_holds_them_when_it_is_closed(pair: Pair) -> None:
    bundle = pair.sender.bundle(pair.to, pair.out, recorded=True)
    bundle.add([tensor(1), tensor(2, 10)])
    assert bundle.is_small is False
    bundle.add([tensor(3, SHARED_FROM - 1), tensor(4, SHARED_FROM)])
    assert pair.segments == 2
    assert pair.out.held == {}, "it has not gone yet"
    packed = pair.sender.close(pair.out, bundle)
    assert [type(buffer) for buffer in packed.body.buffers] == [InSegment, bytes, int, InSegment]
    assert pair.out.held == {segment.number: segment for segment in packed.segments}
    assert len(pair.out.held) == 2
    got = pair.open(packed)
    assert [len(one) for one in got] == [BIG, 10, SHARED_FROM - 1, SHARED_FROM]
    assert all(is_all(one, value) for one, value in zip(got, [1, 2, 3, 4], strict=True))
    del got
    pair.receiver.give_back()
    assert len(pair.deliver()) == 2
    assert pair.out.held == {}
    assert pair.idle == size_class(BIG) + size_class(SHARED_FROM)


def test_a_bundle_to_a_peer_without_shared_memory_uses_none() -> None:
    pair = Pair(shares_memory=False)
    bundle = pair.sender.bundle(pair.to, pair.out, recorded=True)
    bundle.add([tensor(5)])
    assert not bundle.is_small
    packed = pair.sender.close(pair.out, bundle)
    assert (packed.segments, pair.out.held, pair.segments) == ([], {}, 0)
    assert is_all(pair.open(packed)[0], 5)


def test_a_bundle_that_never_goes_holds_nothing(pair: Pair) -> None:
    bundle = pair.sender.bundle(pair.to, pair.out, recorded=True)
    bundle.add([tensor(1), tensor(2)])
    assert pair.segments == 2
    del bundle
    gc.collect()
    assert pair.segments == 0
    assert pair.out.held == {}


def test_a_bundle_with_a_tensor_that_cannot_go_still_has_the_others(pair: Pair) -> None:
    bundle = pair.sender.bundle(pair.to, pair.out, recorded=True)
    bundle.add([tensor(1)])
    with pytest.raises(SerializationError, match="only go through pickle"):
        bundle.add([torch.ones(2).to_mkldnn()])
    (got,) = pair.open(pair.sender.close(pair.out, bundle))
    assert is_all(got, 1)


# --- coming back ----------------------------------------------------------------------------------------------------


def test_a_segment_comes_back_when_the_last_tensor_over_it_is_gone(pair: Pair) -> None:
    view = pair.open(pair.pack([tensor(1)]))[0][10:20]
    (number,) = pair.out.held
    pair.receiver.give_back()
    assert pair.deliver() == []
    del view
    assert pair.back.posted == [], "nobody has looked yet"
    pair.receiver.give_back()
    assert pair.deliver() == [SegmentReleased(number)]
    assert pair.out.held == {}
    assert pair.idle == size_class(BIG)
    pair.receiver.give_back()
    assert pair.deliver() == [], "once"


@pytest.mark.parametrize("with_what", ["pack", "bundle", "open", "trim"])
def test_it_is_said_with_whatever_comes_next(pair: Pair, with_what: str) -> None:
    held = pair.open(pair.pack([tensor(1)]))
    assert is_all(held[0], 1)
    (number,) = pair.out.held
    other = pair.pack([tensor(2)])
    del held
    if with_what == "pack":
        pair.receiver.pack(pair.peers[0], pair.back, [1])
    elif with_what == "bundle":
        pair.receiver.bundle(pair.peers[0], pair.back, recorded=True)
    elif with_what == "open":
        pair.open(other)
    else:
        pair.receiver.trim()
    assert SegmentReleased(number) in pair.back.posted


def test_the_same_segment_serves_again_and_again(pair: Pair) -> None:
    numbers, addresses = set(), set()
    for value in range(10):
        packed = pair.pack([tensor(value)])
        numbers |= {segment.number for segment in packed.segments}
        (got,) = pair.open(packed)
        assert is_all(got, value)
        addresses.add(got.data_ptr())
        got += 1  # the receiver's own
        del got
        pair.receiver.give_back()
        pair.deliver()
    assert len(numbers) == len(addresses) == pair.segments == 1


def test_what_is_kept_never_changes(pair: Pair) -> None:
    kept = []
    for value in range(0, 40, 2):
        kept.append(pair.open(pair.pack([tensor(value)]))[0])
        pair.open(pair.pack([tensor(value + 1)]))  # comes, and goes at once
        pair.receiver.give_back()
        pair.deliver()
    assert all(is_all(one, 2 * number) for number, one in enumerate(kept))
    assert pair.segments == 21


def test_it_is_a_snapshot(pair: Pair) -> None:
    mine = tensor(1)
    packed = pair.pack([mine])
    mine.fill_(2)
    (got,) = pair.open(packed)
    mine.fill_(3)
    assert is_all(got, 1)


def test_several_buffers_of_one_message_come_back_one_by_one(pair: Pair) -> None:
    packed = pair.pack([tensor(1), tensor(2), np.full(BIG, 3, np.uint8)])
    numbers = [segment.number for segment in packed.segments]
    one, other, array = pair.open(packed)
    del array
    pair.receiver.give_back()
    assert len(pair.deliver()) == 1
    del one
    pair.receiver.give_back()
    assert len(pair.deliver()) == 1
    assert is_all(other, 2)
    assert len(pair.out.held) == 1
    del other
    pair.receiver.give_back()
    pair.deliver()
    assert pair.idle == len(numbers) * size_class(BIG)


def test_a_segment_goes_to_whoever_needs_it_next(pair: Pair) -> None:
    (segment,) = pair.pack([tensor(1)]).segments
    pair.sender.segment_released(pair.out, SegmentReleased(segment.number))
    other = FakeLink(2)
    (again,) = pair.sender.pack(Peer(WorkerRecord(2, "third"), Route(2)), other, [tensor(2)]).segments
    assert again is segment
    assert list(other.held) == [segment.number]


@pytest.mark.parametrize("message", [SegmentReleased(12345), SegmentReleased(12345, kept=True), SegmentReleased(-1)])
def test_a_segment_that_nobody_knows_is_no_error(pair: Pair, message: SegmentReleased) -> None:
    pair.pack([tensor(1)])
    pair.sender.segment_released(pair.out, message)
    assert len(pair.out.held) == 1
    assert pair.idle == 0


def test_nobody_gives_back_what_another_has(pair: Pair) -> None:
    (segment,) = pair.pack([tensor(1)]).segments
    pair.sender.segment_released(FakeLink(2), SegmentReleased(segment.number))
    assert pair.out.held == {segment.number: segment}
    assert pair.idle == 0


def test_a_message_that_nobody_wants_gives_its_segments_back(pair: Pair) -> None:
    packed = pair.pack([tensor(1), tensor(2), 3])
    fork = RRefFork(GlobalId(0, 1), GlobalId(0, 2), 0, 0)
    made: list[tuple[RRefFork, int]] = []
    pair.receiver.make_reference = lambda fork, sender: made.append((fork, sender))
    body = arrived(packed)
    pair.receiver.discard(pair.back, Body(body.tree, buffers=(*body.buffers, bytearray(b"x"), 5), rrefs=(fork,)))
    assert pair.deliver() == [SegmentReleased(segment.number) for segment in packed.segments]
    assert pair.idle == 2 * size_class(BIG)
    assert made == [(fork, 0)]


def test_a_value_that_cannot_be_rebuilt_gives_its_segments_back(pair: Pair) -> None:
    body = arrived(pair.pack([tensor(1)]))
    too_long = type(body.tensors[0])(body.tensors[0].dtype, (2 * BIG,), 0)
    with pytest.raises(SerializationError):
        pair.receiver.open(pair.back, Body(body.tree, buffers=body.buffers, tensors=(too_long,)), [])
    pair.receiver.give_back()
    assert len(pair.deliver()) == 1
    assert pair.idle == size_class(BIG)


# --- not coming back ------------------------------------------------------------------------------------------------


def test_who_keeps_a_tensor_for_long_keeps_its_segment(pair: Pair, clock: Clock) -> None:
    (kept,) = pair.open(pair.pack([tensor(1)]))
    (number,) = pair.out.held
    clock.now += marshal._KEPT_SECONDS - 1
    (young,) = pair.open(pair.pack([tensor(2)]))
    pair.receiver.trim()
    assert pair.deliver() == []
    clock.now += 2
    pair.receiver.trim()
    assert pair.deliver() == [SegmentReleased(number, kept=True)]
    assert number not in pair.out.held
    assert pair.idle == 0
    assert pair.segments == 1, "the sender has only the other one left"
    for value in range(3, 10):  # nothing of what follows lands there
        pair.open(pair.pack([tensor(value)]))
    assert is_all(kept, 1)
    assert is_all(young, 2)
    pair.receiver.trim()
    del kept
    pair.receiver.give_back()
    assert SegmentReleased(number) not in pair.deliver(), "it is nobody's business any more"


def test_a_segment_is_given_up_once(pair: Pair, clock: Clock) -> None:
    kept = pair.open(pair.pack([tensor(1)]))
    clock.now += 2 * marshal._KEPT_SECONDS
    pair.receiver.trim()
    assert len(pair.deliver()) == 1
    clock.now += 2 * marshal._KEPT_SECONDS
    pair.receiver.trim()
    assert pair.deliver() == []
    assert is_all(kept[0], 1)


def test_what_was_kept_is_unmapped_with_its_last_tensor(pair: Pair, clock: Clock) -> None:
    pair.open(pair.pack([tensor(0, 2 * BIG)]))  # used before it, so that a trim takes this one
    (kept,) = pair.open(pair.pack([tensor(1)]))
    clock.now += 2 * marshal._KEPT_SECONDS
    pair.receiver.trim()
    pair.deliver()
    assert mappings() == 2, "the segment that waits at the sender, and that of the tensor"
    assert is_all(kept, 1)
    del kept
    assert mappings() == 1


def test_after_the_link_is_gone_the_tensor_is_the_receivers_alone(pair: Pair) -> None:
    (kept,) = pair.open(pair.pack([tensor(1)]))
    pair.out.held.clear()  # as a link does that breaks
    assert pair.segments == 0
    for value in range(2, 10):
        pair.pack([tensor(value)])
        pair.out.held.clear()
    assert is_all(kept, 1)
    del kept
    pair.receiver.give_back()
    pair.deliver()
    assert pair.idle == 0, "what comes too late is no segment of ours"


def test_a_trim_gives_all_back_to_the_system_in_the_end(pair: Pair) -> None:
    got = pair.open(pair.pack([tensor(value, BIG * (value + 1)) for value in range(4)]))
    del got
    pair.receiver.give_back()
    pair.deliver()
    assert mappings() == 8
    for _ in range(4):
        pair.sender.trim()
        pair.receiver.trim()
    assert mappings() == 0
    assert pair.segments == 0


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(shared_memory._name(TOKEN, 0)[:-1] in line for line in maps)


# --- failure --------------------------------------------------------------------------------------------------------


def refuse_view(monkeypatch: pytest.MonkeyPatch, which: Sequence[int]) -> None:
    """Lets the views of these numbers, counted from one, fail."""
    view, count = PeerSegments.view, [0]

    def failing(self: PeerSegments, number: int, fd: int, size: int) -> Any:
        count[0] += 1
        if count[0] in which:
            raise OSError(12, "Cannot allocate memory")
        return view(self, number, fd, size)

    monkeypatch.setattr(PeerSegments, "view", failing)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_segment_that_cannot_be_mapped(pair: Pair, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    packed = pair.pack([tensor(1), tensor(2), tensor(3)])
    numbers = {segment.number for segment in packed.segments}
    refuse_view(monkeypatch, [failing])
    with pytest.raises(WorkerLostError, match=r"worker 'sender' took 100,000 bytes away: .*Cannot allocate memory"):
        pair.open(packed)
    pair.receiver.give_back()
    said = pair.deliver()
    assert {message.segment for message in said} == numbers
    assert len(said) == 3
    assert pair.out.held == {}
    assert pair.idle == 3 * size_class(BIG)
    assert is_all(pair.open(pair.pack([tensor(4)]))[0], 4), "and the next call goes well"


def test_a_sender_that_is_gone(pair: Pair) -> None:
    packed = pair.pack([tensor(1)])
    pair.back.pid = 2**22 + 1
    with pytest.raises(WorkerLostError, match="worker 'sender' took 100,000 bytes away"):
        pair.open(packed)


def test_a_receiver_that_is_told_of_no_segment_of_the_sender(pair: Pair) -> None:
    body = Body(Node(0, []), buffers=(InSegment(1, 0, BIG),))
    with pytest.raises(WorkerLostError, match="took 100,000 bytes away"):
        pair.receiver.open(pair.back, body, [])
