"""A whole job: every worker joins as its environment says, calls all others, and leaves."""

import os

from telegrad import rpc


def square(number: int) -> int:
    return number * number


if __name__ == "__main__":
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}")
    for other in range(world_size):
        assert rpc.rpc_sync(f"worker{other}", square, args=(other,)) == other**2
    rpc.shutdown()
    print(f"worker{rank} of {world_size}: all well", flush=True)
