"""A module on another worker computes, learns, saves and loads as it would here."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.nn import RemoteModule as TorchRemoteModule

from support import PATIENCE, assert_no_references
from telegrad import autograd, rpc
from telegrad._wire.messages import Call, Fetch, RemoteCall
from telegrad.errors import (
    NotInitializedError,
    RpcTimeoutError,
    SerializationError,
    TelegradError,
    UnknownWorkerError,
    UsageError,
    WorkerLostError,
)
from telegrad.nn import RemoteModule, remote_side
from telegrad.nn.placement import parse
from telegrad.nn.unsupported import INSTEAD
from telegrad.optim import DistributedOptimizer
from telegrad.testing import Cluster, Fault, cluster
from worker_processes import join, leave, worker_processes


class Block(nn.Module):
    """Parameters at two levels, a buffer, and something to tell training mode by; the same for the same arguments."""

    def __init__(self, inputs: int, outputs: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(inputs, outputs, dtype=torch.float64)
        self.scale = nn.Parameter(torch.empty(outputs, dtype=torch.float64))
        self.register_buffer("offset", torch.full((outputs,), float(seed), dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.scale + self.offset
        return y * power if self.training else -y


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eval()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise LookupError("no such file")


class Unhappy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("not today")


class Older(nn.Linear):
    """Knows the name that its weight had once."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Outer(nn.Module):
    """Has a part on yet another worker."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.first = Block(4, 5, seed=1)
        self.second = RemoteModule(on, Block, (5, 2), {"seed": 2})

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def batch(number: int = 0) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def call(remote: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return remote(*args, **kwargs)


def mode_of(module_rref: rpc.RRef[nn.Module]) -> bool:
    return module_rref.local_value().training


def values_of(module_rref: rpc.RRef[nn.Module]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module_rref.local_value().state_dict().items()}


def over_there(remote: RemoteModule) -> dict[str, Tensor]:
    return rpc.rpc_sync(remote.on, values_of, (remote.get_module_rref(),))


def gradients_there(module_rref: rpc.RRef[nn.Module], context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[parameter] for parameter in module_rref.local_value().parameters()]


# --- forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "worker"),
    [
        ("b/cpu", "b"),
        ("b", "b"),
        ("rank:2/cpu", "c"),
        ("rank:1", "b"),
        ("a", "a"),
        ("cpu", "a"),
        (torch.device("cpu"), "a"),
    ],
)
def test_it_computes_where_it_was_placed_what_it_would_compute_here(trio: Cluster, place: Any, worker: str) -> None:
    remote = RemoteModule(place, Block, (4, 3), {"seed": 7})
    assert (remote.on, remote.device, remote.get_module_rref().owner_name()) == (worker, "cpu", worker)
    local = Block(4, 3, seed=7)
    torch.testing.assert_close(remote(batch()), local(batch()))
    torch.testing.assert_close(remote.forward(batch(), power=3.0), local(batch(), 3.0))
    torch.testing.assert_close(remote(batch(), 3.0), local(batch(), 3.0))
    future = remote.forward_async(batch(), power=3.0)
    assert isinstance(future, torch.futures.Future)
    torch.testing.assert_close(future.wait(), local(batch(), 3.0))


def test_its_attributes_are_those_of_torch(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, [4, 3])
    assert isinstance(remote, nn.Module)
    assert remote.module_rref is remote.get_module_rref()
    assert (remote.is_scriptable, remote.is_device_map_set) == (False, False)
    missing = {name for name in dir(TorchRemoteModule) if not name.startswith("_")} - set(dir(RemoteModule))
    assert not missing
    for name in ("init_from_module_rref", "remote_parameters", "get_module_rref", "train", "eval", "load_state_dict"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (RemoteModule, TorchRemoteModule))
        assert [(each.name, each.default) for each in ours.parameters.values()] == [
            (each.name, each.default) for each in theirs.parameters.values()
        ]


class Requests(Fault):
    """No fault: it only notes the requests that pass."""

    def __post_init__(self) -> None:
        self.seen: list[Any] = []

    def matches(self, sender: int, receiver: int, message: Any) -> bool:
        if isinstance(message, Call | RemoteCall | Fetch):
            self.seen.append((sender, receiver, message))
        return False


def test_to_make_it_and_to_use_it_is_one_call_each(trio: Cluster) -> None:
    made = Requests("delay")
    trio.faults.add(made)
    remote = RemoteModule("b", Block, (4, 3))
    assert len(made.seen) == 1, made.seen
    state = Block(4, 3).state_dict()
    actions: dict[str, Callable[[], Any]] = {
        "forward": lambda: remote(batch()),
        "forward_async": lambda: remote.forward_async(batch()).wait(),
        "train": remote.train,
        "remote_parameters": remote.remote_parameters,
        "state_dict": remote.state_dict,
        "load_state_dict": lambda: remote.load_state_dict(state),
        "from a reference": lambda: RemoteModule.init_from_module_rref("b", remote.get_module_rref()),
    }
    for name, action in actions.items():
        made.seen.clear()
        action()
        assert len(made.seen) == 1, (name, made.seen)


def test_a_forward_counts_no_references() -> None:
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        remote = RemoteModule("b", Block, (4, 3))
        remote(batch())
        before = workers.faults.carried
        remote(batch())
        assert workers.faults.carried == before + 2  # the call and the answer
        del remote


def test_hooks_of_the_module_run_where_it_is(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    rpc.rpc_sync("b", double_its_output, (remote.get_module_rref(),))
    torch.testing.assert_close(remote(batch()), 2 * Block(4, 3)(batch()))


def double_its_output(module_rref: rpc.RRef[nn.Module]) -> None:
    module_rref.local_value().register_forward_hook(lambda module, args, output: output * 2)


def test_the_module_stays_while_a_call_is_on_its_way() -> None:
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        remote = RemoteModule("b", Block, (4, 3))
        fault = workers.fault("delay", Call, sender="a", receiver="b", seconds=0.2)
        future = remote.forward_async(batch())
        del remote
        gc.collect()
        torch.testing.assert_close(future.wait(), Block(4, 3)(batch()))
        assert fault.hits == 1
        del future
        assert_no_references(workers)


def test_on_another_device_tensors_go_there_first(trio: Cluster) -> None:
    remote = RemoteModule("b/meta", Block, (4, 3))
    assert repr(remote) == "RemoteModule(Block on 'b/meta')"
    found = remote(batch())
    assert (found.device.type, found.shape) == ("meta", (8, 3))


def test_tensors_in_containers_go_to_the_device_and_come_back(trio: Cluster) -> None:
    remote = RemoteModule("b", Swap)
    number = tuple(remote.get_module_rref()._rref_id)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    with autograd.context() as context_id:
        found = rpc.rpc_sync("b", remote_side.forward_on, (number, "cpu", 0, {"x": [x]}), {"y": (y, "z")})
        assert found["x"][1:] == ["z"]
        autograd.backward(context_id, [found["y"][0].sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [1.0, 1.0]
    on_meta = rpc.rpc_sync("b", remote_side.forward_on, (number, "meta", 0, {"x": [x]}), {"y": (y, "z")})
    assert on_meta["y"][0].is_meta
    assert on_meta["x"][0].is_meta


class Swap(nn.Module):
    def forward(self, first: dict[str, list[Any]], y: tuple[Any, ...]) -> dict[str, list[Any]]:
        return {"y": first["x"], "x": list(y)}


def test_whether_a_device_map_is_set(trio: Cluster) -> None:
    route = trio["a"].agent.peer("b").route
    before = route.device_for
    try:
        route.device_for = {torch.device("cuda:0"): "cuda:1"}.__getitem__
        assert RemoteModule("b", Block, (4, 3)).is_device_map_set
    finally:
        route.device_for = before
    assert not RemoteModule("b", Block, (4, 3)).is_device_map_set


# --- gradients and steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["b", "a"])
def test_gradients_are_those_of_a_local_module(trio: Cluster, place: str) -> None:
    local, expected = Block(4, 3), batch().requires_grad_()
    local(expected).square().sum().backward()
    remote, x = RemoteModule(place, Block, (4, 3)), batch().requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote(x).square().sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected.grad)
        found = rpc.rpc_sync(remote.on, gradients_there, (remote.get_module_rref(), context_id))
    torch.testing.assert_close(found, [parameter.grad for parameter in local.parameters()])


def chain(*places: str) -> nn.Sequential:
    sizes = [4, 5, 6, 5, 1]
    return nn.Sequential(
        *(
            RemoteModule(place, Block, (sizes[i], sizes[i + 1]), {"seed": i})
            if place
            else Block(sizes[i], sizes[i + 1], seed=i)
            for i, place in enumerate(places)
        )
    )


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_a_chain_over_workers_learns_what_one_process_learns(trio: Cluster, kind: Any) -> None:
    local, mixed = chain("", "", "", ""), chain("b", "", "c/cpu", "a")
    expected = kind(local.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(kind, references_of(mixed), lr=0.05)
    for number in range(5):
        expected.zero_grad()
        local(batch(number)).square().mean().backward()
        expected.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [mixed(batch(number)).square().mean()])
            optimizer.step(context_id)
    torch.testing.assert_close(mixed.state_dict(), local.state_dict())


def references_of(mixed: nn.Sequential) -> list[rpc.RRef[Tensor]]:
    found: list[rpc.RRef[Tensor]] = []
    for part in mixed:
        mine = part.remote_parameters() if isinstance(part, RemoteModule) else map(rpc.RRef, part.parameters())
        found += mine
    return found


def test_several_at_once(trio: Cluster) -> None:
    remotes = [RemoteModule(name, Block, (4, 1), {"seed": seed}) for seed, name in enumerate("bcb")]
    x, expected = batch().requires_grad_(), batch().requires_grad_()
    sum(Block(4, 1, seed)(expected).sum() for seed in range(3)).backward()
    with autograd.context() as context_id:
        futures = [remote.forward_async(x) for remote in remotes]
        autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected.grad)


def test_remote_parameters_refer_to_the_parameters_themselves(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3), {"seed": 7})
    for recurse, count in ((True, 3), (False, 1)):
        references = remote.remote_parameters(recurse)
        assert [reference.owner_name() for reference in references] == ["b"] * count
        expected = list(Block(4, 3, seed=7).parameters(recurse))
        torch.testing.assert_close([reference.to_here() for reference in references], expected)
    rpc.rpc_sync("b", zero, (remote.remote_parameters(recurse=False)[0],))
    assert not over_there(remote)["scale"].any()


def zero(parameter: rpc.RRef[Tensor]) -> None:
    assert isinstance(parameter.local_value(), nn.Parameter)
    parameter.local_value().data.zero_()


def test_a_remote_module_inside_a_remote_module(trio: Cluster) -> None:
    remote = RemoteModule("b", Outer, ("c",))
    local = nn.Sequential(Block(4, 5, seed=1), Block(5, 2, seed=2))
    x, expected = batch().requires_grad_(), batch().requires_grad_()
    local(expected).sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote(x).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected.grad)
    assert len(remote.remote_parameters()) == 3  # the others are not on b
    state = {key.replace("first", "0").replace("second", "1"): value for key, value in remote.state_dict().items()}
    torch.testing.assert_close(state, dict(local.state_dict()))
    torch.testing.assert_close(remote.eval()(x), local.eval()(x))


# --- training mode ------------------------------------------------------------------------------------------------


def test_train_and_eval_are_set_over_there(trio: Cluster) -> None:
    remote, local = RemoteModule("b", Block, (4, 3)), Block(4, 3)
    assert remote.training
    for change in (lambda module: module.eval(), lambda module: module.train(), lambda module: module.train(False)):
        assert change(remote) is remote
        change(local)
        assert remote.training == local.training == rpc.rpc_sync("b", mode_of, (remote.get_module_rref(),))
        torch.testing.assert_close(remote(batch()), local(batch()))
    with pytest.raises(UsageError, match="train takes True or False, not 'yes'"):
        remote.train("yes")  # type: ignore[arg-type]


def test_a_module_that_begins_in_eval_mode(trio: Cluster) -> None:
    remote = RemoteModule("b", Frozen)
    assert not remote.training
    assert not RemoteModule.init_from_module_rref("b", remote.get_module_rref()).training
    assert not rpc.rpc_sync("c", is_training, (remote,))


def is_training(module: nn.Module) -> bool:
    return module.training


# --- its state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["b", "a"])
def test_its_state_is_a_copy_of_what_a_local_module_has(trio: Cluster, place: str) -> None:
    remote, local = RemoteModule(place, Block, (4, 3), {"seed": 7}), Block(4, 3, seed=7)
    state = remote.state_dict()
    assert list(state) == list(local.state_dict())
    assert state._metadata == local.state_dict()._metadata
    torch.testing.assert_close(state, local.state_dict())
    for value in state.values():
        value.zero_()
    torch.testing.assert_close(over_there(remote), dict(local.state_dict()))


def test_a_state_that_is_loaded_is_set_over_there(trio: Cluster) -> None:
    remote, other = RemoteModule("b", Block, (4, 3)), Block(4, 3, seed=9)
    references = remote.remote_parameters()
    outcome = remote.load_state_dict(other.state_dict())
    assert str(outcome) == "<All keys matched successfully>"
    torch.testing.assert_close(over_there(remote), dict(other.state_dict()))
    torch.testing.assert_close([reference.to_here() for reference in references], list(other.parameters()))


def test_a_part_of_a_state(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    before = over_there(remote)
    outcome = remote.load_state_dict({"scale": torch.ones(3), "gone": torch.ones(1)}, strict=False)
    assert outcome.missing_keys == ["offset", "linear.weight", "linear.bias"]
    assert outcome.unexpected_keys == ["gone"]
    torch.testing.assert_close(over_there(remote), {**before, "scale": torch.ones(3, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("change", "strict", "named"),
    [
        (lambda state: state.pop("linear.bias"), True, r'Missing key\(s\) in state_dict: "linear.bias"'),
        (lambda state: state.update(gone=torch.ones(1)), True, r'Unexpected key\(s\) in state_dict: "gone"'),
        (lambda state: state.update(offset=torch.ones(7)), True, "size mismatch for offset"),
        (lambda state: state.update(offset=torch.ones(7)), False, "size mismatch for offset"),
    ],
    ids=["missing", "unexpected", "another shape", "another shape, not strict"],
)
def test_a_state_that_does_not_fit_names_the_keys_and_changes_nothing(
    trio: Cluster, change: Callable[[Any], Any], strict: bool, named: str
) -> None:
    remote, state = RemoteModule("b", Block, (4, 3)), Block(4, 3, seed=9).state_dict()
    before = over_there(remote)
    change(state)
    with pytest.raises(UsageError, match=rf"nothing was changed on worker 'b'(.|\n)*{named}"):
        remote.load_state_dict(state, strict)
    torch.testing.assert_close(over_there(remote), before)


class Choosy(nn.Module):
    """Takes no state, in one way or another, but only when its first part has taken its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second: nn.Module = {"load": Loading, "extra state": Extra}.get(way, nn.ReLU)()
        if way == "pre-hook":
            self.second.register_load_state_dict_pre_hook(refuse)
        elif way == "post-hook":
            self.register_load_state_dict_post_hook(refuse)


def refuse(*_: Any) -> None:
    raise LookupError("not this one")


class Loading(nn.Module):
    def _load_from_state_dict(self, *args: Any) -> None:
        refuse()


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return 5

    def set_extra_state(self, state: Any) -> None:
        refuse()


@pytest.mark.parametrize("way", ["pre-hook", "post-hook", "load", "extra state"])
def test_a_module_that_raises_when_it_loads_is_as_it_was(trio: Cluster, way: str) -> None:
    remote = RemoteModule("b", Choosy, (way,))
    before = remote.state_dict()
    state = {name: value + 1 if isinstance(value, Tensor) else value for name, value in before.items()}
    with pytest.raises(LookupError, match="not this one"):
        remote.load_state_dict(state)
    torch.testing.assert_close(dict(remote.state_dict()), dict(before))


def test_a_state_is_taken_between_two_steps(trio: Cluster) -> None:
    remote, module = RemoteModule("b", nn.Linear, (2, 2)), nn.Linear(2, 2)
    before = over_there(remote)
    with trio["b"].autograd.swapping:  # as in a step of an optimizer
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("b", remote_side.get_state, (remote.get_module_rref(),), timeout=0.1)
    torch.testing.assert_close(dict(remote.state_dict()), before)
    with trio.on("b"):
        taken, _ = remote_side.get_state(rpc.RRef(module))
        kept = copy.deepcopy(taken)
        nn.init.zeros_(module.weight)
        torch.testing.assert_close(taken, kept)


def test_the_state_of_a_module_with_a_remote_part_on_the_same_worker(trio: Cluster) -> None:
    remote = RemoteModule("b", Outer, ("b",))
    state = remote.state_dict()
    remote.load_state_dict({name: value + 1 for name, value in state.items()})
    torch.testing.assert_close(dict(remote.state_dict()), {name: value + 1 for name, value in state.items()})


def test_a_module_may_know_older_names(trio: Cluster) -> None:
    remote = RemoteModule("b", Older, (2, 2))
    remote.load_state_dict({"kernel": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert over_there(remote)["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Versioned(nn.Module):
    _version = 3
    loaded: list[Any] = []  # noqa: RUF012

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.loaded.append(metadata.get("version"))


def test_the_versions_of_a_state_go_along(trio: Cluster) -> None:
    Versioned.loaded.clear()
    remote = RemoteModule("b", nn.Sequential, (Versioned(),))
    state = remote.state_dict()
    assert state._metadata == {"": {"version": 1}, "0": {"version": 3}}
    remote.load_state_dict(state)
    state._metadata["0"]["version"] = 2
    remote.load_state_dict(state)
    remote.load_state_dict({})
    parent = nn.Sequential(remote)
    assert parent.state_dict()._metadata == nn.Sequential(nn.Sequential(Versioned())).state_dict()._metadata
    parent.load_state_dict(parent.state_dict())
    assert Versioned.loaded == [3, 2, None, 3]


def test_parameters_as_a_state_have_no_history_over_there(trio: Cluster) -> None:
    remote, other = RemoteModule("b", Block, (4, 3)), Block(4, 3, seed=9)
    with autograd.context():
        remote.load_state_dict(other.state_dict(keep_vars=True))
        assert autograd.debug_info()["sends"] == 0
    torch.testing.assert_close(over_there(remote), dict(other.state_dict()))


def test_what_no_state_is(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    with pytest.raises(TypeError, match=r"takes what state_dict\(\) gave, not a list"):
        remote.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="assign=True would replace the parameters"):
        remote.load_state_dict(remote.state_dict(), assign=True)


# --- as a part of a local module ----------------------------------------------------------------------------------


def test_a_parent_has_its_own_parameters_only(trio: Cluster) -> None:
    parent = chain("b", "")
    local, remote = parent[1], parent[0]
    assert list(parent.parameters()) == list(local.parameters())
    assert [name for name, _ in parent.named_parameters()] == ["1.scale", "1.linear.weight", "1.linear.bias"]
    assert [name for name, _ in parent.named_buffers()] == ["1.offset"]
    assert [name for name, _ in parent.named_modules()] == ["", "0", "1", "1.linear"]
    assert list(parent.modules()) == [parent, remote, local, local.linear]
    assert list(parent.children()) == [remote, local]
    assert parent.get_submodule("0") is remote
    # So does DDP go through them.
    assert [name for each in parent.modules() for name, _ in each.named_parameters(recurse=False)] == [
        "scale", "weight", "bias",
    ]  # fmt: skip


def test_a_parent_reaches_the_mode_but_not_the_values(trio: Cluster) -> None:
    parent, local = chain("b", ""), chain("", "")
    for module in (parent, local):
        module.eval()
    torch.testing.assert_close(parent(batch()), local(batch()))
    assert parent.train()[0].training
    assert rpc.rpc_sync("b", mode_of, (parent[0].get_module_rref(),))
    before = over_there(parent[0])
    parent.float().requires_grad_(False).zero_grad()
    assert {parameter.dtype for parameter in parent.parameters()} == {torch.float32}
    torch.testing.assert_close(over_there(parent[0]), before)
    with pytest.raises(UsageError, match=r"no apply\(\)"):
        parent.apply(print)


def test_the_state_of_a_parent_is_that_of_a_local_model_and_goes_both_ways(trio: Cluster) -> None:
    parent, local = chain("b", "", "c"), chain("", "", "")
    state = copy.deepcopy(parent.state_dict())  # the local part of it is no copy
    assert list(state) == list(local.state_dict())
    assert state._metadata == local.state_dict()._metadata
    torch.testing.assert_close(state, local.state_dict())
    for parameter in local.parameters():
        parameter.data.add_(1)
    assert str(parent.load_state_dict(local.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(parent.state_dict(), local.state_dict())
    local.load_state_dict(state)
    torch.testing.assert_close(local(batch()), chain("", "", "")(batch()))


def test_the_state_of_a_parent_that_does_not_fit(trio: Cluster) -> None:
    parent = chain("b", "")
    remote, before = parent[0], over_there(parent[0])
    state = chain("", "").state_dict()
    del state["0.scale"], state["1.scale"]
    state["0.gone"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.scale", "1.scale"(.|\n)*"0.gone"'):
        parent.load_state_dict(state)
    outcome = parent.load_state_dict(state, strict=False)
    assert outcome.missing_keys == ["0.scale", "1.scale"]
    assert outcome.unexpected_keys == ["0.gone"]
    state["0.offset"] = torch.ones(7)
    state["0.linear.bias"] = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"0: nothing was changed on worker 'b'(.|\n)*size mismatch for offset"):
        parent.load_state_dict(state, strict=False)
    torch.testing.assert_close(over_there(remote), before)


# --- sent to other workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["b", "c", "a"])
def test_it_can_be_sent_and_is_the_same_module_there(trio: Cluster, to: str) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    remote.mine = 1
    torch.testing.assert_close(rpc.rpc_sync(to, call, (remote, batch())), Block(4, 3)(batch()))
    torch.testing.assert_close(rpc.rpc_sync(to, call, (nn.Sequential(remote), batch())), Block(4, 3)(batch()))
    assert rpc.rpc_sync(to, attributes, (remote,)) == ("b", "cpu", False, False, True, False)
    rpc.rpc_sync(to, nn.Module.eval, (remote,))
    torch.testing.assert_close(remote(batch()), Block(4, 3).eval()(batch()))


def attributes(remote: RemoteModule) -> tuple[Any, ...]:
    found = (remote.on, remote.device, remote.is_device_map_set, remote.is_scriptable, remote.training)
    return (*found, hasattr(remote, "mine"))


def test_one_that_comes_back_from_a_call(trio: Cluster) -> None:
    remote = rpc.rpc_sync("c", RemoteModule, ("b", Block, (4, 3)))
    assert type(remote) is RemoteModule
    torch.testing.assert_close(remote(batch()), Block(4, 3)(batch()))


@pytest.mark.parametrize("write", [pickle.dumps, lambda remote: torch.save(remote, io.BytesIO())])
def test_it_cannot_be_pickled_outside_a_call(trio: Cluster, write: Callable[[Any], Any]) -> None:
    with pytest.raises(SerializationError, match=r"a RemoteModule is sent inside a call(.|\n)*save its state_dict"):
        write(nn.Sequential(RemoteModule("b", Block, (4, 3))))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_it_cannot_be_copied(trio: Cluster, make: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match=r"second handle on the same module: RemoteModule.init_from_module_rref"):
        make(RemoteModule("b", Block, (4, 3)))


def test_a_second_handle_on_the_same_module(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    second = RemoteModule.init_from_module_rref("b/cpu", remote.get_module_rref())
    assert repr(second) == repr(remote)
    second.eval()
    torch.testing.assert_close(remote(batch()), Block(4, 3).eval()(batch()))
    third = rpc.rpc_sync("c", RemoteModule.init_from_module_rref, ("c", remote.get_module_rref()))
    assert third.on == "b"  # whatever was named, as in torch
    torch.testing.assert_close(third(batch()), Block(4, 3).eval()(batch()))


def test_a_handle_on_no_module(trio: Cluster) -> None:
    with pytest.raises(UsageError, match=r"refers to a list, not to a torch.nn.Module(.|\n)*worker 'b'"):
        RemoteModule.init_from_module_rref("b", rpc.remote("b", list))
    with pytest.raises(UsageError, match="must be an RRef to a module, not a Block"):
        RemoteModule.init_from_module_rref("b", Block(4, 3))  # type: ignore[arg-type]
    with pytest.raises(UnknownWorkerError, match="no worker 'z'"):
        RemoteModule.init_from_module_rref("z", rpc.remote("b", Block, (4, 3)))


# --- what makes no sense ------------------------------------------------------------------------------------------

#: What torch refuses too.
REFUSED = """
    register_buffer register_parameter add_module apply cuda ipu xpu cpu type float double half bfloat16 to
    register_backward_hook register_forward_pre_hook register_forward_hook parameters named_parameters buffers
    named_buffers children named_children modules named_modules requires_grad_ zero_grad share_memory extra_repr
""".split()


@pytest.mark.parametrize("name", [*REFUSED, *sorted(INSTEAD.keys() - {*REFUSED, "__copy__", "__deepcopy__"})])
def test_a_method_that_makes_no_sense_says_what_to_do(trio: Cluster, name: str) -> None:
    with pytest.raises(UsageError, match=rf"a RemoteModule has no {name}\(\): .*('b'|'b/\.\.\.'|context)"):
        getattr(RemoteModule("b", Block, (4, 3)), name)()


@pytest.mark.parametrize(
    ("value", "name"),
    [(nn.Parameter(torch.ones(1)), "register_parameter"), (nn.Linear(1, 1), "add_module")],
    ids=["parameter", "module"],
)
def test_nothing_is_put_into_it_from_here(trio: Cluster, value: Any, name: str) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    with pytest.raises(UsageError, match=rf"no {name}\(\): .*are made on worker 'b'"):
        remote.more = value


def test_an_attribute_of_the_module_says_where_it_is(trio: Cluster) -> None:
    remote = RemoteModule("b", Block, (4, 3))
    message = r"no 'scale': the Block itself is on worker 'b'.*get_module_rref\(\).rpc_sync\(\).*remote_parameters\(\)"
    with pytest.raises(AttributeError, match=message):
        _ = remote.scale
    assert not hasattr(remote, "linear")
    assert remote.get_module_rref().rpc_sync().get_buffer("offset").shape == (3,)


def test_repr_shows_class_worker_and_device(trio: Cluster) -> None:
    assert repr(chain("b", "")).startswith("Sequential(\n  (0): RemoteModule(Block on 'b/cpu')\n  (1): Block(")


# --- bad input ----------------------------------------------------------------------------------------------------


def make_block() -> nn.Module:
    return Block(4, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((make_block,), "derived from torch.nn.Module, not the function make_block"),
        ((Block(4, 3),), "derived from torch.nn.Module, not a Block; its arguments go into args"),
        ((dict,), "derived from torch.nn.Module, not the class dict"),
        ((Block, 4), "args must be a tuple of the constructor's arguments, not int"),
        ((Block, (), (4, 3)), "kwargs must be a dict of the constructor's arguments, not tuple"),
        ((Block, (4, 3), {}, Block), "cannot be scripted"),
    ],
)
def test_what_is_no_module_class_is_refused_before_any_call(trio: Cluster, arguments: Any, message: str) -> None:
    before = trio["a"].agent.calls.started
    with pytest.raises(UsageError, match=message):
        RemoteModule("b", *arguments)
    assert trio["a"].agent.calls.started == before


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        ("z/cpu", UnknownWorkerError, "no worker 'z' in this job; it has a, b, c"),
        ("cuda0", UnknownWorkerError, "no worker 'cuda0' in this job"),
        ("rank:9", UnknownWorkerError, "no worker 9 in this job"),
        ("rank:b", UnknownWorkerError, "no worker 'rank:b' in this job"),
        ("b/banana", UsageError, "remote_device 'b/banana' is not .*banana"),
        ("b/", UsageError, "remote_device 'b/' is not .*must not be empty"),
        ("b/cuda:0/cuda:1", UsageError, "remote_device 'b/cuda:0/cuda:1' is not"),
        ("/cpu", UsageError, "'/cpu' names no worker"),
        ("", UsageError, "'' names no worker"),
        (3, TypeError, 'must be a text such as "worker1/cpu", not 3'),
    ],
)
def test_a_place_that_is_none(trio: Cluster, place: Any, kind: type[Exception], message: str) -> None:
    before = trio["a"].agent.calls.started
    with pytest.raises(kind, match=message):
        RemoteModule(place, Block, (4, 3))
    assert trio["a"].agent.calls.started == before


def test_names_of_workers_may_have_colons() -> None:
    assert parse("ps:0/cuda:1") == ("ps:0", torch.device("cuda:1"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("module", [(Block, (4, 3)), (nn.ReLU,)], ids=["Block", "ReLU"])
def test_a_device_that_is_not_there(trio: Cluster, module: Any) -> None:
    with pytest.raises(UsageError, match=r"worker 'b' has no device 'cuda:0': .*CUDA"):
        RemoteModule("b/cuda:0", *module)


def test_the_errors_of_the_module_come_out_with_the_worker(trio: Cluster) -> None:
    with pytest.raises(LookupError, match=r"no such file(.|\n)*raised on worker 'b'"):
        RemoteModule("b", Broken)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument(.|\n)*raised on worker 'b'"):
        RemoteModule("b", Block, (4,))
    with pytest.raises(LookupError, match=r"not today(.|\n)*raised on worker 'b'"):
        RemoteModule("b", Unhappy)(batch())


def test_without_rpc() -> None:
    with pytest.raises(NotInitializedError, match="call init_rpc first"):
        RemoteModule("b", Block, (4, 3))


def test_when_its_worker_is_lost() -> None:
    with cluster("a", "b", graceful=False, timeout=PATIENCE) as workers, workers.on("a"):
        remote = RemoteModule("b", Block, (4, 3))
        workers.kill("b")
        for action in (
            lambda: remote(batch()),
            lambda: remote.forward_async(batch()).wait(),
            lambda: remote.remote_parameters(),
            lambda: remote.train(),
            lambda: remote.state_dict(),
            lambda: nn.Sequential(remote).load_state_dict({}),
            lambda: RemoteModule("b", Block, (4, 3)),
        ):
            with pytest.raises(WorkerLostError, match="'b'"):
                action()


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_handle_of_a_job_that_has_ended() -> None:
    """The next job has another module under the same number."""
    with cluster("a", "b", "other", timeout=PATIENCE) as before, before.on("a"):
        old, elsewhere = RemoteModule("b", Block, (4, 3)), RemoteModule("other", Plus)
        on_meta = RemoteModule("b/meta", Plus)
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        new = RemoteModule("b", Plus)
        assert repr(new.get_module_rref()._rref_id) == repr(old.get_module_rref()._rref_id)
        for use in (
            lambda: old(batch()),
            lambda: old.forward_async(batch()),
            lambda: on_meta(batch()),
            lambda: elsewhere(batch()),
            lambda: elsewhere.train(),
            lambda: old.remote_parameters(),
            lambda: old.eval(),
            lambda: old.state_dict(),
            lambda: old.load_state_dict({}),
            lambda: rpc.rpc_sync("b", call, (old, batch())),
            lambda: RemoteModule.init_from_module_rref("b", old.get_module_rref()),
            lambda: old.get_module_rref().rpc_sync().eval(),
        ):
            with pytest.raises(NotInitializedError, match="belongs to a job that has ended"):
                use()
        torch.testing.assert_close(new(batch()), batch() + 1)
        del new
        assert_no_references(workers)


# --- in processes of their own ------------------------------------------------------------------------------------


def learn(places: list[str], steps: int) -> dict[str, list[Any]]:
    """Runs in a process of the job."""
    mixed = chain(*places)
    optimizer = DistributedOptimizer(optim.SGD, references_of(mixed), lr=0.1)
    for number in range(steps):
        with autograd.context() as context_id:
            autograd.backward(context_id, [mixed(batch(number)).square().mean()])
            optimizer.step(context_id)
    return {name: value.tolist() for name, value in mixed.state_dict().items()}


REMOTE: list[RemoteModule] = []


def prepare(place: str) -> list[list[float]]:
    REMOTE.append(RemoteModule(place, Block, (4, 3)))
    result: list[list[float]] = REMOTE[0](batch()).tolist()
    return result


def use() -> str:
    try:
        REMOTE.pop()(batch())
    except TelegradError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_processes_learn_what_one_learns_and_a_dead_one_is_named() -> None:
    local = chain("", "", "", "")
    optimizer = optim.SGD(local.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        local(batch(number)).square().mean().backward()
        optimizer.step()
    with worker_processes(2) as cast:
        join(cast)
        found = cast[0].run(learn, ["worker1", "", "worker0", "rank:1"], 3)
        torch.testing.assert_close(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()},
            dict(local.state_dict()),
        )
        torch.testing.assert_close(
            torch.tensor(cast[0].run(prepare, "worker1"), dtype=torch.float64), Block(4, 3)(batch()).detach()
        )
        cast[1].kill()
        cast[1].wait_dead()
        assert "WorkerLostError: worker 'worker1'" in cast[0].run(use)
        leave(cast[:1])
