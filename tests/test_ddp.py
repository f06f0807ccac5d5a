"""DDP around, inside and beside what other workers compute: the parameters are those of one process."""

from __future__ import annotations

import gc
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks
from torch.nn.parallel import DistributedDataParallel

from programs.ddp import CASES
from support import PATIENCE, in_thread
from telegrad import autograd, rpc
from telegrad.autograd.ddp import Swapping
from telegrad.launch import free_port
from telegrad.testing import cluster
from worker_processes import PROGRAMS, telegrad_run


def run(workers: int, program: Path) -> str:
    done = telegrad_run(workers, program, free_port())
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


# --- which modules are known ------------------------------------------------------------------------------------------


@pytest.fixture
def _group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tenfold(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP module whose average of a gradient is ten times the gradient, so that a test sees whether it was asked."""
    wrapped = DistributedDataParallel(module, **options)
    wrapped.register_comm_hook(None, lambda _, bucket: done(bucket.buffer() * 10))
    return wrapped


def done(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def echo(tensor: Tensor) -> Tensor:
    return tensor * 1


def gradient_of(wrapped: nn.Module, parameter: Tensor) -> Tensor | None:
    """Of a backward through another worker."""
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", echo, (wrapped(torch.ones(1, 2)),)).sum()
        autograd.backward(context_id, [loss])
        return autograd.get_gradients(context_id).get(parameter)


REDUCED = [[10.0, 10.0]]


@pytest.mark.usefixtures("_group")
def test_a_module_is_known_whether_it_was_made_before_the_worker_or_after_it() -> None:
    class Special(DistributedDataParallel):
        pass

    layers = [nn.Linear(2, 1, bias=False) for _ in range(4)]
    before = tenfold(layers[0])
    special = Special(layers[1])
    special.register_comm_hook(None, lambda _, bucket: done(bucket.buffer() * 10))
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        after = tenfold(layers[2])
        for wrapped, layer in ((before, layers[0]), (special, layers[1]), (after, layers[2])):
            assert gradient_of(wrapped, layer.weight).tolist() == REDUCED
            assert layer.weight.grad is None
    between = tenfold(layers[3])
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        for wrapped, layer in ((before, layers[0]), (after, layers[2]), (between, layers[3])):
            assert gradient_of(wrapped, layer.weight).tolist() == REDUCED


@pytest.mark.usefixtures("_group")
def test_a_module_inside_of_others_of_which_a_part_is_used() -> None:
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        inner = nn.Linear(2, 1, bias=False)
        both = nn.ModuleDict({"used": inner, "unused": nn.Linear(3, 3)})

        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.both = both

            def forward(self, tensor: Tensor) -> Tensor:
                return self.both["used"](tensor)

        outer = nn.Sequential(nn.Identity(), nn.Sequential(tenfold(Half(), find_unused_parameters=True)))
        for _ in range(2):
            assert gradient_of(outer, inner.weight).tolist() == REDUCED
        assert gradient_of(outer, both["unused"].weight) is None


@pytest.mark.usefixtures("_group")
def test_a_module_outside_of_any_context_is_left_to_torch() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        wrapped = tenfold(layer)
        attributes = list(wrapped.__dict__)
        for _ in range(3):
            wrapped(torch.ones(1, 2)).sum().backward()
            assert layer.weight.grad.tolist() == REDUCED
            wrapped.zero_grad()
        assert list(wrapped.__dict__) == attributes
        assert gradient_of(wrapped, layer.weight).tolist() == REDUCED


@pytest.mark.usefixtures("_group")
def test_a_module_that_goes_after_its_forward_reduces_nothing_as_in_torch() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"), autograd.context() as context_id:
        wrapped = tenfold(layer)
        gone = weakref.ref(wrapped)
        loss = rpc.rpc_sync("b", echo, (wrapped(torch.ones(1, 2)),)).sum()
        del wrapped
        gc.collect()
        assert gone() is None
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[layer.weight].tolist() == [[1.0, 1.0]]


@pytest.mark.usefixtures("_group")
def test_a_group_outlives_the_reducer_that_uses_it() -> None:
    """Else the reducer destroys the group with the GIL held, and gloo's thread may need the GIL to end."""
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        layer = nn.Linear(2, 1, bias=False)
        wrapped = tenfold(layer)
        gradient_of(wrapped, layer.weight)
        names = list(wrapped.__dict__)
        assert names.index("process_group") > max(names.index("reducer"), names.index("logger"))
        assert wrapped.process_group is not None


@pytest.mark.usefixtures("_group")
def test_a_worker_leaves_torch_s_classes_and_foreign_objects_alone() -> None:
    class Proxy:
        """As libraries make them that load themselves when somebody first looks."""

        @property
        def __class__(self) -> type:  # type: ignore[override]
            looked_at.append(self)
            return object

    looked_at: list[Any] = []
    proxies = [Proxy() for _ in range(10)]
    construct, hooks = DistributedDataParallel.__init__, dict(_global_module_registration_hooks)
    with cluster("a", "b"):
        assert DistributedDataParallel.__init__ is construct
        assert len(_global_module_registration_hooks) == len(hooks) + 2
    assert dict(_global_module_registration_hooks) == hooks
    assert DistributedDataParallel.__init__ is construct
    assert looked_at == []
    assert len(proxies) == 10


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
