"""Memory that is lent and comes back: when the last view of it dies, and not before."""

from __future__ import annotations

import ctypes
import gc
import pickle
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from telegrad._transport import buffers
from telegrad._transport.buffers import POOLED_FROM, BufferPool, Idle, Loans, size_class
from telegrad._wire import unpack_tensors
from telegrad._wire.messages import TensorMeta
from telegrad._wire.tensors import DTYPE_CODES

SIZE = 400_000


def lend_filled(pool, size=SIZE, byte=1):
    memory = pool.lend(size)
    memory[:] = byte
    return memory


def idle_bytes(pool):
    pool._collect()
    check(pool._idle)
    return pool._idle.bytes


def check(idle):
    """What it counts is what it has."""
    assert idle.bytes == sum(size * len(segments) for size, segments in idle._segments.items()) <= idle._keep_bytes
    assert all(0 <= spare <= len(idle._segments[size]) for size, spare in idle._spare.items())


# --- lending and coming back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, POOLED_FROM - 1, POOLED_FROM, POOLED_FROM + 1, SIZE, 3 << 20])
def test_memory_has_the_size_that_was_asked_for(size):
    memory = BufferPool().lend(size)
    assert memory.nbytes == size
    assert memory.dtype == np.uint8
    memory[:] = 1
    assert memory.flags.writeable


def test_small_memory_is_not_pooled():
    pool = BufferPool()
    memory = pool.lend(POOLED_FROM - 1)
    assert repr(pool) == "<BufferPool lent=0 idle=0 bytes>"
    del memory
    assert idle_bytes(pool) == 0


def test_memory_is_used_again():
    pool = BufferPool()
    memory = lend_filled(pool)
    address = memory.ctypes.data
    assert repr(pool) == "<BufferPool lent=1 idle=0 bytes>"
    del memory
    assert idle_bytes(pool) == size_class(SIZE)
    again = pool.lend(SIZE - 100)  # of the same class
    assert again.ctypes.data == address
    assert again.nbytes == SIZE - 100
    assert idle_bytes(pool) == 0


def test_two_loans_are_apart():
    pool = BufferPool()
    one, other = lend_filled(pool, byte=1), lend_filled(pool, byte=2)
    assert not np.shares_memory(one, other)
    assert set(one) == {1}
    assert set(other) == {2}


def over_float(memory):
    return unpack_tensors.unpack([TensorMeta(DTYPE_CODES[torch.float32], (SIZE // 4,), 0)], [memory])[0]


def over_half(memory):
    return unpack_tensors.unpack([TensorMeta(DTYPE_CODES[torch.bfloat16], (SIZE // 2,), 0)], [memory])[0]


def over_strided(memory):
    return unpack_tensors.unpack([TensorMeta(DTYPE_CODES[torch.float32], (2, SIZE // 8), 0, (1, 2))], [memory])[0]


def over_float8(memory):
    return unpack_tensors.unpack([TensorMeta(DTYPE_CODES[torch.float8_e8m0fnu], (SIZE,), 0)], [memory])[0]


def over_pickle(memory):
    """As an array that came beside its pickle."""
    data = pickle.dumps(np.zeros(SIZE, np.uint8), 5, buffer_callback=lambda _: None)
    return pickle.loads(data, buffers=[memory])


VIEWS = {
    "slice": lambda memory: memory[5:10],
    "slice of a slice": lambda memory: memory[5:100][5:10],
    "reshaped": lambda memory: memory.reshape(2, -1).T,
    "other dtype": lambda memory: memory.view(np.float32),
    "array over it": lambda memory: np.ndarray((4,), np.float32, memory),
    "frombuffer": lambda memory: np.frombuffer(memory, np.int16),
    "memoryview": lambda memory: memoryview(memory)[7:9],
    "torch.from_numpy": torch.from_numpy,
    "torch.frombuffer": lambda memory: torch.frombuffer(memory, dtype=torch.uint8),
    "torch, of an array over it": lambda memory: torch.from_numpy(np.ndarray((4,), np.float32, memory))[1:],
    "float32 tensor": over_float,
    "bfloat16 tensor": over_half,
    "strided tensor": over_strided,
    "float8 tensor": over_float8,
    "view of a tensor": lambda memory: over_float(memory)[10:20].view(torch.int32),
    "storage of a tensor": lambda memory: over_float(memory).untyped_storage(),
    "grad of a view": lambda memory: over_float(memory).detach().requires_grad_(),
    "array of a tensor": lambda memory: over_float(memory).numpy()[3:],
    "array of a pickle": over_pickle,
    "slice of an array of a pickle": lambda memory: over_pickle(memory)[7:9],
}

every_view = pytest.mark.parametrize("make_view", VIEWS.values(), ids=VIEWS.keys())


@every_view
def test_memory_stays_lent_while_a_view_of_it_lives(make_view):
    pool = BufferPool()
    memory = lend_filled(pool)
    address = memory.ctypes.data
    view = make_view(memory)
    del memory
    gc.collect()
    assert idle_bytes(pool) == 0
    other = lend_filled(pool, byte=9)
    assert other.ctypes.data != address
    del view
    gc.collect()
    assert idle_bytes(pool) == size_class(SIZE)


def test_memory_outlives_its_pool():
    pool = BufferPool()
    tensor = over_float(lend_filled(pool))
    del pool
    gc.collect()
    assert bytes(tensor.view(torch.uint8)[:4]) == b"\1\1\1\1"


# --- loans ----------------------------------------------------------------------------------------------------------


def lent(size=SIZE):
    """Memory over something that is no array, as a pool or shared memory makes it."""
    return np.frombuffer((ctypes.c_ubyte * size)(), np.uint8)


@every_view
def test_a_loan_is_back_when_its_last_view_is_gone(make_view):
    loans = Loans()
    memory = lent()
    loans.add(memory, "behind")
    view = make_view(memory)
    del memory
    assert not loans.back
    assert list(loans.returned()) == []
    assert len(loans) == 1
    del view
    assert loans.back
    assert list(loans.returned()) == ["behind"]
    assert not loans.back
    assert len(loans) == 0


def test_a_loan_comes_back_once():
    loans = Loans()
    for number in range(5):
        loans.add(lent(100), number)
    kept = lent(100)
    loans.add(kept, "kept")
    assert sorted(loans.returned()) == [0, 1, 2, 3, 4]
    assert list(loans.returned()) == []
    assert len(loans) == 1


def test_what_lies_behind_lives_as_long_as_the_loan():
    class Behind:
        pass

    loans, behind = Loans(), Behind()
    gone = weakref.ref(behind)
    memory = lent(100)
    loans.add(memory, behind)
    del behind
    assert gone() is not None
    del memory
    assert [type(one) for one in loans.returned()] == [Behind]
    assert gone() is None


def test_what_is_left_with_its_user_does_not_come_back():
    loans, memories = Loans(), [lent(100) for _ in range(6)]
    for number, memory in enumerate(memories):
        loans.add(memory, number)
    assert loans.leave(lambda number: number % 2 == 0) == [0, 2, 4]
    assert loans.leave(lambda number: number % 2 == 0) == []
    assert len(loans) == 3
    del memory
    memories.clear()
    assert sorted(loans.returned()) == [1, 3, 5]
    assert not loans.back


def test_what_came_back_cannot_be_left():
    loans, memory = Loans(), lent(100)
    loans.add(memory, "behind")
    del memory
    assert list(loans.returned()) == ["behind"]
    assert loans.leave(lambda _: True) == []


def test_what_dies_while_it_is_left_counts_once():
    """Its tensor is gone by the time of the question, but nobody has looked yet."""
    loans, memory = Loans(), lent(100)
    loans.add(memory, "behind")
    del memory
    assert loans.leave(lambda _: True) == ["behind"]
    assert list(loans.returned()) == []


def test_loans_may_end_on_any_thread_at_any_time():
    """Each loan is either returned or left, and exactly once."""
    loans, rounds = Loans(), 400
    returned, left, stop = [], [], threading.Event()

    def lend(thread):
        rng, mine = random.Random(thread), []
        for number in range(rounds):
            memory = lent(64)
            loans.add(memory, (thread, number))
            mine.append(memory)
            del memory
            if len(mine) > 5:
                mine.pop(rng.randrange(len(mine)))

    def gather():
        while not stop.is_set():
            returned.extend(loans.returned())

    def leave():
        while not stop.is_set():
            left.extend(loans.leave(lambda behind: behind[1] % 7 == 0))

    lenders = [threading.Thread(target=lend, args=(number,)) for number in range(4)]
    others = [threading.Thread(target=target) for target in (gather, gather, leave)]
    for thread in lenders + others:
        thread.start()
    for thread in lenders:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    returned.extend(loans.returned())
    assert sorted(returned + left) == [(thread, number) for thread in range(4) for number in range(rounds)]
    assert len(loans) == 0


# --- idle memory ----------------------------------------------------------------------------------------------------


def test_the_last_that_came_is_taken_first():
    idle = Idle(1 << 20)
    for segment in "abc":
        assert idle.put(4096, segment)
    assert [idle.take(4096) for _ in range(4)] == ["c", "b", "a", None]
    check(idle)


def test_classes_are_apart():
    idle = Idle(1 << 20)
    idle.put(4096, "small")
    idle.put(8192, "big")
    assert idle.bytes == 4096 + 8192
    assert idle.take(16384) is None
    assert idle.take(8192) == "big"
    assert idle.take(8192) is None
    assert idle.bytes == 4096


def test_what_would_be_too_much_is_refused():
    idle = Idle(10_000)
    assert idle.put(4096, "a")
    assert idle.put(4096, "b")
    assert not idle.put(4096, "c")
    assert not idle.put(20_000, "d")
    assert idle.bytes == 8192
    assert idle.take(4096) == "b"
    assert idle.put(4096, "e")
    check(idle)


def test_a_trim_takes_what_was_idle_all_the_time():
    """Of five, three were in use at once since the last trim: two are too many."""
    idle = Idle(1 << 20)
    for segment in "abcde":
        idle.put(4096, segment)
    idle.trim()
    assert idle.bytes == 5 * 4096
    for segment in [idle.take(4096) for _ in range(3)]:
        idle.put(4096, segment)
    assert idle.take(4096) == "c"  # once more, but fewer
    idle.put(4096, "c")
    idle.trim()
    assert idle.bytes == 3 * 4096
    assert sorted(idle.take(4096) for _ in range(3)) == ["c", "d", "e"], "those that were used"
    check(idle)


def test_a_trim_spares_what_came_back_since_the_last():
    idle = Idle(1 << 20)
    idle.put(4096, "old")
    idle.trim()
    idle.put(4096, "new")
    idle.trim()
    assert idle.take(4096) == "new"
    assert idle.take(4096) is None


def test_a_class_that_nobody_wants_is_forgotten():
    idle = Idle(1 << 20)
    for size in range(4096, 40960, 4096):
        idle.put(size, size)
    idle.trim()
    idle.trim()
    assert idle.bytes == 0
    assert idle._segments == idle._spare == {}


def test_what_is_given_up_is_freed_when_others_can_go_on():
    """To unmap takes long, so the lock is not held meanwhile."""
    idle = Idle(1 << 20)
    locked = []

    class Segment:
        def __del__(self):
            locked.append(idle._lock.locked())

    idle.put(4096, Segment())
    idle.trim()
    idle.trim()
    assert locked == [False]


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_size_classes():
    sizes = [random.Random(7).randrange(POOLED_FROM, 1 << 34) for _ in range(1000)]
    for size in [*sizes, *range(1, 20), POOLED_FROM, POOLED_FROM + 1, 1 << 20, (1 << 20) - 1, (1 << 20) + 1]:
        found = size_class(size)
        assert size <= found <= size * 1.125 + 4096
        assert found % 4096 == 0
        assert size_class(found) == found, "a class is its own class"


def test_there_are_few_classes():
    assert len({size_class(size) for size in range(1 << 20, 2 << 20, 512)}) <= 9


# --- how much is kept -----------------------------------------------------------------------------------------------


def test_no_more_is_kept_than_allowed():
    pool = BufferPool(keep_bytes=2 * size_class(SIZE))
    loans = [lend_filled(pool) for _ in range(5)]
    del loans
    assert idle_bytes(pool) == 2 * size_class(SIZE)


def test_trim_gives_up_what_nobody_asked_for_since_the_last_trim():
    pool = BufferPool()
    loans = [lend_filled(pool) for _ in range(5)] + [lend_filled(pool, 100_000)]
    kept = lend_filled(pool, byte=3)
    del loans
    everything = idle_bytes(pool)
    pool.trim()
    assert idle_bytes(pool) == everything, "it came back since the last time"
    two = [lend_filled(pool), lend_filled(pool)]
    del two
    pool.trim()
    assert idle_bytes(pool) == 2 * size_class(SIZE), "what two loans need"
    pool.trim()
    assert idle_bytes(pool) == 0
    assert set(kept) == {3}, "what is lent is not trimmed"
    assert repr(pool) == "<BufferPool lent=1 idle=0 bytes>"


def test_idle_memory_that_is_trimmed_goes_back_to_the_system(monkeypatch):
    made = []
    monkeypatch.setattr(
        buffers, "_new_segment", lambda size, real=buffers._new_segment: made.append(real(size)) or made[-1]
    )
    pool = BufferPool()
    lend_filled(pool)
    pool.trim()
    pool.trim()
    (segment,) = made
    segment.close()  # refuses while anything still looks at it


# --- threads --------------------------------------------------------------------------------------------------------


def test_many_threads():
    """Each fills its memory with its own number, and finds nothing else in it later."""
    pool = BufferPool(keep_bytes=8 << 20)
    wrong = []

    def work(number):
        rng, mine = random.Random(number), []
        for _ in range(60):
            memory = lend_filled(pool, rng.randrange(POOLED_FROM, 4 * POOLED_FROM), number)
            mine.append(torch.from_numpy(memory)[: rng.randrange(1, memory.nbytes)])
            del memory
            if len(mine) > 3:
                view = mine.pop(rng.randrange(len(mine)))
                if int(view.min()) != number or int(view.max()) != number:
                    wrong.append(number)
            if rng.random() < 0.05:
                pool.trim()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert idle_bytes(pool) <= 8 << 20
    assert repr(pool).startswith("<BufferPool lent=0 ")


def test_memory_that_dies_inside_the_pool_comes_back_too():
    """A collection may run anywhere, also while the pool holds its lock: the return must need none."""
    pool = BufferPool()
    loop = [lend_filled(pool)]
    loop.append(loop)
    del loop
    with pool._idle._lock:
        gc.collect()
    assert idle_bytes(pool) == size_class(SIZE)
