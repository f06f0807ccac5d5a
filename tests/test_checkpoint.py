"""What was saved comes back, on any placement, or not at all; and whatever ends a save, the one before it stays."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from safetensors import safe_open
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import worker_processes
from support import PATIENCE, Gate, eventually, in_thread
from telegrad import autograd, checkpoint, rpc
from telegrad._current import current_worker
from telegrad.checkpoint import CheckpointError, fanout, json_state, tensors
from telegrad.checkpoint.files import Directory
from telegrad.errors import NotInitializedError, RpcTimeoutError, UsageError, WorkerLostError
from telegrad.nn import RemoteModule, remote_side
from telegrad.optim import DistributedOptimizer
from telegrad.testing import Cluster, cluster

# --- a model on many workers --------------------------------------------------------------------------------------


def make_layer(number: int) -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    generator = torch.Generator().manual_seed(number)  # its own: the workers are threads here
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer


def parameters_of(layer: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(parameter) for parameter in layer.local_value().parameters()]


def forward(layer: rpc.RRef[nn.Module], tensor: Tensor) -> Tensor:
    return layer.local_value()(tensor)


def state_of(layer: rpc.RRef[nn.Module]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in layer.local_value().state_dict().items()}


class Model:
    """Three layers, the first on the worker that the first letter names, and so on."""

    def __init__(self, places: str, kind: Any = optim.Adam, **options: Any) -> None:
        self.layers = [rpc.remote(place, make_layer, (number,)) for number, place in enumerate(places)]
        parameters = [
            rref for layer in self.layers for rref in rpc.rpc_sync(layer.owner_name(), parameters_of, (layer,))
        ]
        groups = [{"params": parameters[:5]}, {"params": parameters[5:], "weight_decay": 0.01}]
        self.optimizer = DistributedOptimizer(kind, groups, **{"lr": 0.05, **options})
        self.schedule = lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    @property
    def things(self) -> dict[str, Any]:
        layers = {f"layer{number}": layer for number, layer in enumerate(self.layers)}
        return {**layers, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            tensor = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            with autograd.context() as context_id:
                for layer in self.layers:
                    tensor = rpc.rpc_sync(layer.owner_name(), forward, (layer, tensor))
                autograd.backward(context_id, [tensor.square().mean()])
                self.optimizer.step(context_id)
            self.schedule.step()

    def state(self) -> list[Any]:
        layers = [rpc.rpc_sync(layer.owner_name(), state_of, (layer,)) for layer in self.layers]
        return [*layers, self.optimizer.state_dict(), self.schedule.state_dict()]


def assert_same(found: Any, expected: Any) -> None:
    """Bit by bit, and type by type."""
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bits(found) == bits(expected)
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert_same(list(found), list(expected))
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def bits(tensor: Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {"amsgrad": True}),
    "RMSprop": (optim.RMSprop, {"centered": True}),
}


# --- training goes on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", ["ppp", "qqr", "rqp"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_elsewhere_as_if_nothing_had_happened(
    trio: Cluster, tmp_path: Path, kind: str, places: str
) -> None:
    make, options = KINDS[kind]
    model = Model("abc", make, **options)
    model.train(range(3))
    assert checkpoint.save(tmp_path, model.things, step=3, metadata={"seen": 24}) == 3
    model.train(range(3, 6))
    expected = model.state()
    with cluster("p", "q", "r", timeout=PATIENCE) as others, others.on("p"):
        new = Model(places, make, **options)
        new.train(range(1))  # so that there is something to overwrite
        assert checkpoint.load(tmp_path, new.things) == (3, {"seen": 24})
        new.train(range(3, 6))
        assert_same(new.state(), expected)


def test_a_share_of_the_state_is_written_by_each_owner_and_never_comes_to_the_driver(
    trio: Cluster, tmp_path: Path
) -> None:
    model = Model("bbc")
    model.train(range(2))
    checkpoint.save(tmp_path, model.things)
    assert sorted(os.listdir(tmp_path / "step-000000")) == [
        "layer0.b.safetensors",
        "layer1.b.safetensors",
        "layer2.c.safetensors",
        "manifest.json",
        "optimizer.b.safetensors",
        "optimizer.c.safetensors",
    ]
    with safe_open(tmp_path / "step-000000" / "optimizer.c.safetensors", framework="pt") as file:
        assert set(file.keys()) == {
            f"state.{number}.{what}" for number in (8, 9, 10, 11) for what in ("step", "exp_avg", "exp_avg_sq")
        }


def test_what_was_saved_is_read_without_workers_in_the_form_of_one_process(trio: Cluster, tmp_path: Path) -> None:
    model = Model("abc")
    model.train(range(2))
    checkpoint.save(tmp_path, model.things)
    names = ["layer0", "layer1", "layer2", "optimizer", "schedule"]
    assert_same(in_thread(lambda: [checkpoint.read(tmp_path, name) for name in names])(), model.state())


def test_an_optimizer_goes_to_one_process_and_back(trio: Cluster, tmp_path: Path) -> None:
    model = Model("abc")
    model.train(range(2))
    checkpoint.save(tmp_path / "many", {"optimizer": model.optimizer})
    local = [parameter for number in range(3) for parameter in make_layer(number).parameters()]
    one = optim.Adam([{"params": local[:5]}, {"params": local[5:]}])
    checkpoint.load(tmp_path / "many", {"optimizer": one})
    assert_same(one.state_dict(), model.optimizer.state_dict())
    checkpoint.save(tmp_path / "one", {"optimizer": one})
    again = Model("cab")
    checkpoint.load(tmp_path / "one", {"optimizer": again.optimizer})
    assert_same(again.optimizer.state_dict(), model.optimizer.state_dict())


def test_a_learning_rate_that_is_a_tensor(trio: Cluster, tmp_path: Path) -> None:
    model, new = (Model(places, lr=torch.tensor(rate), foreach=False) for places, rate in (("abc", 0.05), ("cba", 9.0)))
    model.train(range(1))
    checkpoint.save(tmp_path, model.things)
    checkpoint.load(tmp_path, new.things)
    for each in (model, new):
        each.train(range(1, 2))
    assert_same(new.state(), model.state())


def test_what_is_set_after_loading_counts_on_the_owners(trio: Cluster, tmp_path: Path) -> None:
    model = Model("abc", optim.SGD)
    checkpoint.save(tmp_path, model.things)
    model.optimizer.param_groups[0]["lr"] = 3.0
    model.train(range(1))
    checkpoint.load(tmp_path, model.things)
    assert model.optimizer.param_groups[0]["lr"] == 0.05
    again = Model("abc", optim.SGD)
    for each in (model, again):
        each.optimizer.param_groups[1]["lr"] = 0.2
        each.train(range(1))
    assert_same(model.state(), again.state())


# --- things -----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.other.weight = self.one.weight


def test_a_tied_tensor_is_stored_once(trio: Cluster, tmp_path: Path) -> None:
    saved, target, untied = Tied(), Tied(), Tied(tied=False)
    checkpoint.save(tmp_path, {"model": rpc.RRef(saved)})
    with safe_open(tmp_path / "step-000000" / "model.a.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"one.weight", "one.bias", "other.bias"}
    for each in (target, untied):
        checkpoint.load(tmp_path, {"model": each})
        assert_same(each.state_dict(), saved.state_dict())
    assert target.one.weight is target.other.weight


def test_a_tie_that_the_checkpoint_does_not_have(trio: Cluster, tmp_path: Path) -> None:
    untied, target = Tied(tied=False), Tied()
    checkpoint.save(tmp_path, {"model": untied})
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"model\.one\.weight and model\.other\.weight are one tensor here"):
        checkpoint.load(tmp_path, {"model": target})
    assert_same(dict(target.state_dict()), before)
    untied.other.weight.data.copy_(untied.one.weight.data)
    checkpoint.save(tmp_path, {"model": untied})
    checkpoint.load(tmp_path, {"model": target})
    assert_same(target.state_dict(), untied.state_dict())


class Bag:
    """Any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


BASE = torch.arange(24.0)
COMPLEX = torch.tensor([1 + 2j, 3j])
STATES: dict[str, Any] = {
    "dtypes": {
        str(dtype): torch.tensor([0, 1, 3]).to(dtype)
        for dtype in [
            *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64],
            *[torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
            *[torch.float8_e4m3fn, torch.float8_e5m2],
        ]
    },
    "shapes": {"empty": torch.empty(0, 3), "another": torch.empty(0, 3), "scalar": torch.tensor(3), "one": BASE[:1]},
    "views": {"whole": BASE, "part": BASE[3:9], "columns": BASE.view(4, 6)[:, 1::2], "t": BASE.view(4, 6).t()},
    "expanded": {"x": torch.tensor([1.0, 2.0]).expand(3, 2)},
    "conjugate": {"x": torch.tensor([1 + 2j, 3j]).conj(), "y": torch.tensor([1 + 2j, 3j]).conj().imag},
    "conjugate views": {"x": COMPLEX, "conj": COMPLEX.conj(), "imag": COMPLEX.imag, "neg": COMPLEX.conj().imag},
    "values": {"nan": torch.tensor([math.nan, -math.nan, math.inf, -0.0])},
    "requires grad": {"x": nn.Parameter(torch.ones(2)).detach()},
    "plain": {
        "none": None,
        "flags": [True, False],
        "numbers": [0, -1, 1 << 100, 0.1, math.inf, -math.inf, math.nan, 5e-324],
        "text": "ü\ud800\n$",
        "tuple": (1, (2, [3])),
        "numbered": {0: "a", 1: {"x": 2}, -3: None},
        "mixed": {1: 1, "1": "1", None: None, 0.5: 2},
        "$": {"$": "tuple", "of": [1]},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({30: 1, 80: 2}),
        "empty": [{}, [], (), OrderedDict()],
    },
    "same path": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "b'": torch.full((1,), 2.0)}},
    "reserved name": {"__metadata__": torch.ones(1)},
    "a tensor": torch.arange(3),
    "a number": 3,
    "nothing": {},
}


@pytest.mark.parametrize("which", STATES)
@pytest.mark.parametrize("owner", ["a", "b"])
def test_any_state_comes_back_as_it_was(trio: Cluster, tmp_path: Path, which: str, owner: str) -> None:
    expected = STATES[which]
    checkpoint.save(tmp_path, {"bag": rpc.remote(owner, make_state, (which,))})
    target = Bag(dict.fromkeys(expected) if isinstance(expected, dict) else None)  # an object must have the same keys
    checkpoint.load(tmp_path, {"bag": target})
    assert_same(target.state, expected)


def make_state(which: str) -> Bag:
    return Bag(STATES[which])


def test_what_is_loaded_has_memory_of_its_own(trio: Cluster, tmp_path: Path) -> None:
    """Not that of the mapped file, which a later change of the file would change too."""
    target = Bag({"x": None})
    checkpoint.save(tmp_path, {"bag": Bag({"x": torch.ones(4)})})
    checkpoint.load(tmp_path, {"bag": target})
    gc.collect()
    assert "bag.a.safetensors" not in Path("/proc/self/maps").read_text()
    assert target.state["x"].tolist() == [1.0] * 4


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")  # here no step of the optimizer comes before it
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(trio: Cluster, tmp_path: Path, name: str) -> None:
    def make() -> tuple[DistributedOptimizer, Any]:
        optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(nn.Parameter(torch.ones(1)))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def run(schedule: Any) -> None:
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    optimizer, schedule = make()
    for _ in range(3):
        run(schedule)
    checkpoint.save(tmp_path, {"optimizer": optimizer, "schedule": schedule})
    another, its_schedule = make()
    checkpoint.load(tmp_path, {"optimizer": another, "schedule": its_schedule})
    for _ in range(4):
        run(schedule)
        run(its_schedule)
        assert another.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_same(its_schedule.state_dict(), schedule.state_dict())


class RemoteModuleLike(nn.Module):
    def __init__(self, module: rpc.RRef[nn.Module]) -> None:
        super().__init__()
        self.module = module

    def get_module_rref(self) -> rpc.RRef[nn.Module]:
        return self.module


def test_a_remote_module_is_the_module_that_it_stands_for(trio: Cluster, tmp_path: Path) -> None:
    model, another = rpc.remote("b", make_layer, (1,)), rpc.remote("c", make_layer, (2,))
    checkpoint.save(tmp_path, {"model": RemoteModuleLike(model)})
    checkpoint.load(tmp_path, {"model": RemoteModuleLike(another)})
    assert_same(rpc.rpc_sync("c", state_of, (another,)), rpc.rpc_sync("b", state_of, (model,)))


# --- RemoteModules in a local module ----------------------------------------------------------------------------------


class Layer(nn.Sequential):
    def __init__(self, number: int) -> None:
        super().__init__(*make_layer(number))


class Nest(nn.Module):
    """A layer here between two elsewhere, and a third of those, deeper down."""

    def __init__(self, places: str, number: int = 0) -> None:
        super().__init__()
        self.first = placed(places[0], number)
        self.second = Layer(number + 1)
        self.rest = nn.ModuleDict({"third": placed(places[1], number + 2), "fourth": placed(places[2], number + 3)})


def placed(place: str, number: int) -> nn.Module:
    return Layer(number) if place == "-" else RemoteModule(place, Layer, (number,))


@contextmanager
def no_values_on_the_wire() -> Iterator[None]:
    """A RemoteModule gives no state inside, and takes none."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the state of a remote part was sent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_side, "get_state", refuse)
        patch.setattr(remote_side, "set_state", refuse)
        yield


def test_each_owner_writes_the_remote_parts_of_a_local_module(trio: Cluster, tmp_path: Path) -> None:
    model, local = Nest("bcb"), Nest("---")
    with no_values_on_the_wire():
        checkpoint.save(tmp_path, {"model": model})
    folder = tmp_path / "step-000000"
    files = {file.name: set(safe_open(file, framework="pt").keys()) for file in folder.glob("*.safetensors")}
    keys = local.state_dict().keys()
    assert files == {
        "model.a.safetensors": {key for key in keys if key.startswith("second.")},
        "model.b.safetensors": {key for key in keys if key.startswith(("first.", "rest.fourth."))},
        "model.c.safetensors": {key for key in keys if key.startswith("rest.third.")},
    }
    assert_same(checkpoint.read(tmp_path, "model"), dict(local.state_dict()))


@pytest.mark.parametrize("before", ["bcb", "aaa", "---"])
@pytest.mark.parametrize("after", ["bcb", "cb-", "aaa", "---"])
def test_remote_parts_are_loaded_where_they_are_now(trio: Cluster, tmp_path: Path, before: str, after: str) -> None:
    saved, model = Nest(before), Nest(after, number=10)
    with no_values_on_the_wire():
        checkpoint.save(tmp_path, {"model": saved})
        checkpoint.load(tmp_path, {"model": model})
    assert_same(dict(model.state_dict()), dict(Nest("---").state_dict()))


def test_remote_parts_of_a_module_on_another_worker(trio: Cluster, tmp_path: Path) -> None:
    """Also if that one is a RemoteModule there, and parts have parts."""
    outer = rpc.remote("b", Nest, ("cba",))
    deep = RemoteModule("c", Nest, ("bcb",))
    handle = rpc.remote("b", keep, (RemoteModule("c", Layer, (7,)),))
    things = {"outer": outer, "deep": nn.Sequential(deep), "handle": handle}
    with no_values_on_the_wire():
        checkpoint.save(tmp_path, things)
    assert sorted(os.listdir(tmp_path / "step-000000")) == [
        "deep.b.safetensors",
        "deep.c.safetensors",
        "handle.c.safetensors",
        "manifest.json",
        "outer.a.safetensors",
        "outer.b.safetensors",
        "outer.c.safetensors",
    ]
    assert_same(checkpoint.read(tmp_path, "deep"), dict(nn.Sequential(Nest("---")).state_dict()))
    for name, expected in {"outer": Nest("---"), "handle": Layer(7)}.items():
        assert_same(checkpoint.read(tmp_path, name), dict(expected.state_dict()))
    others = {"outer": rpc.remote("c", Nest, ("aab", 20)), "deep": nn.Sequential(Nest("cab", 20)), "handle": Layer(20)}
    with no_values_on_the_wire():
        checkpoint.load(tmp_path, others)
    assert_same(rpc.rpc_sync("c", state_of, (others["outer"],)), dict(Nest("---").state_dict()))
    assert_same(dict(others["deep"].state_dict()), dict(nn.Sequential(Nest("---")).state_dict()))
    assert_same(dict(others["handle"].state_dict()), dict(Layer(7).state_dict()))


def keep(module: nn.Module) -> nn.Module:
    return module


def test_two_handles_on_one_remote_part(trio: Cluster, tmp_path: Path) -> None:
    def twice(places: str, number: int) -> nn.Module:
        modules = [placed(place, number) for place in places]
        return nn.ModuleList([*modules, modules[0]])

    checkpoint.save(tmp_path, {"model": twice("b", 1)})
    with safe_open(tmp_path / "step-000000" / "model.b.safetensors", framework="pt") as file:
        assert {key[0] for key in file.keys()} == {"0"}  # noqa: SIM118
    model = twice("c", 2)
    checkpoint.load(tmp_path, {"model": model})
    assert_same(dict(model.state_dict()), dict(twice("-", 1).state_dict()))
    checkpoint.save(tmp_path, {"model": nn.ModuleList([Layer(1), Layer(2)])})
    with pytest.raises(CheckpointError, match=r"'c': model\.0\.0\.weight and model\.1\.0\.weight are one tensor"):
        checkpoint.load(tmp_path, {"model": model})


def test_remote_parts_that_do_not_fit(trio: Cluster, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))})
    parts = [RemoteModule("b", nn.Linear, (5, 2)), nn.Linear(2, 2), RemoteModule("c", nn.Linear, (2, 2))]
    model = nn.Sequential(*parts)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="nothing was touched") as info:
        checkpoint.load(tmp_path, {"model": model})
    assert info.value.problems == [
        "worker 'b': model.0.weight is float32 [2, 5], but float32 [2, 3] in the checkpoint",
        "worker 'c': model.2.bias is not in the checkpoint",
    ]
    with pytest.raises(CheckpointError, match=r"worker 'b': model\.0\.bias is left over"):
        checkpoint.load(tmp_path, {"model": nn.Sequential(RemoteModule("b", nn.Linear, (3, 2, False)), *parts[1:])})
    assert_same(dict(model.state_dict()), before)
    checkpoint.save(tmp_path, {"model": Bag({"0": 1})})
    with pytest.raises(CheckpointError, match="worker 'b': model is of kind 'module' here, but 'object'"):
        checkpoint.load(tmp_path, {"model": model})


class Ring(nn.Module):
    pass


def close_ring(module: rpc.RRef[nn.Module], remote: nn.Module) -> None:
    module.local_value().add_module("again", remote)


def open_ring(module: rpc.RRef[nn.Module]) -> None:
    del module.local_value().again


def test_a_module_that_contains_itself_on_another_worker(trio: Cluster, tmp_path: Path) -> None:
    ring = RemoteModule("b", Ring)
    rpc.rpc_sync("b", close_ring, (ring.get_module_rref(), ring))
    try:
        with pytest.raises(UsageError, match=r"model contains itself: as its part '0\.again\.'"):
            checkpoint.save(tmp_path, {"model": nn.Sequential(ring)})
    finally:
        rpc.rpc_sync("b", open_ring, (ring.get_module_rref(),))


def test_remote_parts_get_the_versions_of_their_layers_back(trio: Cluster, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), RemoteModule("b", Versioned, (2, 2)))
    checkpoint.save(tmp_path, {"model": model})
    Versioned.seen = None
    checkpoint.load(tmp_path, {"model": model})
    assert Versioned.seen == 7


class Versioned(nn.Linear):
    _version = 7
    seen: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        type(self).seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def get_extra_state(self) -> Any:
        return {"note": (1, "x"), "tensor": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_gets_its_version_and_extra_state_back(trio: Cluster, tmp_path: Path) -> None:
    model = nn.Sequential(Versioned(2, 2))
    checkpoint.save(tmp_path, {"model": model})
    checkpoint.load(tmp_path, {"model": model})
    assert Versioned.seen == 7
    assert_same(model[0].extra, {"note": (1, "x"), "tensor": torch.ones(2)})


def test_a_lazy_module_takes_its_shape_from_the_checkpoint(trio: Cluster, tmp_path: Path) -> None:
    model, lazy = nn.Linear(3, 2), nn.LazyLinear(2)
    checkpoint.save(tmp_path, {"model": model})
    checkpoint.load(tmp_path, {"model": lazy})
    assert_same(dict(lazy.state_dict()), dict(model.state_dict()))


def test_some_of_what_was_saved_can_be_loaded_alone(trio: Cluster, tmp_path: Path) -> None:
    model = Model("abc")
    checkpoint.save(tmp_path, model.things)
    (tmp_path / "step-000000" / "layer0.a.safetensors").unlink()
    saved = model.state()
    model.train(range(2))
    trained = model.state()
    checkpoint.load(tmp_path, {"layer1": model.layers[1]})
    assert_same(model.state(), [trained[0], saved[1], *trained[2:]])
    with pytest.raises(AssertionError):
        assert_same(trained[1], saved[1])  # there was something to load


# --- refusing to save ---------------------------------------------------------------------------------------------


class Anything:
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": {"y": [1, Anything()]}}, r"worker 'b': bag\.x\.y\.1 is a test_checkpoint\.Anything: a checkpoint holds"),
        ({"x": {1, 2}}, r"bag\.x is a set"),
        ({"x": b"bytes"}, r"bag\.x is a bytes"),
        ({"x": torch.float32}, r"bag\.x is a torch\.dtype"),
        ({(1, 2): 3}, r"bag has the key \(1, 2\), a tuple"),
        ({"x": torch.eye(2).to_sparse()}, r"bag\.x is sparse"),
        ({"x": torch.empty(2, device="meta")}, r"bag\.x is on the meta device"),
        (
            {"x": torch.ones(2).to(torch.float8_e8m0fnu)},
            r"bag\.x is of torch\.float8_e8m0fnu, which a file cannot hold",
        ),
        ({"x": nn.UninitializedParameter()}, r"bag\.x is not initialized yet"),
    ],
)
def test_a_state_that_cannot_be_saved_names_the_key(trio: Cluster, tmp_path: Path, state: Any, message: str) -> None:
    good = Bag({"x": 1})
    checkpoint.save(tmp_path, {"bag": good})
    before = contents(tmp_path)
    REFUSED["state"] = state
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, {"good": good, "bag": rpc.remote("b", refused)})
    REFUSED.clear()
    assert contents(tmp_path).keys() == before.keys()
    assert checkpoint.steps(tmp_path) == [0]


REFUSED: dict[str, Any] = {}


def refused() -> Bag:
    return Bag(REFUSED["state"])


def test_a_state_that_contains_itself(trio: Cluster, tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(CheckpointError, match="bag is nested too deeply, or contains itself"):
        checkpoint.save(tmp_path, {"bag": Bag(loop)})


def test_all_problems_of_all_workers_are_listed(trio: Cluster, tmp_path: Path) -> None:
    REFUSED["state"] = {"x": set(), "y": set()}
    with pytest.raises(CheckpointError, match="cannot save step 0 in") as info:
        checkpoint.save(tmp_path, {"one": rpc.remote("b", refused), "two": rpc.remote("c", refused)})
    assert [problem[:19] for problem in info.value.problems] == [
        *["worker 'b': one.x i", "worker 'b': one.y i"],
        *["worker 'c': two.x i", "worker 'c': two.y i"],
    ]
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize(
    ("things", "options", "message"),
    [
        ({}, {}, "a checkpoint is of named things"),
        ([nn.Linear(1, 1)], {}, "a checkpoint is of named things"),
        ({"a/b": nn.Linear(1, 1)}, {}, "'a/b' has not"),
        ({"..": nn.Linear(1, 1)}, {}, "'..' has not"),
        ({3: nn.Linear(1, 1)}, {}, "3 has not"),
        ({"x": Bag(1)}, {"step": -1}, "step is a whole number from 0 on, not -1"),
        ({"x": Bag(1)}, {"step": True}, "step is a whole number from 0 on, not True"),
        ({"x": Bag(1)}, {"keep": 0}, "keep is a whole number from 1 on, not 0"),
        ({"x": Bag(1)}, {"timeout": -3.0}, "a timeout is a number of seconds"),
    ],
)
def test_calls_that_make_no_sense(trio: Cluster, tmp_path: Path, things: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint.save(tmp_path, things, **options)


@pytest.mark.parametrize("metadata", [{"x": {"y": Anything()}}, {"x": {"y": torch.ones(1)}}])
def test_metadata_is_plain(trio: Cluster, tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(CheckpointError, match=r"metadata\.x\.y is a "):
        checkpoint.save(tmp_path, {"bag": Bag(1)}, metadata=metadata)


def test_things_without_a_state(trio: Cluster, tmp_path: Path) -> None:
    nothing = {"one": rpc.remote("b", list), "two": rpc.remote("b", dict)}
    with pytest.raises(CheckpointError) as info:
        checkpoint.save(tmp_path, nothing)
    assert info.value.problems == [
        "worker 'b': one is a list, which has no state_dict and load_state_dict",
        "worker 'b': two is a dict, which has no state_dict and load_state_dict",
    ]
    checkpoint.save(tmp_path, {"one": Bag(1), "two": Bag(2)})
    with pytest.raises(CheckpointError, match="worker 'b': two is a dict, which has no state_dict"):
        checkpoint.load(tmp_path, nothing)
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(nn.Parameter(torch.ones(1)))], lr=0.1)
    with pytest.raises(CheckpointError, match="a DistributedOptimizer of another worker"):
        checkpoint.save(tmp_path, {"thing": rpc.RRef(optimizer)})


def test_without_a_worker(tmp_path: Path) -> None:
    with pytest.raises(NotInitializedError):
        checkpoint.save(tmp_path, {"model": nn.Linear(1, 1)})


# --- refusing to load -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(trio: Cluster, tmp_path: Path) -> Iterator[Model]:
    model = Model("abc")
    model.train(range(2))
    checkpoint.save(tmp_path, model.things, metadata="x")
    model.train(range(2, 4))  # so that loading would be noticed
    yield model
    vars(model).clear()  # pytest holds the model for longer than the workers live


def assert_refused(model: Model, path: Path, things: dict[str, Any] | None = None) -> list[str]:
    """The problems; nothing may have changed on any worker."""
    before = model.state()
    with pytest.raises(CheckpointError, match=r"cannot (load|read) ") as info:
        checkpoint.load(path, things or model.things)
    assert_same(model.state(), before)
    return info.value.problems


def folder_of(path: Path) -> Path:
    return path / "step-000000"


def test_files_that_are_missing_or_damaged(saved: Model, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "layer0.a.safetensors").unlink()
    damaged = folder / "optimizer.c.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    longer = folder / "layer2.c.safetensors"
    longer.write_bytes(longer.read_bytes() + b"x")
    size, rest = damaged.stat().st_size, longer.stat().st_size
    assert assert_refused(saved, tmp_path) == [
        "worker 'a': layer0.a.safetensors is missing",
        f"worker 'c': layer2.c.safetensors has {rest:,} bytes, not {rest - 1:,}: it is damaged",
        f"worker 'c': optimizer.c.safetensors has {size:,} bytes, not {size + 8:,}: it is damaged",
    ]


def test_one_bit_that_flipped(saved: Model, tmp_path: Path) -> None:
    file = folder_of(tmp_path) / "layer1.b.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (problem,) = assert_refused(saved, tmp_path)
    assert problem.startswith("worker 'b': layer1.b.safetensors has other bytes in tensor '")
    with pytest.raises(CheckpointError, match="other bytes in tensor"):
        checkpoint.read(tmp_path, "layer1")


def test_the_head_of_a_file_is_damaged(saved: Model, tmp_path: Path) -> None:
    file = folder_of(tmp_path) / "layer1.b.safetensors"
    good = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + good[8:])
    (problem,) = assert_refused(saved, tmp_path)
    assert problem.startswith("worker 'b': layer1.b.safetensors cannot be read: ")
    file.write_bytes(good.replace(b'"0.weight"', b'"0.heavy!"'))
    assert assert_refused(saved, tmp_path) == [
        "worker 'b': layer1.b.safetensors has no tensor '0.weight': it is damaged"
    ]
    file.write_bytes(good.replace(b'"shape":[4,4]', b'"shape":[2,8]'))
    assert assert_refused(saved, tmp_path) == [
        "worker 'b': layer1.b.safetensors has a tensor '0.weight' of float64 [2, 8], not float64 [4, 4]: it is damaged"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "manifest.json is damaged: JSONDecodeError"),
        (lambda text: "[]", "manifest.json is damaged: TypeError"),
        (lambda text: '{"format": 1}', "manifest.json is damaged: ValidationError: Object missing required field"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "it is of format 2, and this telegrad reads up to 1"),
        (lambda text: text.replace('"crc32": ', '"crc32": "x", "y": '), "manifest.json is damaged: ValidationError"),
        (lambda text: text.replace('"$": "tuple"', '"$": "lambda"'), "manifest.json is damaged: ValueError"),
        (lambda text: text.replace("layer0.a.safe", "../layer0.a.safe"), "is no file of a checkpoint"),
        (lambda text: text.replace('{"layer0.a.', '{"layer9.a.'), "and it is not in the list"),
        (lambda text: text.replace('"of": "state.1.exp_avg"', '"of": "state.99"'), "needs a tensor 'state.99'"),
        (lambda text: text.replace('"params": [0, ', '"params": [1, '), "optimizer has 12 parameters, and groups of"),
    ],
)
def test_a_manifest_that_is_damaged(saved: Model, tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    file = folder_of(tmp_path) / "manifest.json"
    text = file.read_text()
    file.write_text(change(text))
    assert file.read_text() != text
    (problem,) = assert_refused(saved, tmp_path)
    assert message in problem


def test_a_model_that_does_not_fit(trio: Cluster, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"one": nn.Linear(3, 2), "two": nn.Linear(3, 2), "three": nn.Linear(3, 2)})
    targets = {
        "one": nn.Linear(4, 2).double(),
        "two": nn.BatchNorm1d(2),
        "three": optim.SGD([nn.Parameter(torch.ones(1))]),
        "four": nn.Linear(1, 1),
    }
    with pytest.raises(
        CheckpointError, match=r"cannot load .*step-000000, and nothing was touched:\n  there is"
    ) as info:
        checkpoint.load(tmp_path, targets)
    assert info.value.problems == [
        "there is no 'four' in it, only 'one', 'two', 'three'",
        "worker 'a': one.weight is float64 [2, 4], but float32 [2, 3] in the checkpoint",
        "worker 'a': one.bias is float64 [2], but float32 [2] in the checkpoint",
        "worker 'a': two.running_mean is not in the checkpoint",
        "worker 'a': two.running_var is not in the checkpoint",
        "worker 'a': two.num_batches_tracked is not in the checkpoint",
        "worker 'a': two.weight is float32 [2], but float32 [2, 3] in the checkpoint",
        "worker 'a': three is of kind 'optimizer' here, but 'module' in the checkpoint",
    ]
    with pytest.raises(CheckpointError, match=r"two\.bias is left over: it is in the checkpoint, but not here"):
        checkpoint.load(tmp_path, {"two": nn.Linear(3, 2, bias=False)})


def test_an_optimizer_that_does_not_fit(saved: Model, tmp_path: Path) -> None:
    def problems(kind: Any, groups: list[dict[str, Any]]) -> list[str]:
        return assert_refused(saved, tmp_path, {**saved.things, "optimizer": DistributedOptimizer(kind, groups, lr=1)})

    right = [{"params": group["params"]} for group in saved.optimizer.param_groups]
    parameters = [rref for group in right for rref in group["params"]]
    (problem,) = problems(optim.SGD, right)
    assert problem.startswith("optimizer is another kind of optimizer: of its settings, only here 'dampening', ")
    assert "only there 'betas'" in problem
    assert problems(optim.Adam, [{"params": parameters}]) == [
        "optimizer has groups of [12] parameters, but in the checkpoint groups of [5, 7]"
    ]
    swapped = [parameters[1], parameters[0], *parameters[2:5]]
    assert problems(optim.Adam, [{"params": swapped}, {"params": parameters[5:]}]) == [
        "worker 'a': parameter 0 of optimizer is float64 [4], but in the checkpoint float64 [4, 4]",
        "worker 'a': parameter 1 of optimizer is float64 [4, 4], but in the checkpoint float64 [4]",
    ]
    other = optim.Adam([nn.Parameter(torch.ones(4))])
    with pytest.raises(CheckpointError, match=r"groups of \[1\] parameters, but in the checkpoint groups of \[5, 7\]"):
        checkpoint.load(tmp_path, {"optimizer": other})


def test_an_object_with_other_keys(trio: Cluster, tmp_path: Path) -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 3)
    checkpoint.save(tmp_path, {"schedule": lr_scheduler.ExponentialLR(optimizer, 0.9)})
    with pytest.raises(CheckpointError, match=r"schedule\.step_size is not in the checkpoint"):
        checkpoint.load(tmp_path, {"schedule": schedule})


def test_a_folder_without_checkpoints(trio: Cluster, tmp_path: Path) -> None:
    assert checkpoint.steps(tmp_path / "none") == []
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(UsageError, match="there is no checkpoint in "):
        checkpoint.load(tmp_path, {"bag": Bag()})
    checkpoint.save(tmp_path, {"bag": Bag(1)}, step=4)
    with pytest.raises(UsageError, match=r"there is no step 3 in .*: it has 4"):
        checkpoint.load(tmp_path, {"bag": Bag()}, step=3)


def test_an_object_whose_own_code_raises(trio: Cluster, tmp_path: Path) -> None:
    class Moody(Bag):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("not today")

    checkpoint.save(tmp_path, {"bag": Bag(1)})
    with pytest.raises(KeyError, match="not today"):
        checkpoint.load(tmp_path, {"bag": Moody(2)})


# --- a folder of checkpoints ------------------------------------------------------------------------------------------


def test_steps_are_numbered_and_the_last_one_saved_is_the_latest(trio: Cluster, tmp_path: Path) -> None:
    bag = Bag(0)
    for number, step in enumerate([None, None, 7, None, 2]):
        bag.state = number
        checkpoint.save(tmp_path, {"bag": bag}, step=step)
    assert checkpoint.steps(tmp_path) == [0, 1, 7, 8, 2]
    assert checkpoint.latest(tmp_path) == 2
    for step, expected in {None: 4, 0: 0, 1: 1, 7: 2, 8: 3, 2: 4}.items():
        assert checkpoint.load(tmp_path, {"bag": bag}, step) == (2 if step is None else step, None)
        assert bag.state == expected


def test_a_step_that_is_saved_again_replaces_the_old_one(trio: Cluster, tmp_path: Path) -> None:
    bag = Bag()
    for number in range(4):
        bag.state = number
        checkpoint.save(tmp_path, {"bag": bag}, step=5)
        assert checkpoint.read(tmp_path, "bag", 5) == checkpoint.read(tmp_path, "bag") == number
        assert checkpoint.steps(tmp_path) == [5]
        assert len(list(tmp_path.glob("step-*"))) == 1


def test_keep(trio: Cluster, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, {"bag": Bag(step)}, step=step)
    shutil.copytree(tmp_path / "step-000010", tmp_path / "step-000099")  # not ours to remove
    checkpoint.save(tmp_path, {"bag": Bag(5)}, step=5, keep=2)
    assert checkpoint.steps(tmp_path) == [99, 30, 5]
    checkpoint.save(tmp_path, {"bag": Bag(6)}, step=6, keep=2)
    assert checkpoint.steps(tmp_path) == [99, 5, 6]
    assert checkpoint.latest(tmp_path) == 6
    assert (tmp_path / "HISTORY").read_text().split()[-2:] == ["step-000005", "step-000006"]
    assert not list(tmp_path.glob(".removing-*"))


def test_a_history_that_is_lost(trio: Cluster, tmp_path: Path) -> None:
    for step in (10, 9):
        checkpoint.save(tmp_path, {"bag": Bag(step)}, step=step)
    (tmp_path / "HISTORY").unlink()
    assert checkpoint.steps(tmp_path) == [9, 10]
    shutil.rmtree(tmp_path / "step-000010")
    assert checkpoint.read(tmp_path, "bag") == 9


def test_one_checkpoint_may_go_elsewhere(trio: Cluster, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", {"bag": Bag(3)}, metadata=[1])
    os.rename(tmp_path / "run" / "step-000000", tmp_path / "best")
    bag = Bag()
    assert checkpoint.load(tmp_path / "best", {"bag": bag}) == (0, [1])
    assert bag.state == 3
    assert checkpoint.read(tmp_path / "best", "bag") == 3
    with pytest.raises(UsageError, match="leave out step=0"):
        checkpoint.read(tmp_path / "best", "bag", 0)
    with pytest.raises(UsageError, match="is a checkpoint itself"):
        checkpoint.save(tmp_path / "best", {"bag": Bag(3)})


def test_paths_are_those_of_the_driver(trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rpc.remote("b", make_layer, (0,))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    checkpoint.save("~/deep/run", {"layer": layer})
    assert (tmp_path / "home" / "deep" / "run" / "step-000000" / "layer.b.safetensors").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoint.save("run", {"layer": layer})
    assert checkpoint.latest(tmp_path / "here" / "run") == 0
    directories: list[str] = []
    monkeypatch.setattr(fanout, "_prepare", lambda ready, directory, *_: directories.append(path_of(directory)) or [])
    checkpoint.load("run", {"layer": layer})
    assert directories == [str(tmp_path / "here" / "run" / "step-000000")]


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def test_a_file_has_the_mode_that_the_umask_of_its_writer_allows(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own files by its umask; those of an owner by that owner's, which lets nobody else read."""
    write = fanout.write

    def write_privately(directory: int, file: str, stored: Any) -> Any:
        assert os.umask(0o077) == 0o027
        try:
            return write(directory, file, stored)
        finally:
            os.umask(0o027)

    monkeypatch.setattr(fanout, "write", write_privately)
    tmp_path.chmod(0o755)
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path / "run", {"layer": rpc.remote("b", make_layer, (0,))})
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")
    }
    assert modes == {
        "run/.lock": 0o640,
        "run/HISTORY": 0o640,
        "run/step-000000": 0o750,
        "run/step-000000/layer.b.safetensors": 0o600,
        "run/step-000000/manifest.json": 0o640,
    }


# --- symbolic links ---------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, to which nothing may be written."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


LINK = "a symbolic link, which is not followed inside a checkpoint folder"


def test_the_lock_and_the_history_are_not_written_through_links(trio: Cluster, tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "HISTORY"):
        (run / name).symlink_to(victim)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(run))}:\n  {name}: .*{LINK}"):
            checkpoint.save(run, {"bag": Bag(1)})
        (run / name).unlink()
    (run / ".lock").unlink()
    os.link(victim, run / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock is hard-linked elsewhere"):
        checkpoint.save(run, {"bag": Bag(1)})
    (run / ".lock").unlink()
    os.mkfifo(run / "HISTORY")
    with pytest.raises(CheckpointError, match=r"HISTORY: .*not a regular file"):
        checkpoint.latest(run)
    (run / "HISTORY").unlink()
    (run / "HISTORY.new").symlink_to(victim)  # a name that can be guessed is not used
    assert checkpoint.save(run, {"bag": Bag(1)}) == 0
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["layer.b.safetensors", "manifest.json"])
def test_the_files_of_a_checkpoint_are_not_written_through_links(
    trio: Cluster, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Even if the link is put there while the save runs."""
    layer = rpc.remote("b", make_layer, (0,))
    take = fanout._take

    def plant(statefuls: Any) -> Any:
        (temporary,) = tmp_path.glob("run/.saving-*")
        (temporary / name).symlink_to(victim)
        return take(statefuls)

    monkeypatch.setattr(fanout, "_take", plant)
    with pytest.raises((CheckpointError, FileExistsError), match="File exists"):
        checkpoint.save(tmp_path / "run", {"layer": layer})
    assert victim.read_text() == "precious"
    assert checkpoint.latest(tmp_path / "run") is None


@pytest.mark.parametrize("before", ["ask_all", "_whole"], ids=["the owners write", "the manifest is written"])
def test_a_directory_that_was_replaced_by_a_link_is_not_written_to(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    function = getattr(checkpoint.saving, before)

    def replace(*args: Any) -> Any:
        (temporary,) = tmp_path.glob("run/.saving-*")
        if not temporary.is_symlink():
            os.rename(temporary, tmp_path / "moved")
            temporary.symlink_to(elsewhere)
        return function(*args)

    monkeypatch.setattr(checkpoint.saving, before, replace)
    with pytest.raises((CheckpointError, OSError), match=LINK):
        checkpoint.save(tmp_path / "run", {"layer": rpc.remote("b", make_layer, (0,))})
    assert os.listdir(elsewhere) == []
    assert checkpoint.latest(tmp_path / "run") is None


def test_reading_follows_the_link_that_the_user_names_and_none_inside(saved: Model, tmp_path: Path) -> None:
    run = tmp_path.with_name(f"{tmp_path.name}-link")
    run.symlink_to(tmp_path)
    best = tmp_path / "best"
    best.symlink_to(tmp_path / "step-000000")
    expected = checkpoint.read(tmp_path, "layer0")
    for path in (run, best):
        assert_same(checkpoint.read(path, "layer0"), expected)
        saved.train(range(1))
        assert checkpoint.load(path, saved.things) == (0, "x")
        assert_same(saved.state()[0], expected)
    for name in ("layer1.b.safetensors", "manifest.json", ""):
        inside = tmp_path / "step-000000" / name
        os.rename(inside, tmp_path / "moved")
        inside.symlink_to(tmp_path / "moved")
        (problem,) = assert_refused(saved, tmp_path)
        assert LINK in problem
        with pytest.raises(CheckpointError, match=LINK):
            checkpoint.read(tmp_path, "layer1")
        inside.unlink()
        os.rename(tmp_path / "moved", inside)
    assert checkpoint.load(tmp_path, saved.things) == (0, "x")


def test_an_old_checkpoint_that_is_a_link_is_removed_without_its_target(trio: Cluster, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", {"bag": Bag(1)}, step=1)
    os.rename(tmp_path / "run" / "step-000001", tmp_path / "moved")
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "moved")
    (tmp_path / "run" / ".saving-1").symlink_to(tmp_path / "moved")
    (tmp_path / "run" / "step-000002").symlink_to(tmp_path / "nowhere")
    checkpoint.save(tmp_path / "run", {"bag": Bag(2)}, step=2, keep=1)
    assert checkpoint.steps(tmp_path / "run") == [2]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "HISTORY", "step-000002", "step-000002.2"]
    assert checkpoint.read(tmp_path / "moved", "bag") == 1


# --- one save at a time -----------------------------------------------------------------------------------------------


class Slow(Bag):
    gate: Gate

    def state_dict(self) -> Any:
        self.gate.pass_through()
        return 1


def test_a_save_while_another_is_under_way_is_refused(trio: Cluster, tmp_path: Path) -> None:
    slow = Slow()
    slow.gate = Gate()

    def save() -> int:
        with trio.on("a"):
            return checkpoint.save(tmp_path, {"bag": slow})

    first = in_thread(save)
    slow.gate.wait_entered()
    try:
        with pytest.raises(UsageError, match=rf"process {os.getpid()} of host .* is saving into .* just now"):
            checkpoint.save(tmp_path, {"bag": Bag(2)})
        checkpoint.save(tmp_path / "elsewhere", {"bag": Bag(2)})
    finally:
        slow.gate.open()
    assert first() == 0
    assert checkpoint.save(tmp_path, {"bag": Bag(2)}) == 1


def test_no_step_is_half_in_a_checkpoint(trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker writes, a step there waits."""
    model = Model("aab", optim.SGD)
    before = model.state()
    gate = Gate()
    write = fanout.write

    def slowly(directory: int, file: str, stored: Any) -> Any:
        if file == "layer0.a.safetensors":
            gate.pass_through()
        return write(directory, file, stored)

    def changed(number: int) -> bool:
        layer = model.layers[number]
        now = _on(trio, lambda: rpc.rpc_sync(layer.owner_name(), state_of, (layer,)))
        return not torch.equal(now["0.weight"], before[number]["0.weight"])

    monkeypatch.setattr(fanout, "write", slowly)
    with autograd.context() as context_id:
        tensor = torch.randn(8, 4, dtype=torch.float64)
        for layer in model.layers:
            layer.rpc_sync().eval()  # so that only the step changes anything
            tensor = rpc.rpc_sync(layer.owner_name(), forward, (layer, tensor))
        autograd.backward(context_id, [tensor.square().mean()])
        saving = in_thread(lambda: _on(trio, lambda: checkpoint.save(tmp_path, model.things)))
        gate.wait_entered()
        assert eventually(lambda: list(tmp_path.glob(".saving-*/layer2.b.safetensors")))
        stepping = in_thread(lambda: _on(trio, lambda: model.optimizer.step(context_id)))
        assert eventually(lambda: changed(2))
        assert not changed(0)
        gate.open()
        saving()
        stepping()
        assert changed(0)
    assert_same([checkpoint.read(tmp_path, name) for name in model.things], before)


def _on(workers: Cluster, action: Callable[[], Any]) -> Any:
    with workers.on("a"):
        return action()


# --- interrupted ------------------------------------------------------------------------------------------------------


CALLS = ("mkdir", "rename", "fsync", "open")


class Disk:
    """Counts what is done to the disk, and fails at one moment."""

    def __init__(self, fail: Callable[[str], None], at: int) -> None:
        self._lock = threading.Lock()
        self._fail, self._at = fail, at
        self.count = 0

    def wrap(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                now = self.count == self._at
            if now:
                self._fail(name)
            return function(*args, **kwargs)

        return call


def break_disk(name: str) -> None:
    raise OSError(5, f"no {name} any more")


@pytest.mark.parametrize("sweeps", [True, False], ids=["tidies up", "leaves all behind"])
def test_a_save_that_fails_at_any_moment_leaves_the_one_before(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: bool
) -> None:
    model = Model("abb")
    model.train(range(1))
    old = model.state()
    checkpoint.save(tmp_path / "first", model.things, step=1)
    model.train(range(1, 2))
    new = model.state()
    texts = set()
    told = []  # by the saves that failed: which one is the latest now
    for moment in itertools.count(1):
        path = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first", path)
        with monkeypatch.context() as patch:
            disk = Disk(break_disk, moment)
            for name in CALLS:
                patch.setattr(os, name, disk.wrap(name))
            if not sweeps:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            try:
                checkpoint.save(path, model.things, step=2, keep=1)
            except OSError as failure:
                text = str(failure)
            except CheckpointError as failure:
                (text,) = failure.problems
            else:
                text = ""
        latest = checkpoint.latest(path)
        if text:
            texts.add(text)
            told.append(latest)
        else:
            assert latest == 2
        assert_same([checkpoint.read(path, name) for name in model.things], old if latest == 1 else new)
        if disk.count < moment:
            break
        # The next save finds its way, whatever was left behind.
        assert checkpoint.save(path, {"bag": Bag(1)}, step=3, keep=1) == 3
        assert checkpoint.latest(path) == 3
        assert not [entry for entry in os.listdir(path) if entry.startswith((".saving", ".removing"))]
    # Both owners write at once: which of them does the call that fails is chance.
    anyones = {re.sub(r"^worker '[ab]'", "an owner", text) for text in texts}
    assert {what for what in CALLS for text in anyones if text.endswith(f"no {what} any more")} == set(CALLS)
    assert all(re.search(r"no \w+ any more$", text) for text in anyones)
    assert anyones >= {f"an owner: cannot write: [Errno 5] no {what} any more" for what in ("open", "fsync")}
    assert told.count(1) >= 15
    assert told == sorted(told)
    assert checkpoint.steps(path) == [2]


def test_all_is_on_the_disk_before_it_counts(trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        done.append(re.sub(r"\.(saving|history)-\w+", r"new \1", path_of(descriptor)))
        fsync(descriptor)

    def note_rename(old: str, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        done.append(f"-> {new if dst_dir_fd is None else Path(path_of(dst_dir_fd)) / new}")
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    checkpoint.save(tmp_path, {"one": rpc.remote("b", make_layer, (0,)), "two": make_layer(1)})
    done = [each.replace(str(tmp_path), "run") for each in done]
    assert sorted(done[:2]) == ["run/new saving/one.b.safetensors", "run/new saving/two.a.safetensors"]
    assert done[2:] == [
        "run/new saving/manifest.json",
        "run/new saving",
        "-> run/step-000000",
        "run",
        "run/new history",
        "-> run/HISTORY",
        "run",
    ]


def test_an_owner_that_dies_ends_the_save(tmp_path: Path) -> None:
    with cluster("a", "b", "c", timeout=PATIENCE, graceful=False) as workers, workers.on("a"):
        model = Model("abc")
        checkpoint.save(tmp_path, model.things)
        before = contents(tmp_path)
        workers.kill("c")
        with pytest.raises(WorkerLostError):
            checkpoint.save(tmp_path, model.things)
        assert {**contents(tmp_path), ".lock": b""} == {**before, ".lock": b""}
        with pytest.raises(WorkerLostError):
            checkpoint.load(tmp_path, model.things)


def test_an_owner_that_takes_too_long(trio: Cluster, tmp_path: Path) -> None:
    slow = Slow()
    slow.gate = Gate()
    with pytest.raises(RpcTimeoutError):
        checkpoint.save(tmp_path, {"bag": slow}, timeout=0.05)
    slow.gate.open()
    assert checkpoint.latest(tmp_path) is None


def test_a_worker_that_does_not_see_the_folder(trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host of its own, without a shared file system."""
    model = Model("abc")
    checkpoint.save(tmp_path, model.things)
    open_directory = Directory.open

    def not_on_b(directory: Directory) -> int:
        if current_worker().name == "b":
            raise FileNotFoundError(directory.path)
        return open_directory(directory)

    monkeypatch.setattr(Directory, "open", not_on_b)
    with pytest.raises(CheckpointError, match=rf"worker 'b' does not see {tmp_path}/\.saving-.*all workers share"):
        checkpoint.save(tmp_path, model.things)
    assert assert_refused(model, tmp_path) == [
        f"worker 'b' does not see {tmp_path}/step-000000: a checkpoint is on a file system that all workers share"
    ]


def test_what_the_driver_sees_must_be_what_the_owners_wrote(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(directory: int, file: str, stored: Any) -> Any:
        records, size = tensors.write(directory, file, stored)
        if file.startswith("layer1"):
            os.unlink(file, dir_fd=directory)
        return records, size + 1

    monkeypatch.setattr(fanout, "write", short)
    with pytest.raises(CheckpointError) as info:
        checkpoint.save(tmp_path, {"layer0": make_layer(0), "layer1": make_layer(1)})
    size = info.value.problems[0].split()[-1]
    assert info.value.problems == [
        f"worker 'a' wrote {int(size.replace(',', '')) + 1:,} bytes to layer0.a.safetensors, but here it has {size}",
        "worker 'a' wrote layer1.a.safetensors, but here it is missing",
    ]


# --- killed -----------------------------------------------------------------------------------------------------------


def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def values(step: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(step)), "step": step}


def make_bag(step: int) -> Bag:
    return Bag(values(step))


def save_here_and(names: Sequence[str], path: str, step: int, at: int = 0) -> int:
    """In a process: saves, and dies at that moment; how many moments there are."""
    disk = Disk(die, at)
    for name in CALLS:
        setattr(os, name, disk.wrap(name))
    checkpoint.save(path, {f"bag{owner}": rpc.remote(owner, make_bag, args=(step,)) for owner in names}, step=step)
    return disk.count


def die_when_writing(at: int) -> None:
    disk = Disk(die, at)
    for name in CALLS:
        setattr(os, name, disk.wrap(name))


def load_here(names: Sequence[str], path: str) -> tuple[int, list[bool]]:
    bags = {f"bag{owner}": rpc.remote(owner, make_bag, args=(0,)) for owner in names}
    step = checkpoint.load(path, bags).step
    return step, [rpc.rpc_sync(bag.owner(), holds, args=(bag, step)) for bag in bags.values()]


def holds(bag: rpc.RRef[Bag], step: int) -> bool:
    state = bag.local_value().state
    return state["step"] == step and torch.equal(state["x"], values(step)["x"])


def test_a_driver_that_is_killed_at_any_moment_leaves_a_checkpoint(tmp_path: Path) -> None:
    names = ["worker0"]
    with worker_processes.running_workers(1) as (driver,):
        moments = driver.run(save_here_and, names, str(tmp_path), 1)
    assert moments >= 9
    found = []
    for moment in range(1, moments + 1):
        with worker_processes.worker_processes(1) as cast:
            worker_processes.join(cast)
            before = checkpoint.latest(tmp_path)
            pending = cast[0].start(save_here_and, names, str(tmp_path), before + 1, moment)
            with pytest.raises(AssertionError, match="died in"):
                pending.result()
        after = checkpoint.latest(tmp_path)
        assert after in (before, before + 1)
        assert_same(checkpoint.read(tmp_path, "bagworker0"), values(after))
        found.append(after - before)
    assert found == sorted(found)  # there is one moment from which on the new one counts
    assert found[0] == 0
    assert found[-1] == 1
    with worker_processes.running_workers(1) as (driver,):
        driver.run(save_here_and, names, str(tmp_path), 1000)
    assert checkpoint.latest(tmp_path) == 1000
    assert not [entry for entry in os.listdir(tmp_path) if entry.startswith((".saving", ".removing"))]


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_an_owner_that_is_killed_while_it_writes(tmp_path: Path, moment: int) -> None:
    names = ["worker0", "worker1"]
    with worker_processes.worker_processes(2) as cast:
        worker_processes.join(cast)
        driver, owner = cast
        driver.run(save_here_and, names, str(tmp_path), 1)
        owner.run(die_when_writing, moment)
        with pytest.raises(WorkerLostError, match="worker1"):
            driver.run(save_here_and, names, str(tmp_path), 2)
        owner.wait_dead()
        assert not list(tmp_path.glob(".saving-*"))
        worker_processes.leave([driver])
    with worker_processes.running_workers(2) as (driver, _):
        assert driver.run(load_here, names, str(tmp_path)) == (1, [True, True])


# --- plain data -------------------------------------------------------------------------------------------------------

scalars = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=5)
)
plain_data = strategies.recursive(
    scalars | strategies.sampled_from([torch.zeros(1), torch.ones(2)]),
    lambda inner: (
        strategies.lists(inner, max_size=4)
        | strategies.lists(inner, max_size=4).map(tuple)
        | strategies.dictionaries(scalars, inner, max_size=4)
        | strategies.dictionaries(strategies.sampled_from(["$", "of", "a", "a.b", "b"]), inner, max_size=4)
        | strategies.dictionaries(scalars, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@hypothesis.given(plain_data)
def test_plain_data_goes_through_json_unchanged(value: Any) -> None:
    parts = json_state.Parts("it")
    apart = parts.take_apart(value)
    assert not parts.problems
    text = json.dumps(json_state.to_json(apart), allow_nan=False)
    back = json_state.from_json(json.loads(text))
    assert set(json_state.tensor_names(back)) == set(parts.tensors)
    assert_same(json_state.put_together(back, parts.tensors), value)
