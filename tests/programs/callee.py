"""A worker that runs another program than its caller, and only serves."""

from telegrad import rpc


def here() -> str:
    return "callee.py"


if __name__ == "__main__":
    rpc.init_rpc("callee", rank=1, world_size=2)
    rpc.shutdown()
