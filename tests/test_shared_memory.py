"""Shared memory of one host: the proof that it can be read, segments of two processes, and what is left at the end."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from programs.neighbour import pattern
from support import PATIENCE, in_thread
from telegrad._transport import shared_memory
from telegrad._transport.buffers import size_class
from telegrad._transport.shared_memory import SHARED_FROM, PeerSegments, Proof, Segment, SegmentPool, can_read
from worker_processes import PROGRAMS, clean_environment

ME = os.getpid()
TOKEN = bytes(range(32))
NO_PROCESS = 2**22 + 1


class Neighbour:
    """Another process with a pool; see ``programs/neighbour.py``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "neighbour.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )
        fd, token = self._answer().split()
        self.pid, self.fd, self.token = self.process.pid, int(fd), bytes.fromhex(token)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, order: str, *arguments: object) -> str:
        print(order, *arguments, file=self.process.stdin, flush=True)
        return self._answer().strip()

    def put(self, seed: int, size: int) -> tuple[int, int]:
        """Number and descriptor of a segment with that pattern."""
        number, fd = self.tell("put", seed, size).split()
        return int(number), int(fd)

    def segments(self) -> PeerSegments:
        return PeerSegments(self.pid, self.token)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@contextmanager
def next_door() -> Iterator[Neighbour]:
    neighbour = Neighbour()
    try:
        yield neighbour
    finally:
        neighbour.kill()


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    with next_door() as one:
        yield one


def descriptors() -> set[str]:
    """What this process has open, without the listing's own."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            pass
    return found


def mapped(token: bytes = TOKEN) -> int:
    """How many mappings of segments with that token this process has."""
    return Path("/proc/self/maps").read_text().count(shared_memory._name(token, 0)[:-1])


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    if not descriptors() <= before or mapped():
        gc.collect()
    assert descriptors() <= before
    assert mapped() == 0


def lay(pool: SegmentPool, seed: int, size: int) -> Segment:
    source = pattern(seed, size)
    segment = pool.put(source.ctypes.data, size)
    assert segment is not None
    return segment


def look(peer: PeerSegments, segment: Segment, size: int) -> np.ndarray:
    return peer.view(segment.number, segment.fd, size)


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    one = SegmentPool(TOKEN)
    yield one
    one.trim()
    one.trim()


@pytest.fixture
def peer() -> Iterator[PeerSegments]:
    one = PeerSegments(ME, TOKEN)
    yield one
    for number in list(one._mapped):
        one.forget(number)


# --- proof ------------------------------------------------------------------------------------------------------------


def test_the_proof_holds() -> None:
    proof = Proof()
    assert proof.pid == ME
    assert len(proof.token) == 32
    assert can_read(proof.pid, proof.fd, proof.token)


def test_the_proof_holds_between_processes(neighbour: Neighbour) -> None:
    assert can_read(neighbour.pid, neighbour.fd, neighbour.token)
    proof = Proof()
    assert neighbour.tell("sees", proof.pid, proof.fd, proof.token.hex()) == "True"


def test_every_proof_is_another() -> None:
    assert Proof().token != Proof().token


def test_a_wrong_word_is_no_proof() -> None:
    proof = Proof()
    for token in (Proof().token, b"", proof.token[:31], proof.token + b"x", proof.token[:8] + bytes(24)):
        assert not can_read(proof.pid, proof.fd, token)


def test_another_descriptor_is_no_proof(tmp_path: Path) -> None:
    proof, other = Proof(), Proof()
    assert not can_read(proof.pid, other.fd, proof.token)
    (tmp_path / "token").write_bytes(proof.token)
    with (tmp_path / "token").open() as file:
        assert not can_read(proof.pid, file.fileno(), proof.token)


def test_a_wrong_process_is_no_proof(neighbour: Neighbour) -> None:
    proof = Proof()
    assert not can_read(neighbour.pid, proof.fd, proof.token)
    assert not can_read(neighbour.pid, neighbour.fd, proof.token)
    assert not can_read(ME, neighbour.fd, neighbour.token)


@pytest.mark.parametrize("pid", [-1, 0, NO_PROCESS, 2**31, 2**40])
@pytest.mark.parametrize("fd", [-1, 0, 2**20, 2**31, 2**64])
def test_nonsense_is_no_proof(pid: int, fd: int) -> None:
    assert not can_read(pid, fd, bytes(32))
    assert not can_read(ME, fd, bytes(32))


def test_a_process_that_is_gone_is_no_proof() -> None:
    with next_door() as other:
        assert can_read(other.pid, other.fd, other.token)
        other.kill()
        assert not can_read(other.pid, other.fd, other.token)


def test_a_proof_ends_with_its_owner() -> None:
    proof = Proof()
    fd, token = proof.fd, proof.token
    del proof
    assert not can_read(ME, fd, token)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_sees_nothing(neighbour: Neighbour) -> None:
    proof = Proof()
    assert neighbour.tell("sees_as_nobody", proof.pid, proof.fd, proof.token.hex()) == "False"
    assert neighbour.tell("sees", proof.pid, proof.fd, proof.token.hex()) == "True"


# --- what a neighbour put there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, SHARED_FROM, 100_001, (8 << 20) - 1, (8 << 20) + 3])
def test_a_segment_of_another_process(neighbour: Neighbour, size: int) -> None:
    number, fd = neighbour.put(7, size)
    memory = neighbour.segments().view(number, fd, size)
    assert memory.nbytes == size
    assert np.array_equal(memory, pattern(7, size))
    memory[:] = 9  # it is the receiver's to change
    assert neighbour.tell("drop", number) == "done"


def test_several_segments_at_once(neighbour: Neighbour) -> None:
    peer = neighbour.segments()
    put = [(seed, *neighbour.put(seed, 70_000 + seed)) for seed in range(20)]
    views = [peer.view(number, fd, 70_000 + seed) for seed, number, fd in put]
    assert all(np.array_equal(view, pattern(seed, 70_000 + seed)) for seed, view in enumerate(views))
    for _, number, _ in put:
        neighbour.tell("drop", number)
    assert all(np.array_equal(view, pattern(seed, 70_000 + seed)) for seed, view in enumerate(views))


def test_a_segment_that_was_given_back_comes_again_with_other_content(neighbour: Neighbour) -> None:
    peer = neighbour.segments()
    number, fd = neighbour.put(1, 100_000)
    view = peer.view(number, fd, 100_000)
    address = view.ctypes.data
    del view
    neighbour.tell("take_back", number)
    assert neighbour.put(2, 99_999) == (number, fd)
    again = peer.view(number, fd, 99_999)
    assert again.ctypes.data == address
    assert np.array_equal(again, pattern(2, 99_999))
    neighbour.tell("drop", number)


def test_tensors_survive_that_the_sender_drops_the_segment(neighbour: Neighbour) -> None:
    peer = neighbour.segments()
    number, fd = neighbour.put(3, 100_000)
    tensor = torch.from_numpy(peer.view(number, fd, 100_000))[1000:]
    neighbour.tell("drop", number)
    for seed in range(5):  # others of the same size come and go
        other, other_fd = neighbour.put(100 + seed, 100_000)
        assert peer.view(other, other_fd, 100_000)[0] == pattern(100 + seed, 1)[0]
        neighbour.tell("drop", other)
    peer.forget(number)
    del peer
    assert np.array_equal(tensor.numpy(), pattern(3, 100_000)[1000:])


def test_tensors_survive_the_death_of_the_sender() -> None:
    with next_door() as other:
        peer = other.segments()
        put = [other.put(seed, 9 << 20) for seed in range(3)]
        seen = torch.from_numpy(peer.view(*put[0], 9 << 20))
        peer.view(*put[1], 9 << 20)
        other.kill()
        assert np.array_equal(seen.numpy(), pattern(0, 9 << 20))
        seen += 1  # and can be changed
        assert np.array_equal(seen.numpy(), pattern(0, 9 << 20) + np.uint8(1))
        assert np.array_equal(peer.view(*put[1], 9 << 20), pattern(1, 9 << 20)), "what is mapped is there"
        with pytest.raises(FileNotFoundError):
            peer.view(*put[2], 9 << 20)
        del peer
        assert mapped(other.token) == 1, "only what a tensor lives on"
        del seen
        assert mapped(other.token) == 0


# --- what is no segment ----------------------------------------------------------------------------------------------


def test_a_descriptor_that_stands_for_another_file_by_now(neighbour: Neighbour) -> None:
    """Of a proper file the one, of another memfd the other; and then for another segment."""
    peer = neighbour.segments()
    for _ in range(2):
        number, fd = neighbour.put(1, 100_000)
        neighbour.tell("replace", number)
        with pytest.raises(
            OSError, match=rf"descriptor {fd} of process {neighbour.pid} is not segment {number}|denied"
        ):
            peer.view(number, fd, 100_000)
    number, fd = neighbour.put(1, 100_000)
    with pytest.raises(OSError, match=f"is not segment {number + 1}"):
        peer.view(number + 1, fd, 100_000)
    neighbour.tell("drop", number)
    assert repr(peer) == f"<PeerSegments to process {neighbour.pid}: 0 segments, 0 bytes>"


def test_a_file_that_has_the_name_only_is_no_segment(peer: PeerSegments, tmp_path: Path) -> None:
    with (tmp_path / "memfd:x (deleted)").open("w+b") as file:
        file.truncate(100_000)
        with pytest.raises(OSError, match="is not segment 1"):
            peer.view(1, file.fileno(), 1000)


@pytest.mark.parametrize(
    ("seals", "size", "wanted"),
    [
        (0, 100_000, 100_000),
        (fcntl.F_SEAL_GROW, 100_000, 100_000),
        (fcntl.F_SEAL_SHRINK, 100_000, 100_000),
        (shared_memory._SEALS, 99_999, 100_000),
        (shared_memory._SEALS, 0, 1),
    ],
    ids=["unsealed", "may shrink", "may grow", "too small", "empty"],
)
def test_a_segment_that_could_end_under_us_is_refused(peer: PeerSegments, seals: int, size: int, wanted: int) -> None:
    fd = os.memfd_create(shared_memory._name(TOKEN, 5), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(OSError, match=f"segment 5 of process {ME} is not a sealed one of {wanted:,} bytes"):
            peer.view(5, fd, wanted)
    finally:
        os.close(fd)


def test_what_is_sealed_stays_as_long_as_it_is(pool: SegmentPool) -> None:
    segment = lay(pool, 1, 100_000)
    for size in (0, 4096, segment.size - 1, segment.size + 1):
        with pytest.raises(PermissionError):
            os.truncate(segment.fd, size)
    assert os.fstat(segment.fd).st_size == segment.size


def test_a_segment_that_is_mapped_but_too_small(pool: SegmentPool, peer: PeerSegments) -> None:
    segment = lay(pool, 1, 100_000)
    look(peer, segment, 100_000)
    before = repr(peer)
    with pytest.raises(
        OSError, match=rf"segment {segment.number} has {segment.size:,} bytes, not {segment.size + 1:,}"
    ):
        look(peer, segment, segment.size + 1)
    assert repr(peer) == before
    assert np.array_equal(look(peer, segment, 100_000), pattern(1, 100_000))


def test_a_mapping_that_the_system_refuses(
    pool: SegmentPool, peer: PeerSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = lay(pool, 1, 100_000)

    class Refusing:
        munmap = shared_memory._libc.munmap

        @staticmethod
        def mmap(*_: Any) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return shared_memory._NO_ADDRESS

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_libc", Refusing)
        with pytest.raises(OSError, match=f"mapping {segment.size:,} bytes: Cannot allocate memory"):
            look(peer, segment, 100_000)
        before = descriptors()
        assert pool.put(pattern(1, 200_000).ctypes.data, 200_000) is None
        assert descriptors() == before
    assert repr(peer) == f"<PeerSegments to process {ME}: 0 segments, 0 bytes>"
    assert np.array_equal(look(peer, segment, 100_000), pattern(1, 100_000))


# --- a peer's segments ------------------------------------------------------------------------------------------------


def test_a_mapping_is_used_again(pool: SegmentPool, peer: PeerSegments) -> None:
    segment = lay(pool, 1, 100_000)
    first = look(peer, segment, 100_000)
    address = first.ctypes.data
    assert look(peer, segment, 50).ctypes.data == address
    del first
    assert look(peer, segment, 100_000).ctypes.data == address
    assert mapped() == 2, "one of the sender and one of the receiver"


def test_what_is_forgotten_is_unmapped_when_its_last_tensor_is_gone(pool: SegmentPool, peer: PeerSegments) -> None:
    segment = lay(pool, 1, 100_000)
    tensor = torch.from_numpy(look(peer, segment, 100_000))[5:10]
    peer.forget(segment.number)
    peer.forget(segment.number)  # is forgotten already
    assert repr(peer) == f"<PeerSegments to process {ME}: 0 segments, 0 bytes>"
    assert mapped() == 2
    again = look(peer, segment, 100_000)
    assert again.ctypes.data + 5 != tensor.data_ptr(), "it is mapped anew"
    assert mapped() == 3
    assert bytes(tensor.numpy()) == bytes(pattern(1, 10)[5:])
    del tensor
    assert mapped() == 2


def test_peer_segments_keep_no_more_bytes_than_allowed(
    pool: SegmentPool, peer: PeerSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_class(100_000)
    monkeypatch.setattr(shared_memory, "_KEEP_BYTES", 3 * size)
    segments = [lay(pool, seed, 100_000) for seed in range(4)]
    for segment in segments[:3]:
        look(peer, segment, 100_000)
    look(peer, segments[0], 100_000)  # used again: the second has not been used for longest now
    views = [look(peer, segments[3], 100_000)]
    assert repr(peer) == f"<PeerSegments to process {ME}: 3 segments, {3 * size:,} bytes>"
    assert list(peer._mapped) == [segments[2].number, segments[0].number, segments[3].number]
    assert mapped() == 4 + 3
    views += [look(peer, segment, 100_000) for segment in segments]
    assert mapped() == 4 + 5, "a tensor holds its own mapping; what was forgotten meanwhile is mapped anew"
    assert all(np.array_equal(view, pattern(seed, 100_000)) for seed, view in zip([3, 0, 1, 2, 3], views, strict=True))


def test_a_segment_that_is_bigger_than_all_that_may_be_kept(
    pool: SegmentPool, peer: PeerSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_KEEP_BYTES", 100_000)
    segment = lay(pool, 1, 200_000)
    view = look(peer, segment, 200_000)
    assert repr(peer) == f"<PeerSegments to process {ME}: 0 segments, 0 bytes>"
    assert np.array_equal(view, pattern(1, 200_000))


def test_peer_segments_trim_what_was_not_used_for_longest(pool: SegmentPool, peer: PeerSegments) -> None:
    segments = [lay(pool, seed, 100_000) for seed in range(5)]
    for segment in segments:
        look(peer, segment, 100_000)
    left = []
    for _ in range(3):
        peer.trim()
        left.append(list(peer._mapped))
        assert peer._bytes == len(left[-1]) * segments[0].size
    assert left == [[segments[3].number, segments[4].number], [segments[4].number], []]
    peer.trim()
    assert mapped() == 5, "only the sender's own"


def test_peer_segments_keep_no_descriptors(neighbour: Neighbour) -> None:
    """Tensors may be many and live long, and descriptors are few."""
    before = descriptors()
    peer = neighbour.segments()
    put = [neighbour.put(seed, 70_000) for seed in range(30)]
    views = [peer.view(number, fd, 70_000) for number, fd in put]
    assert descriptors() == before
    for number, fd in put:
        with pytest.raises(OSError):
            peer.view(number + 1000, fd, 70_000)
        neighbour.tell("drop", number)
    assert descriptors() == before
    assert all(view[5] == pattern(seed, 6)[5] for seed, view in enumerate(views))


# --- the pool --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, SHARED_FROM, 100_001, 1 << 20, (8 << 20) + 5])
def test_a_segment_has_the_size_of_its_class(pool: SegmentPool, peer: PeerSegments, size: int) -> None:
    segment = lay(pool, 4, size)
    assert segment.size == size_class(size) == os.fstat(segment.fd).st_size
    assert np.array_equal(look(peer, segment, size), pattern(4, size))


def test_it_is_a_snapshot(pool: SegmentPool, peer: PeerSegments) -> None:
    source = pattern(1, 9 << 20).copy()
    segment = pool.put(source.ctypes.data, source.nbytes)
    assert segment is not None
    source[:] = 0
    view = look(peer, segment, source.nbytes)
    assert np.array_equal(view, pattern(1, 9 << 20))
    view[:] = 3
    assert not source.any()


def test_a_segment_is_not_used_again_before_it_is_back(pool: SegmentPool) -> None:
    first, second = lay(pool, 1, 100_000), lay(pool, 2, 100_000)
    assert first.number != second.number
    pool.take_back(first)
    number = first.number
    assert repr(pool) == f"<SegmentPool 2 segments, {first.size:,} bytes idle>"
    del first
    third = lay(pool, 3, 99_000)
    assert third.number == number, "its class is the same"
    assert lay(pool, 4, 99_000).number not in (number, second.number)
    assert bytes(second.memory)[:100_000] == pattern(2, 100_000).tobytes()


def test_a_segment_of_another_class_is_not_used(pool: SegmentPool) -> None:
    segment = lay(pool, 1, 100_000)
    pool.take_back(segment)
    assert lay(pool, 1, 200_000) is not segment
    assert lay(pool, 1, 70_000) is not segment
    assert lay(pool, 1, 100_000) is segment


def test_what_is_dropped_is_gone(pool: SegmentPool, peer: PeerSegments) -> None:
    before = descriptors()
    segments = [lay(pool, seed, 100_000) for seed in range(3)]
    assert len(descriptors() - before) == 3
    assert mapped() == 3
    numbers = [(segment.number, segment.fd) for segment in segments]
    del segments
    assert descriptors() == before
    assert mapped() == 0
    assert repr(pool) == "<SegmentPool 0 segments, 0 bytes idle>"
    for number, fd in numbers:
        with pytest.raises(OSError):
            peer.view(number, fd, 100_000)


def test_a_number_never_comes_again(pool: SegmentPool) -> None:
    """A receiver may still have the segment of that number mapped."""
    assert len({lay(pool, seed, 100_000).number for seed in range(50)}) == 50


def test_too_many_segments(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_SEGMENTS", 3)
    segments = [lay(pool, seed, 100_000) for seed in range(3)]
    source = pattern(9, 100_000)
    assert pool.put(source.ctypes.data, source.nbytes) is None
    pool.take_back(segments.pop())
    segments.append(lay(pool, 4, 100_000))  # of those that came back
    assert pool.put(source.ctypes.data, source.nbytes) is None
    segments.pop()
    segments.append(lay(pool, 5, 100_000))  # in the place of one that is gone


def test_idle_segments_give_way_to_those_of_another_size(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_SEGMENTS", 3)
    for segment in [lay(pool, seed, 100_000) for seed in range(3)]:
        pool.take_back(segment)
    del segment
    source = pattern(9, 300_000)
    by_socket = itertools.takewhile(lambda _: pool.put(source.ctypes.data, source.nbytes) is None, range(10))
    assert len(list(by_socket)) == 2, "after those that nobody asked for between two tries were given up"


def test_a_pool_keeps_no_more_bytes_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_KEEP_BYTES", 2 * size_class(100_000))
    pool = SegmentPool(TOKEN)
    for segment in [lay(pool, seed, 100_000) for seed in range(5)]:
        pool.take_back(segment)
    del segment
    assert repr(pool) == f"<SegmentPool 2 segments, {2 * size_class(100_000):,} bytes idle>"


def test_a_pool_trims_what_nobody_asked_for(pool: SegmentPool) -> None:
    for segment in [lay(pool, seed, 100_000) for seed in range(3)]:
        pool.take_back(segment)
    del segment
    pool.trim()  # they came back since the last time
    assert repr(pool).startswith("<SegmentPool 3 segments")
    pool.take_back(lay(pool, 1, 100_000))
    pool.trim()
    assert repr(pool).startswith("<SegmentPool 1 segments")
    pool.trim()
    assert repr(pool) == "<SegmentPool 0 segments, 0 bytes idle>"


@pytest.mark.parametrize(
    ("call", "number"),
    [("memfd_create", errno.EMFILE), ("memfd_create", errno.ENOSYS), ("posix_fallocate", errno.ENOSPC)],
)
def test_a_system_that_gives_no_more(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    source, before = pattern(1, 100_000), descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        assert pool.put(source.ctypes.data, source.nbytes) is None
    assert descriptors() == before
    assert repr(pool) == "<SegmentPool 0 segments, 0 bytes idle>"
    assert lay(pool, 1, 100_000)


def test_a_new_program_does_not_inherit_a_segment(pool: SegmentPool) -> None:
    segment, proof = lay(pool, 1, 100_000), Proof()
    code = f"import os; print([os.path.exists(f'/proc/self/fd/{{fd}}') for fd in ({segment.fd}, {proof.fd})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False, check=True)
    assert done.stdout == "[False, False]\n"


# --- threads ----------------------------------------------------------------------------------------------------------


def test_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lays and looks, keeps some views, gives most segments back and drops some: nobody sees another's bytes."""
    size = size_class(4 * SHARED_FROM)
    monkeypatch.setattr(shared_memory, "_KEEP_BYTES", 8 * size)  # so that mappings and segments come and go
    monkeypatch.setattr(shared_memory, "_MOST_SEGMENTS", 40)
    pool, peer = SegmentPool(TOKEN), PeerSegments(ME, TOKEN)

    def work(thread: int) -> int:
        dice, laid, kept = random.Random(thread), 0, []
        for turn in range(60):
            seed, size = 1000 * thread + turn, dice.randrange(SHARED_FROM, 4 * SHARED_FROM)
            source = pattern(seed, size)
            segment = pool.put(source.ctypes.data, size)
            if segment is None:
                continue
            laid += 1
            kept.append((segment, look(peer, segment, size), seed))
            if len(kept) > 3:
                segment, view, seed = kept.pop(dice.randrange(len(kept)))
                assert np.array_equal(view, pattern(seed, view.nbytes))
                del view
                if dice.random() < 0.8:
                    pool.take_back(segment)
                else:
                    peer.forget(segment.number)
            if dice.random() < 0.05:
                pool.trim()
                peer.trim()
        assert all(np.array_equal(view, pattern(seed, view.nbytes)) for _, view, seed in kept)
        return laid

    counts = [join() for join in [in_thread(lambda thread=thread: work(thread)) for thread in range(8)]]
    assert sum(counts) > 300
    assert peer._bytes == sum(map(len, peer._mapped.values())) <= 8 * size
    assert pool._idle.bytes <= 8 * size


def test_threads_that_look_at_one_segment_see_one_mapping(pool: SegmentPool, peer: PeerSegments) -> None:
    segment = lay(pool, 1, 1 << 20)
    views = [join() for join in [in_thread(lambda: look(peer, segment, 1 << 20)) for _ in range(8)]]
    assert len({view.ctypes.data for view in views}) == 1
    assert mapped() == 2
