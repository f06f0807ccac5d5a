"""Optimising what lives on other workers gives what one process would compute."""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support import PATIENCE, in_thread
from telegrad import autograd, rpc
from telegrad._current import current_worker
from telegrad.errors import SerializationError, UsageError, WorkersFailedError
from telegrad.optim import DistributedOptimizer, clip_grad_norm_, clip_grad_value_
from telegrad.optim.local import LocalOptimizer
from telegrad.testing import Cluster, cluster

#: The layers of one model, each on its own worker.
LAYERS: dict[str, nn.Module] = {}


def make_layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "a": nn.Linear(4, 5).double(),
        "b": nn.Sequential(nn.Linear(5, 6), nn.Tanh()).double(),
        "c": nn.Linear(6, 1).double(),
    }


@pytest.fixture(autouse=True)
def _layers() -> Iterator[None]:
    LAYERS.update(make_layers())
    yield
    LAYERS.clear()
    gc.collect()


def layer() -> nn.Module:
    return LAYERS[current_worker().name]


def parameters() -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(parameter) for parameter in layer().parameters()]


def forward(tensor: Tensor) -> Tensor:
    return layer()(tensor)


def all_parameters() -> list[rpc.RRef[Tensor]]:
    return [rref for name in LAYERS for rref in rpc.rpc_sync(name, parameters)]


def batch(number: int) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def remote_loss(number: int) -> Tensor:
    tensor = forward(batch(number))
    for name in "bc":
        tensor = rpc.rpc_sync(name, forward, (tensor,))
    return tensor.square().mean()


class Local:
    """The same model in one process."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*make_layers().values())
        self.parameters = list(self.model.parameters())

    def loss(self, number: int) -> Tensor:
        return self.model(batch(number)).square().mean()

    def step(self, optimizer: optim.Optimizer, *numbers: int) -> None:
        optimizer.zero_grad()
        for number in numbers:
            self.loss(number).backward()
        optimizer.step()

    def assert_same(self) -> None:
        found = [parameter for name in "abc" for parameter in LAYERS[name].parameters()]
        for index, (one, other) in enumerate(zip(found, self.parameters, strict=True)):
            torch.testing.assert_close(one, other, msg=lambda text, index=index: f"parameter {index}: {text}")


def step(optimizer: DistributedOptimizer, number: int) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(number)])
        optimizer.step(context_id)


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (optim.Adam, {"lr": 0.05}),
        (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
        (optim.Adadelta, {}),
        (optim.Adamax, {}),
        (optim.NAdam, {}),
        (optim.RAdam, {}),
        (optim.Rprop, {}),
        (optim.ASGD, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value) or "defaults",
)
def test_ten_steps_give_the_parameters_that_one_process_gives(
    trio: Cluster, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    local = Local()
    reference: Any = kind
    expected = reference(local.parameters, **options)
    optimizer = DistributedOptimizer(kind, all_parameters(), **options)
    for number in range(10):
        local.step(expected, number)
        step(optimizer, number)
    local.assert_same()


def test_positional_arguments_go_to_the_optimizer(trio: Cluster) -> None:
    local = Local()
    expected = optim.SGD(local.parameters, 0.25)
    local.step(expected, 1)
    step(DistributedOptimizer(optim.SGD, all_parameters(), 0.25), 1)
    local.assert_same()


def test_a_step_is_one_call_to_each_owner(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    assert len(optimizer.remote_optimizers) == 3
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1)])
        before = trio["a"].agent.calls.started
        optimizer.step(context_id)
        assert trio["a"].agent.calls.started == before + 2  # its own part it does itself


def test_grad_is_left_as_it_was(trio: Cluster) -> None:
    all_of = [parameter for name in "abc" for parameter in LAYERS[name].parameters()]
    mine = torch.ones_like(all_of[0])
    all_of[0].grad = mine
    step(DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1), 1)
    assert all_of[0].grad is mine
    assert all(parameter.grad is None for parameter in all_of[1:])


def test_a_parameter_without_a_gradient_stays(trio: Cluster) -> None:
    unused = rpc.RRef(nn.Parameter(torch.ones(2)))
    optimizer = DistributedOptimizer(optim.SGD, [*all_parameters(), unused], lr=0.1, weight_decay=0.5)
    step(optimizer, 1)
    assert unused.local_value().tolist() == [1.0, 1.0]


def test_an_owner_that_the_context_never_came_to_does_nothing(trio: Cluster) -> None:
    before = [parameter.detach().clone() for parameter in LAYERS["c"].parameters()]
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1, weight_decay=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", forward, (forward(batch(1)),)).sum()])
        optimizer.step(context_id)
    for parameter, old in zip(LAYERS["c"].parameters(), before, strict=True):
        assert torch.equal(parameter, old)


TABLE = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)


def table() -> rpc.RRef[Tensor]:
    return rpc.RRef(TABLE.weight)


def look_up(rows: Tensor) -> Tensor:
    return TABLE(rows)


@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam])
def test_sparse_gradients(trio: Cluster, kind: Any) -> None:
    local = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    local.weight.data.copy_(TABLE.weight.data)
    expected = kind([local.weight], lr=0.1)
    optimizer = DistributedOptimizer(kind, [rpc.rpc_sync("b", table)], lr=0.1)
    for number in range(5):
        rows = torch.tensor([number, 3, 3])
        expected.zero_grad()
        local(rows).square().sum().backward()
        expected.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", look_up, (rows,)).square().sum()])
            optimizer.step(context_id)
    torch.testing.assert_close(TABLE.weight, local.weight)


def test_steps_on_one_worker_come_one_after_the_other(trio: Cluster) -> None:
    Slow.running = 0
    optimizers = [DistributedOptimizer(Slow, rpc.rpc_sync("b", parameters), lr=0.1) for _ in range(3)]

    def train(which: int) -> None:
        with trio.on("a"), autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", forward, (torch.ones(5, dtype=torch.float64),)).sum()])
            optimizers[which].step(context_id)

    for join in [in_thread(lambda which=which: train(which)) for which in range(3)]:
        join()
    assert Slow.most == 1


class Slow(optim.SGD):
    running = most = 0

    def step(self, closure: Any = None) -> Any:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        threading.Event().wait(0.02)
        super().step(closure)
        cls.running -= 1


# --- the owner runs torch.optim as it was configured --------------------------------------------------------------


AS_CONFIGURED: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "fused": True}),
    (optim.SGD, {"lr": torch.tensor(0.1)}),
    (optim.Adam, {"lr": 0.05}),
    (optim.Adam, {"lr": 0.05, "foreach": True}),
    (optim.Adam, {"lr": 0.05, "foreach": False}),
    (optim.Adam, {"lr": 0.05, "fused": True}),
    (optim.Adam, {"lr": torch.tensor(0.05)}),
    (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (optim.NAdam, {}),
]


class Operators(TorchDispatchMode):
    """Records which operators the calling thread runs, and on what shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [list(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "options"),
    AS_CONFIGURED,
    ids=[f"{kind.__name__}-{'-'.join(options)}-{number}" for number, (kind, options) in enumerate(AS_CONFIGURED)],
)
def test_a_step_runs_the_operators_of_torch_optim_as_configured(
    trio: Cluster, kind: Any, options: dict[str, Any]
) -> None:
    """The same operators on the same shapes, so the same memory, and the same parameters bit by bit."""
    starts = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 4, 5)]
    mine, plain = ([start.clone().requires_grad_() for start in starts] for _ in range(2))
    optimizer = DistributedOptimizer(kind, [rpc.RRef(each) for each in mine], **copy.deepcopy(options))
    expected = kind(plain, **copy.deepcopy(options))
    for number in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [torch.stack([(each * each * (number + 1)).sum() for each in mine]).sum()])
            gradients = autograd.get_gradients(context_id)
            for one, other in zip(mine, plain, strict=True):
                other.grad = gradients[one].clone()
            with Operators() as theirs:
                expected.step()
            with Operators() as ours:
                optimizer.step(context_id)
        assert _of_optimizer(ours.seen) == _of_optimizer(theirs.seen)
        assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
    assert optimizer.param_groups[0].get("foreach") == options.get("foreach")


def _of_optimizer(seen: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """Without the copy and comparison of learning rates that are tensors, by which changes of them are noticed."""
    return [(name, shapes) for name, shapes in seen if name not in ("aten.clone.default", "aten.equal.default")]


def test_an_owner_elsewhere_leaves_foreach_open(trio: Cluster) -> None:
    Watched.seen.clear()
    step(DistributedOptimizer(Watched, all_parameters(), lr=0.1), 1)
    step(DistributedOptimizer(Watched, all_parameters(), lr=0.1, foreach=True), 1)
    assert Watched.seen == [None] * 3 + [True] * 3


class Watched(optim.Adam):
    seen: ClassVar[list[Any]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen += [group["foreach"] for group in self.param_groups]
        return super().step(closure)


def test_adam_takes_a_learning_rate_that_is_a_tensor(trio: Cluster) -> None:
    local = Local()
    expected = optim.Adam(local.parameters, lr=torch.tensor(0.05, dtype=torch.float64))
    optimizer = DistributedOptimizer(optim.Adam, all_parameters(), lr=torch.tensor(0.05, dtype=torch.float64))
    for number in range(3):
        for each in (expected, optimizer):
            each.param_groups[0]["lr"].mul_(0.5)
        local.step(expected, number)
        step(optimizer, number)
    local.assert_same()


# --- groups, learning rates, schedulers ---------------------------------------------------------------------------


def test_groups_over_several_owners(trio: Cluster) -> None:
    local = Local()
    expected = optim.SGD([{"params": local.parameters[:3], "lr": 0.3}, {"params": local.parameters[3:]}], lr=0.05)
    given = all_parameters()
    optimizer = DistributedOptimizer(optim.SGD, [{"params": given[:3], "lr": 0.3}, {"params": given[3:]}], lr=0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.05]
    assert [group["params"] for group in optimizer.param_groups] == [given[:3], given[3:]]
    for number in range(3):
        local.step(expected, number)
        step(optimizer, number)
    local.assert_same()


def test_a_learning_rate_that_is_changed_here_counts_there(trio: Cluster) -> None:
    local = Local()
    expected = optim.SGD(local.parameters, lr=0.1, momentum=0.5)
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1, momentum=0.5)
    for number, rate in enumerate([0.1, 0.2, 0.2, 0.01]):
        expected.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = rate
        local.step(expected, number)
        step(optimizer, number)
    local.assert_same()


def test_a_rate_that_is_a_tensor_and_changed_in_place_counts_there(trio: Cluster) -> None:
    local = Local()
    expected = optim.SGD(local.parameters, lr=torch.tensor(0.1, dtype=torch.float64))
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=torch.tensor(0.1, dtype=torch.float64))
    for number in range(3):
        for each in (expected, optimizer):
            each.param_groups[0]["lr"].mul_(0.5)
        local.step(expected, number)
        step(optimizer, number)
    local.assert_same()


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers_drive_it(trio: Cluster, name: str) -> None:
    local = Local()
    expected = optim.SGD(local.parameters, lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1, momentum=0.9)
    schedules = [SCHEDULERS[name](expected), SCHEDULERS[name](optimizer)]
    for number in range(6):
        local.step(expected, number)
        step(optimizer, number)
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    local.assert_same()


def test_reduce_on_plateau(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 1.0, 1.0):
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.025


# --- several contexts in one step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("last_with_step", [True, False])
def test_gradients_of_several_contexts_add_up(trio: Cluster, last_with_step: bool) -> None:
    local = Local()
    expected = optim.SGD(local.parameters, lr=0.1)
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    for start in (0, 3):
        local.step(expected, start, start + 1, start + 2)
        for number in (start, start + 1, start + 2):
            with autograd.context() as context_id:
                autograd.backward(context_id, [remote_loss(number)])
                if last_with_step and number == start + 2:
                    optimizer.step(context_id)
                else:
                    optimizer.accumulate(context_id)
        if not last_with_step:
            optimizer.step()
    local.assert_same()


def test_zero_grad_drops_what_was_kept(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1)])
        optimizer.accumulate(context_id)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"step\(context_id\), or accumulate"):
        optimizer.step()


# --- saving and loading -------------------------------------------------------------------------------------------


def test_its_state_is_that_of_one_process_and_goes_both_ways(trio: Cluster) -> None:
    local = Local()
    expected = optim.Adam([{"params": local.parameters[:1]}, {"params": local.parameters[1:], "lr": 0.02}], lr=0.05)
    given = all_parameters()
    groups = [{"params": given[:1]}, {"params": given[1:], "lr": 0.02}]
    optimizer = DistributedOptimizer(optim.Adam, groups, lr=0.05)
    for number in range(3):
        local.step(expected, number)
        step(optimizer, number)
    found, wanted = optimizer.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    torch.testing.assert_close(found["state"], wanted["state"])

    another = DistributedOptimizer(optim.Adam, [{"params": given[:1]}, {"params": given[1:]}], lr=9.0)
    another.load_state_dict(wanted)
    assert [group["lr"] for group in another.param_groups] == [0.05, 0.02]
    expected.load_state_dict(found)
    local.step(expected, 7)
    step(another, 7)
    local.assert_same()


def test_a_state_is_not_changed_by_the_next_step(trio: Cluster) -> None:
    parameter = nn.Parameter(torch.ones(2))
    local = LocalOptimizer(optim.Adam, [{"params": [rpc.RRef(parameter)]}], [], {"lr": 0.1})
    with autograd.context() as context_id:
        autograd.backward(context_id, [parameter.sum()])
        local.step(context_id, [])
        before = local.state()
        kept = copy.deepcopy(before)
        local.step(context_id, [])
    torch.testing.assert_close(before, kept)
    assert local.state()[0]["step"] == before[0]["step"] + 1


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_touched(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1, momentum=0.9)
    step(optimizer, 1)
    before = optimizer.state_dict()
    other = DistributedOptimizer(optim.SGD, all_parameters()[:2], lr=0.5)
    with pytest.raises(UsageError, match=r"groups of \[6\] parameters, but the state is of groups of \[2\]"):
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before)


# --- clipping -----------------------------------------------------------------------------------------------------


def gradients_everywhere(workers: Cluster, context_id: int) -> list[Tensor]:
    found = []
    for name in "abc":
        with workers.on(name):
            mine = autograd.get_gradients(context_id)
            found += [mine[parameter] for parameter in LAYERS[name].parameters()]
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_the_norm_of_all_gradients_is_clipped_as_in_one_process(
    trio: Cluster, norm_type: float, max_norm: float
) -> None:
    local = Local()
    local.loss(1).backward()
    expected = nn.utils.clip_grad_norm_(local.parameters, max_norm, norm_type)
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1)])
        total = clip_grad_norm_(context_id, all_parameters(), max_norm, norm_type)
        torch.testing.assert_close(total, expected)
        for found, parameter in zip(gradients_everywhere(trio, context_id), local.parameters, strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_values_are_clipped_as_in_one_process(trio: Cluster) -> None:
    local = Local()
    local.loss(1).backward()
    nn.utils.clip_grad_value_(local.parameters, 0.003)
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1)])
        clip_grad_value_(context_id, all_parameters(), 0.003)
        for found, parameter in zip(gradients_everywhere(trio, context_id), local.parameters, strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_sparse_gradients_are_clipped_with_their_sums(trio: Cluster) -> None:
    rows = torch.tensor([3, 3, 1])
    reference = rpc.rpc_sync("b", table)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", look_up, (rows,)).sum()])
        total = clip_grad_norm_(context_id, [reference], 1.0)
        assert total.item() == pytest.approx(math.sqrt(3 * 4 + 3 * 1))
        clip_grad_value_(context_id, [reference], 0.3)
        with trio.on("b"):
            (found,) = autograd.get_gradients(context_id).values()
        dense = found.to_dense()
        assert dense[3].tolist() == [0.3] * 3
        torch.testing.assert_close(dense[1], torch.full((3,), 1 / math.sqrt(15), dtype=torch.float64))


def test_a_norm_that_is_not_finite(trio: Cluster) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1) * math.inf])
        with pytest.raises(UsageError, match=r"is (nan|inf): not clipped"):
            clip_grad_norm_(context_id, all_parameters(), 1.0, error_if_nonfinite=True)


# --- errors -------------------------------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> Any:
    raise ValueError(f"not on {current_worker().name}")


def refuse_on_b(parameters: Any, **options: Any) -> Any:
    if current_worker().name == "b":
        raise ValueError("not on b")
    return optim.SGD(parameters, **options)


def test_the_error_of_one_worker_keeps_its_type(trio: Cluster) -> None:
    with pytest.raises(ValueError, match="not on b"):
        DistributedOptimizer(refuse_on_b, all_parameters(), lr=0.1)


def test_the_errors_of_several_workers_come_as_one(trio: Cluster) -> None:
    with pytest.raises(
        WorkersFailedError, match=r"3 workers failed(.|\n)*not on a(.|\n)*not on b(.|\n)*not on c"
    ) as info:
        DistributedOptimizer(refuse, all_parameters())
    assert set(info.value.errors) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([torch.ones(2)], "parameter 0 is a Tensor, not an RRef"),
        (torch.ones(2), "takes a list of RRefs, or of groups, not a Tensor"),
        ([], "no parameters"),
        ([{"lr": 0.1}], 'group 0 is no dict with "params"'),
        ([{"params": [3]}], "parameter 0 is a int, not an RRef: group 0"),
    ],
)
def test_parameters_that_are_no_references(trio: Cluster, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedOptimizer(optim.SGD, given, lr=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            optim.SGD([torch.ones(2)], lr=0.1),
            r"an instance of SGD, but each owner makes an optimizer of its own: .* as in DistributedOptimizer\(SGD, ",
        ),
        (None, "takes an optimizer class, such as torch.optim.SGD, not a NoneType: None"),
        ("SGD", "takes an optimizer class, such as torch.optim.SGD, not a str: 'SGD'"),
    ],
    ids=["instance", "None", "str"],
)
def test_an_optimizer_that_is_no_class(trio: Cluster, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedOptimizer(given, all_parameters())


def test_a_reference_to_something_else(trio: Cluster) -> None:
    with pytest.raises(UsageError, match="refers to a list, not to a tensor"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", list)], lr=0.1)


def test_a_step_without_gradients_names_the_parameters(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    with autograd.context() as context_id:
        message = rf"no parameter has a gradient in context {context_id} \(parameters \[0, 1\] on 'a', \[2, 3\] on 'b'"
        with pytest.raises(UsageError, match=message):
            optimizer.step(context_id)
        with pytest.raises(UsageError, match="nothing to keep"):
            optimizer.accumulate(context_id)


def test_a_context_that_ended(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote_loss(1)])
    with pytest.raises(UsageError, match=f"context {context_id} has ended"):
        optimizer.step(context_id)
    with pytest.raises(UsageError, match=f"context {context_id} has ended"):
        clip_grad_norm_(context_id, rpc.rpc_sync("a", parameters), 1.0)


def test_what_makes_no_sense_says_so(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    with pytest.raises(UsageError, match="make a new one, with all groups"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(SerializationError, match="stays where it was made"):
        rpc.rpc_sync("b", type, (optimizer,))


def test_repr_shows_owners_and_settings(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    assert repr(optimizer).startswith("<DistributedOptimizer of 6 parameters (a: 2, b: 2, c: 2), [{'lr': 0.1,")


# --- without pickle -----------------------------------------------------------------------------------------------


@rpc.export
def exported_forward(tensor: Tensor) -> Tensor:
    return forward(tensor)


@rpc.export
def exported_parameters() -> list[rpc.RRef[Tensor]]:
    return parameters()


def test_torch_s_own_optimizers_need_no_pickle() -> None:
    with cluster("a", "b", "c", timeout=PATIENCE, allow_pickle=False) as workers, workers.on("a"):
        local = Local()
        expected = optim.Adam(local.parameters, lr=0.1)
        given = [rref for name in LAYERS for rref in rpc.rpc_sync(name, exported_parameters)]
        optimizer = DistributedOptimizer(optim.Adam, given, lr=0.1)
        for number in range(3):
            expected.zero_grad()
            local.loss(number).backward()
            nn.utils.clip_grad_norm_(local.parameters, 0.5)
            expected.step()
            with autograd.context() as context_id:
                tensor = forward(batch(number))
                for name in "bc":
                    tensor = rpc.rpc_sync(name, exported_forward, (tensor,))
                autograd.backward(context_id, [tensor.square().mean()])
                clip_grad_norm_(context_id, given, 0.5)
                optimizer.step(context_id)
        optimizer.load_state_dict(optimizer.state_dict())
        local.assert_same()
        del given, optimizer
        gc.collect()


def test_step_hooks(trio: Cluster) -> None:
    optimizer = DistributedOptimizer(optim.SGD, all_parameters(), lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step(optimizer, 1)
    assert seen == ["before", "after"]


def test_hooks_of_all_optimizers_fire_for_plain_sgd_too(trio: Cluster) -> None:
    fired: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=1.0)
    handle = register_optimizer_step_post_hook(lambda which, *_: fired.append(type(which).__name__))
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [weight.sum()])
            optimizer.step(context_id)
    finally:
        handle.remove()
    assert fired == ["SGD"]
    assert weight.tolist() == [0.0, 0.0]
    del optimizer
