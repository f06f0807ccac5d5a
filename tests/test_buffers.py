"""Receive memory: it comes back when the last view of it dies, and not before."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
import torch

from telegrad.transport import buffers
from telegrad.transport.buffers import POOLED_FROM, BufferPool, _size_class
from telegrad.wire import tensors
from telegrad.wire.messages import TensorMeta
from telegrad.wire.tensors import DTYPE_CODES

SIZE = 400_000


def lend_filled(pool, size=SIZE, byte=1):
    memory = pool.lend(size)
    memory[:] = byte
    return memory


def idle_bytes(pool):
    with pool._lock:
        pool._collect()
        return pool._idle_bytes


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
    assert idle_bytes(pool) == _size_class(SIZE)
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
    return tensors.unpack([TensorMeta(DTYPE_CODES[torch.float32], (SIZE // 4,), 0)], [memory])[0]


def over_half(memory):
    return tensors.unpack([TensorMeta(DTYPE_CODES[torch.bfloat16], (SIZE // 2,), 0)], [memory])[0]


def over_strided(memory):
    return tensors.unpack([TensorMeta(DTYPE_CODES[torch.float32], (2, SIZE // 8), 0, (1, 2))], [memory])[0]


def over_float8(memory):
    return tensors.unpack([TensorMeta(DTYPE_CODES[torch.float8_e8m0fnu], (SIZE,), 0)], [memory])[0]


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
}


@pytest.mark.parametrize("make_view", VIEWS.values(), ids=VIEWS.keys())
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
    assert idle_bytes(pool) == _size_class(SIZE)


def test_memory_outlives_its_pool():
    pool = BufferPool()
    tensor = over_float(lend_filled(pool))
    del pool
    gc.collect()
    assert bytes(tensor.view(torch.uint8)[:4]) == b"\1\1\1\1"


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_size_classes():
    sizes = [random.Random(7).randrange(POOLED_FROM, 1 << 34) for _ in range(1000)]
    for size in [*sizes, POOLED_FROM, POOLED_FROM + 1, 1 << 20, (1 << 20) - 1, (1 << 20) + 1]:
        size_class = _size_class(size)
        assert size <= size_class <= size * 1.125 + 4096
        assert size_class % 4096 == 0
        assert _size_class(size_class) == size_class, "a class is its own class"


def test_there_are_few_classes():
    assert len({_size_class(size) for size in range(1 << 20, 2 << 20, 512)}) <= 9


# --- how much is kept -----------------------------------------------------------------------------------------------


def test_no_more_is_kept_than_allowed():
    pool = BufferPool(keep_bytes=2 * _size_class(SIZE))
    loans = [lend_filled(pool) for _ in range(5)]
    del loans
    assert idle_bytes(pool) == 2 * _size_class(SIZE)


def test_trim_halves_what_is_idle_until_nothing_is():
    pool = BufferPool()
    loans = [lend_filled(pool) for _ in range(5)] + [lend_filled(pool, 100_000)]
    kept = lend_filled(pool, byte=3)
    del loans
    counts = []
    while idle_bytes(pool):
        pool.trim()
        counts.append(idle_bytes(pool) // _size_class(SIZE))
        assert idle_bytes(pool) == sum(size * len(idle) for size, idle in pool._idle.items())
    assert counts == [2, 1, 0]
    assert pool._idle == {}
    assert set(kept) == {3}, "what is lent is not trimmed"
    assert repr(pool) == "<BufferPool lent=1 idle=0 bytes>"


def test_idle_memory_that_is_trimmed_goes_back_to_the_system(monkeypatch):
    made = []
    monkeypatch.setattr(buffers, "_new_slab", lambda size, real=buffers._new_slab: made.append(real(size)) or made[-1])
    pool = BufferPool()
    lend_filled(pool)
    pool.trim()
    (slab,) = made
    slab.close()  # refuses while anything still looks at it


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
    assert idle_bytes(pool) == sum(size * len(idle) for size, idle in pool._idle.items()) <= 8 << 20
    assert repr(pool).startswith("<BufferPool lent=0 ")


def test_memory_that_dies_inside_the_pool_comes_back_too():
    """A collection may run anywhere, also while the pool holds its lock: the return must need none."""
    pool = BufferPool()
    loop = [lend_filled(pool)]
    loop.append(loop)
    del loop
    with pool._lock:
        gc.collect()
    assert idle_bytes(pool) == _size_class(SIZE)
