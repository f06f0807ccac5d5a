"""A program written for torch.distributed.rpc: methods of references as functions, and references as tuples.

``compat_references.py PORT``: worker0 asks worker2 to use an object of worker1.
"""

import os
import sys

import pytest
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


class Counter:
    def __init__(self):
        self.value = 0

    def add(self, number, *, times=1):
        self.value += number * times
        return self.value, rpc.get_worker_info().name


def read(fork):
    rref = rpc.PyRRef._deserialize(fork)
    return rref.rpc_sync().add(0), rref.is_owner()


def read_bytes(pickled, tensors):
    rref, tensor = rpc.internal.deserialize(pickled, tensors)
    return rref.rpc_sync().add(0), tensor


def main():
    counter = rpc.remote("worker1", Counter)
    assert rpc.rpc_async("worker2", counter.rpc_sync().add, (2,), {"times": 3}).wait() == (6, "worker1")
    assert rpc.rpc_sync("worker1", counter.rpc_sync().add, (1,)) == (7, "worker1")
    assert rpc.rpc_sync("worker0", counter.rpc_sync(timeout=20).add, (1,)) == (8, "worker1")
    assert rpc.remote("worker2", counter.rpc_sync().add, (1,)).to_here() == (9, "worker1")
    assert rpc.rpc_sync("worker2", counter.remote().add, (1,)).to_here() == (10, "worker1")
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        rpc.rpc_sync("worker2", counter.rpc_sync().no_such)
    print("methods as functions", flush=True)

    fork = counter._serialize()
    assert fork[0] == 1
    assert all(isinstance(number, int) for number in fork[:6])
    assert rpc.rpc_sync("worker2", read, (fork,)) == ((10, "worker1"), False)
    with pytest.raises(ValueError, match="can be deserialized once"):
        rpc.rpc_sync("worker2", read, (fork,))
    assert rpc.rpc_sync("worker1", read, (counter._serialize(),)) == ((10, "worker1"), True)
    assert read(counter._serialize()) == ((10, "worker1"), False)
    value, tensor = rpc.rpc_sync("worker2", read_bytes, rpc.internal.serialize((counter, torch.ones(2))))
    assert value == (10, "worker1")
    assert tensor.tolist() == [1.0, 1.0]
    counter._serialize()  # never claimed: it must not keep the job from ending
    print("references as tuples", flush=True)


def work(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        main()
    rpc.shutdown()
    os.write(1, b"left\n")


if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1],), nprocs=3, start_method="fork")
