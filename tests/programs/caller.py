"""Sends functions of its main program to a worker that runs another, which gets them by value."""

from dataclasses import dataclass

from telegrad import rpc

factor = 3


def times(number: int) -> int:
    return factor * number


@dataclass
class Point:
    x: int

    def shifted(self, by: int) -> "Point":
        return Point(self.x + by)


def moved(point: Point) -> Point:
    return Point(point.x + 1)


if __name__ == "__main__":
    rpc.init_rpc("caller", rank=0, world_size=2)
    assert rpc.rpc_sync("callee", lambda a, b: a * b, args=(6, 7)) == 42
    assert rpc.rpc_sync("callee", times, args=(5,)) == 15
    factor = 4
    assert rpc.rpc_sync("callee", times, args=(5,)) == 20, "the function takes its globals along as they are now"
    assert rpc.rpc_sync("callee", moved, args=(Point(1),)).x == 2
    assert rpc.remote("callee", Point, args=(3,)).rpc_sync().shifted(1) == Point(4)
    rpc.shutdown()
    print("all well")
