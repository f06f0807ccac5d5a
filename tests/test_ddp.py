"""DDP around, inside and beside what other workers compute: the parameters are those of one process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from programs.ddp import CASES
from puppets import PROGRAMS, clean_environment
from support import in_thread
from telegrad.autograd.reducers import Swapping
from telegrad.launch import free_port


def run(workers: int, program: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "run", "--workers", str(workers), str(program), str(free_port())],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    return f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def output() -> str:
    """Two trainers and a server go through all cases, in one job."""
    return run(3, PROGRAMS / "ddp.py")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_give_the_parameters_that_one_process_gives(output: str, name: str) -> None:
    assert output.count(f"{name}: ok") >= 2, output


# --- steps during a reduction -----------------------------------------------------------------------------------------

#: Two trainers, each with a DDP layer; the first has a table, too.  Trainer 1 steps the table when trainer 0 is in its
#: next backward already, and waits for trainer 1 there.  Before its second forward, DDP itself waits for all.
ONE_AHEAD = """
    import os, sys, threading, torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from telegrad import autograd, rpc
    from telegrad.optim import DistributedOptimizer

    table = torch.nn.Parameter(torch.ones(4))
    turns = [threading.Event() for _ in range(3)]  # set when that reduction of this trainer has begun

    def look_up(): return table * 1
    def parameter(): return rpc.RRef(table)
    def wait_for(turn): return turns[turn].wait(30)

    def average(group, bucket):
        next(each for each in turns if not each.is_set()).set()
        return allreduce_hook(group, bucket)

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=2)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=30))
    dense = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    dense.register_comm_hook(None, average)
    weight = dense.module.weight
    own = weight.grad = torch.full((1, 4), 7.0)
    theirs = table.grad = torch.full((4,), 8.0)
    optimizer = DistributedOptimizer(torch.optim.Adam, [rpc.rpc_sync("worker0", parameter)])
    for turn in range(3):
        with autograd.context() as context_id:
            loss = dense(rpc.rpc_sync("worker0", look_up) * 0 + rank + 1).sum()
            autograd.backward(context_id, [loss])
            torch.testing.assert_close(autograd.get_gradients(context_id)[weight], torch.full((1, 4), 1.5))
            if turn == 1 and rank == 1:
                assert rpc.rpc_sync("worker0", wait_for, (2,))
                optimizer.step(context_id)
    assert weight.grad is own and table.grad is theirs and own.eq(7).all() and theirs.eq(8).all()
    print(f"trainer {rank}: ok", flush=True)
    rpc.shutdown()
"""


def test_a_step_does_not_wait_for_a_reduction_of_other_parameters(tmp_path: Path) -> None:
    program = tmp_path / "one_ahead.py"
    program.write_text(textwrap.dedent(ONE_AHEAD))
    output = run(2, program)
    assert all(f"trainer {rank}: ok" in output for rank in range(2)), output


def test_who_needs_grad_of_parameters_that_are_reduced_waits_and_no_other() -> None:
    swapping, reduced, other = Swapping(), torch.zeros(1), torch.zeros(1)
    done: list[str] = []

    def step() -> None:
        with swapping.of([other, reduced]):
            done.append("step")

    def reduce() -> None:
        with swapping.lent([reduced]):
            done.append("second reduction")

    def look(*parameters: Any) -> None:
        with swapping, swapping.of(parameters), swapping.lent(parameters):
            done.append("look")

    with swapping.lent([reduced]):
        waiting = [in_thread(step), in_thread(reduce)]
        for _ in range(3):
            in_thread(lambda: look(other))()
        assert done == ["look"] * 3
        done.append("first reduction")
    for join in waiting:
        join()
    in_thread(lambda: look(reduced))()
    assert done[:4] == ["look"] * 3 + ["first reduction"]
    assert sorted(done[4:]) == ["look", "second reduction", "step"]
