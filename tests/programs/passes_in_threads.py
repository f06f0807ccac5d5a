"""Several threads of one worker, each with contexts in which sources meet."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

from telegrad import autograd, rpc

WEIGHT = torch.full((4,), 2.0, requires_grad=True)
THREADS, CONTEXTS = 3, 250
FAILED: list[BaseException] = []


def scale(tensor: Tensor) -> Tensor:
    return tensor * WEIGHT


def work() -> None:
    leaf = torch.ones(4, requires_grad=True)
    try:
        for _ in range(CONTEXTS):
            with autograd.context() as context_id:
                shared = leaf * 3
                autograd.backward(context_id, [(shared + rpc.rpc_sync("worker1", scale, (shared,))).sum()])
                assert autograd.get_gradients(context_id)[leaf].tolist() == [9.0] * 4
    except BaseException as error:
        FAILED.append(error)
        raise


rank = int(os.environ["RANK"])
torch.set_num_threads(1)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("failed" if FAILED else "all right", flush=True)
rpc.shutdown(timeout=20)
