import os

import torch

from telegrad import rpc


def norm(tensor):
    return f"{rpc.get_worker_info().name} says {tensor.norm():.1f}"


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    print(rpc.rpc_sync("worker1", norm, args=(torch.tensor([3.0, 4.0]),)))
rpc.shutdown()
