"""A program written for torch.distributed.rpc: trains a remote layer for one step, and says whose RPC it ran on.

``compat.py HOW PORT``: HOW is a start method of multiprocessing, "torch" for torch.multiprocessing.spawn, or "launched"
for one worker of a launcher's job.
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


def add(a, b):
    return a + b


def work(rank, port):
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        layer = RemoteModule("worker1/cpu", torch.nn.Linear, (2, 1))
        before = [rref.to_here().clone() for rref in layer.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.5)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [layer(torch.ones(1, 2)).sum()])
            optimizer.step(context_id)
        after = [rref.to_here() for rref in layer.remote_parameters()]
        assert all(torch.equal(new, old - 0.5) for new, old in zip(after, before, strict=True))
        print("sum", rpc.rpc_sync("worker1", add, (1, 2)), "by", rpc.rpc_sync.__module__, flush=True)
        print("there", rpc.rpc_sync("worker1", whose), flush=True)
    rpc.shutdown()


def whose():
    return rpc.rpc_sync.__module__


if __name__ == "__main__":
    how, port = sys.argv[1:]
    if how == "launched":
        work(int(os.environ["RANK"]), port)
    elif how == "torch":
        mp.spawn(work, (port,), nprocs=2)
    else:
        context = mp.get_context(how)
        workers = [context.Process(target=work, args=(rank, port)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        sys.exit(max(abs(worker.exitcode) for worker in workers))
