"""Frames: the same frames come out however the bytes are cut, and nothing that a peer sends makes the reader swell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._wire import codec
from telegrad._wire.frames import MAGIC, MAX_HEADER, PREFIX, FrameReader, prefix
from telegrad._wire.messages import Body, Call, Goodbye, InSegment, MemoryReadable, Node, Reply, SegmentReleased
from telegrad.errors import ProtocolError, TelegradError
from wire_trip import FUZZ_EXAMPLES, feed


def reader(allocate=bytearray):
    return FrameReader(codec.decode, codec.stream_sizes, allocate)


def frame(message, *stream: bytes) -> bytes:
    header = codec.encode(message)
    return prefix(len(header), sum(map(len, stream))) + header + b"".join(stream)


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251 + 1)


def streaming(call_id: int, *sizes: int) -> tuple[Reply, list[bytes]]:
    stream = [pattern(size + index)[index : index + size] for index, size in enumerate(sizes)]
    return Reply(call_id, Body(Node(0, []), buffers=sizes)), stream


STORY = [
    (MemoryReadable(), []),
    (Call(1, "math:sqrt", Body(Node(1, [1, 2.0, None]))), []),
    streaming(2, 9_000),
    (Goodbye(), []),
    streaming(3, 1, 70_000, 5),
    streaming(4, 300),
    (Call(5, "x", Body("long" * 30_000)), []),  # a header that is larger than the reader's memory
    streaming(6, 200_000),
    (SegmentReleased(7), []),
    (SegmentReleased(8, kept=True), []),
    (Reply(9, Body(Node(0, []), buffers=(InSegment(1, 12, 1 << 40),))), []),  # lies in shared memory: nothing follows
]
BYTES = b"".join(frame(message, *stream) for message, stream in STORY)


def as_story(frames):
    return [(message, [bytes(buffer) for buffer in buffers]) for message, buffers in frames]


# --- every cut gives the same ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_most", [1, 7, 16, 1000, 65_535, 65_536, 65_537, 1 << 30])
def test_the_frames_do_not_depend_on_the_chunks(at_most):
    assert as_story(feed(reader(), BYTES, at_most)) == STORY


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 70_000)), min_size=1, max_size=30))
@settings(max_examples=60)
def test_random_chunks(chunks):
    reading, frames, done = reader(), [], 0
    for chunk in itertools.cycle([*chunks, 70_000]):
        frames += feed(reading, BYTES[done : done + chunk])
        done += chunk
        if done >= len(BYTES):
            break
    assert as_story(frames) == STORY


def test_several_frames_in_one_chunk_come_out_together():
    reading, data = reader(), frame(Goodbye()) * 50
    reading.space()[: len(data)] = data
    assert [message for message, _ in reading.advance(len(data))] == [Goodbye()] * 50


@pytest.mark.parametrize("extra", range(-40, 41, 8))
def test_there_is_space_after_a_buffer_that_began_in_a_full_chunk(extra):
    """The memory was full when the buffer's rest was awaited; it must be empty again when the buffer has come."""
    message, stream = streaming(1, 65_536 + extra)
    data = frame(message, *stream) * 3
    assert as_story(feed(reader(), data)) == [(message, stream)] * 3


def test_a_header_does_not_keep_the_readers_memory():
    """What was decoded must survive the next bytes, which overwrite the place where the header stood."""
    reading = reader()
    ((first, _),) = feed(reading, frame(Reply(1, Body(Node(0, ["first"]), buffers=(b"inline",)))))
    feed(reading, frame(Reply(2, Body(Node(0, ["other"]), buffers=(b"INLINE",)))))
    assert first == Reply(1, Body(Node(0, ["first"]), buffers=(bytearray(b"inline"),)))


def test_big_buffers_are_received_into_the_memory_that_was_allocated():
    given_out = []

    def allocate(size):
        given_out.append(np.zeros(size, np.uint8))
        return given_out[-1]

    message, stream = streaming(1, 100_000, 3)
    reading = reader(allocate)
    head = frame(message, *stream)[: -sum(map(len, stream))]
    assert feed(reading, head) == []
    space = reading.space()
    assert len(space) == 100_000
    assert np.shares_memory(np.frombuffer(space, np.uint8), given_out[0])
    ((_, buffers),) = feed(reading, b"".join(stream))
    assert buffers[0] is given_out[0]
    assert buffers[1] is given_out[1]
    assert [buffer.tobytes() for buffer in buffers] == stream


def test_the_memory_shrinks_again_after_a_long_header():
    reading = reader()
    feed(reading, frame(Call(1, "x", Body("x" * (1 << 20)))))
    assert len(reading._memory) == 64 << 10


# --- what is no frame -----------------------------------------------------------------------------------------------


def test_bad_magic():
    with pytest.raises(ProtocolError, match="GET "):
        feed(reader(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_header_beyond_the_limit():
    with pytest.raises(ProtocolError, match="larger than"):
        feed(reader(), PREFIX.pack(MAGIC, MAX_HEADER + 1, 0))


def test_an_announced_header_costs_nothing_until_its_bytes_come():
    reading = reader()
    feed(reading, PREFIX.pack(MAGIC, MAX_HEADER, 0))
    assert len(reading._memory) == 64 << 10
    feed(reading, bytes(1 << 20))
    assert len(reading._memory) <= 4 << 20


@pytest.mark.parametrize(
    ("sizes", "follows"),
    [
        ((), 5),
        ((5,), 4),
        ((5,), 6),
        ((5, 5), 5),
        ((0, 5), 5),
        ((1 << 62, 1 << 62), 1 << 62),
        ((InSegment(1, 2, 5),), 5),
    ],
    ids=str,
)
def test_sizes_that_disagree(sizes, follows):
    header = codec.encode(Reply(1, Body(buffers=sizes)))
    with pytest.raises(ProtocolError, match="bytes follow a header that announces"):
        feed(reader(), prefix(len(header), follows) + header)


@pytest.mark.parametrize("message", [Goodbye(), SegmentReleased(1)])
def test_bytes_after_a_message_that_has_no_buffers(message):
    header = codec.encode(message)
    with pytest.raises(ProtocolError, match="bytes follow"):
        feed(reader(), prefix(len(header), 1) + header + b"x")


@pytest.mark.parametrize("allocate", [bytearray, lambda size: np.empty(size, np.uint8)], ids=["bytearray", "numpy"])
def test_more_than_the_machine_has(allocate):
    header = codec.encode(Reply(1, Body(buffers=(1 << 62,))))
    with pytest.raises(ProtocolError, match="no memory for"):
        feed(reader(allocate), prefix(len(header), 1 << 62) + header)


# --- fuzz -----------------------------------------------------------------------------------------------------------


class Allocator:
    """Stands for the machine's memory, all 1 MiB of it."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, size: int) -> bytearray:
        self.total += size
        if self.total > 1 << 20:
            raise MemoryError
        return bytearray(size)


def read_all(data: bytes, at_most: int) -> None:
    allocate = Allocator()
    reading = reader(allocate)
    try:
        feed(reading, data, at_most)
    except TelegradError:
        pass
    assert len(reading._memory) <= max(64 << 10, 4 * len(data))


@given(st.binary(max_size=200), st.integers(1, 300))
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_random_bytes(data, at_most):
    read_all(MAGIC + data, at_most)


SHORT = b"".join(frame(message, *stream) for message, stream in STORY if sum(map(len, stream)) < 400)[:2_000]


@given(
    st.lists(st.tuples(st.integers(0, len(SHORT) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(SHORT)),
    st.integers(1, 300),
)
@settings(max_examples=FUZZ_EXAMPLES)
def test_fuzz_mutated_frames(edits, cut, at_most):
    data = bytearray(SHORT)
    for position, byte in edits:
        data[position] = byte
    read_all(bytes(data[:cut]), at_most)
