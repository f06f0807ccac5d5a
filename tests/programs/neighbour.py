"""Another process of this host with a pool, for ``test_shared_memory.py``: obeys one line after the other."""

from __future__ import annotations

import contextlib
import os
import sys

import numpy as np

from telegrad._transport.shared_memory import Proof, Segment, SegmentPool, can_read

NOBODY = 65534

proof = Proof()
pool = SegmentPool(proof.token)
segments: dict[int, Segment] = {}
others: list[int] = []  # descriptors that took a segment's number


def pattern(seed: int, size: int) -> np.ndarray:
    """Bytes that tell where they belong: no two seeds and no two pages have the same."""
    numbers = np.arange(size // 4 + 1, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    return numbers.view(np.uint8)[:size]


def put(seed: int, size: int) -> str:
    source = pattern(seed, size)
    segment = pool.put(source.ctypes.data, size)
    assert segment is not None
    segments[segment.number] = segment
    return f"{segment.number} {segment.fd}"


def drop(number: int) -> str:
    """Gives a segment up."""
    del segments[number]
    return "done"


def take_back(number: int) -> str:
    pool.take_back(segments.pop(number))
    return "done"


def replace(number: int) -> str:
    """Gives a segment up, and lets another file have its descriptor."""
    fd = segments[number].fd
    del segments[number]
    other = os.open("/proc/self/maps", os.O_RDONLY) if number % 2 else os.memfd_create("something else")
    if other != fd:
        os.dup2(other, fd)
    others.append(fd)
    return "done"


def sees(pid: int, fd: int, token: str) -> str:
    return str(can_read(pid, fd, bytes.fromhex(token)))


def sees_as_nobody(pid: int, fd: int, token: str) -> str:
    """What a process of another user sees."""
    os.seteuid(NOBODY)
    try:
        return sees(pid, fd, token)
    finally:
        os.seteuid(0)


ORDERS = {order.__name__: order for order in (put, drop, take_back, replace, sees, sees_as_nobody)}


def main() -> None:
    print(proof.fd, proof.token.hex(), flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        print(ORDERS[name](*map(_argument, arguments)), flush=True)


def _argument(text: str) -> int | str:
    with contextlib.suppress(ValueError):
        return int(text) if len(text) < 20 else text
    return text


if __name__ == "__main__":
    main()
