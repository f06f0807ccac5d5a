"""Workers that run the same program: functions of ``__main__`` go by name, so the callee's own globals count.

With ``spawn`` the workers are children of multiprocessing, which know this file as ``__mp_main__``.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from telegrad import rpc

state = {"rank": -1}
lock = threading.Lock()  # cannot be copied: a function that goes by value could not take it along


@dataclass
class Point:
    x: int


def my_rank() -> int:
    with lock:
        return state["rank"]


def move(point: Point) -> Point:
    assert type(point) is Point
    return Point(point.x + state["rank"])


def apply(function: Callable[[Point], int], point: Point) -> int:
    assert type(point) is Point, "the lambda beside it goes by value, but the class need not"
    return function(point)


def main(rank: int, world_size: int) -> None:
    state["rank"] = rank
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    other = 1 - rank
    assert rpc.rpc_sync(f"worker{other}", my_rank) == other
    assert rpc.rpc_sync(f"worker{other}", move, args=(Point(10),)) == Point(10 + other)
    assert rpc.rpc_sync(f"worker{other}", lambda: state["rank"] if "state" in globals() else None) is not None
    assert rpc.rpc_sync(f"worker{other}", apply, args=(lambda point: point.x + 1, Point(5))) == 6
    rpc.shutdown()
    sys.stdout.write(f"worker {rank}: all well\n")  # in one piece, also where nothing is buffered


if __name__ == "__main__":
    if "spawn" in sys.argv:
        children = [multiprocessing.get_context("spawn").Process(target=main, args=(rank, 2)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        sys.exit(max(child.exitcode if child.exitcode is not None else 99 for child in children))
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
