"""The same-host lane: reading another process's memory, the proof that one can, and what happens when it is gone."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from telegrad.errors import WorkerLostError
from telegrad.transport import lane
from telegrad.transport.lane import Proof, can_read, fetch, read

pytestmark = pytest.mark.skipif(lane._readv is None, reason="this system has no process_vm_readv")

ME = os.getpid()


def pattern(size):
    return np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()


@pytest.fixture(scope="module")
def neighbour():
    """Another process, which holds the pattern at an address that it tells."""
    program = """
import ctypes, os, sys
import numpy as np
memory = np.arange(100_000, dtype=np.uint32).view(np.uint8)
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 100_001, (8 << 20) - 1, 8 << 20, (8 << 20) + 3])
def test_reading_ones_own_memory(size):
    source, target = pattern(size), np.zeros(size, np.uint8)
    read(ME, source.ctypes.data, target)
    assert np.array_equal(source, target)


def test_one_thread_where_there_is_one_core(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    source, target = pattern(9 << 20), np.zeros(9 << 20, np.uint8)
    read(ME, source.ctypes.data, target)
    assert np.array_equal(source, target)


def test_long_reads_are_made_in_pieces(monkeypatch):
    monkeypatch.setattr(lane, "_MAX_READ", 1000)
    source, target = pattern(12_345), np.zeros(12_345, np.uint8)
    read(ME, source.ctypes.data, target)
    assert np.array_equal(source, target)


def test_reading_a_neighbours_memory(neighbour):
    pid, address = neighbour
    target = np.zeros(400_000, np.uint8)
    try:
        read(pid, address, target)
    except PermissionError:
        pytest.skip("this system does not let processes read each other")
    assert np.array_equal(target, pattern(400_000))


# --- proof ----------------------------------------------------------------------------------------------------------


def test_the_proof_holds():
    proof = Proof()
    assert proof.pid == ME
    assert len(proof.word) == 32
    assert can_read(proof.pid, proof.address, proof.word)


def test_every_proof_is_another():
    assert Proof().word != Proof().word


def test_a_wrong_word_is_no_proof():
    proof = Proof()
    assert not can_read(proof.pid, proof.address, Proof().word)
    assert not can_read(proof.pid, proof.address, b"")
    assert not can_read(proof.pid, proof.address, proof.word[:31])
    assert not can_read(proof.pid, proof.address + 1, proof.word)


def test_a_wrong_process_is_no_proof(neighbour):
    proof = Proof()
    assert not can_read(neighbour[0], proof.address, proof.word)


@pytest.mark.parametrize("pid", [-1, 0, 2**22 + 1, 2**31, 2**40])
@pytest.mark.parametrize("address", [0, 1, 2**47, 2**64 - 1, 2**64, -1])
def test_nonsense_is_no_proof(pid, address):
    assert not can_read(pid, address, bytes(32))


def test_without_the_system_call_there_is_no_proof(monkeypatch):
    proof = Proof()
    monkeypatch.setattr(lane, "_readv", None)
    assert not can_read(proof.pid, proof.address, proof.word)


# --- failure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_an_address_that_is_not_mapped(size):
    with pytest.raises(OSError, match=f"bytes of process {ME}"):
        read(ME, 4096, np.zeros(size, np.uint8))


def test_memory_that_ends_too_soon():
    """A read that succeeds in part must not count as done."""
    page = mmap.PAGESIZE
    hole = mmap.mmap(-1, 64 * page)
    address = np.frombuffer(hole, np.uint8).ctypes.data
    libc = lane.ctypes.CDLL(None)
    second = mmap.mmap(-1, page)  # so that the hole is not at the end of what is mapped
    assert libc.mprotect(lane.ctypes.c_void_p(address + 32 * page), lane.ctypes.c_size_t(32 * page), 0) == 0
    try:
        with pytest.raises(OSError, match="Bad address"):
            read(ME, address, np.zeros(64 * page, np.uint8))
    finally:
        libc.mprotect(lane.ctypes.c_void_p(address + 32 * page), lane.ctypes.c_size_t(32 * page), 3)
        second.close()


def test_the_second_threads_failure_is_raised():
    source = pattern(9 << 20)
    with pytest.raises(OSError, match="process"):
        read(2**22 + 1, source.ctypes.data, np.zeros(9 << 20, np.uint8))


def test_a_process_that_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(
        WorkerLostError, match=r"worker 'trainer' did not let 1,000 bytes be read from it, or went away"
    ):
        fetch(process.pid, 4096, np.zeros(1000, np.uint8), "trainer")
