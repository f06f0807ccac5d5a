"""The private names of torch that telegrad uses are what ``telegrad._torch`` says they are.

Each test fails where torch changes or removes one.
"""

from __future__ import annotations

import ast
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from telegrad import _torch
from worker_processes import run_python

SOURCE = Path(__file__).parent.parent / "src" / "telegrad"


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


# --- the engine and its graph -----------------------------------------------------------------------------------------


def test_the_engine_gives_gradients_of_edges_and_writes_grad_only_if_asked() -> None:
    weight = leaf()
    root = get_gradient_edge((weight * 2).sum())
    (found,) = _torch.run_engine(
        (root,), (torch.ones(()),), True, False, (get_gradient_edge(weight),), True, accumulate_grad=False
    )
    assert found.tolist() == [2.0] * 3
    assert weight.grad is None
    _torch.run_engine((root,), (torch.ones(()),), False, False, (), True, accumulate_grad=True)
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


def test_the_engine_is_run_without_an_import_of_sympy() -> None:
    """Which takes half a second, and is why ``torch.autograd.grad`` is not called."""
    program = """if True:
        import sys, torch
        from torch.autograd.graph import get_gradient_edge
        from telegrad._torch import run_engine
        weight = torch.ones(3, requires_grad=True)
        root, edge = get_gradient_edge(weight.sum()), get_gradient_edge(weight)
        run_engine((root,), (torch.ones(()),), True, False, (edge,), True, accumulate_grad=False)
        assert "sympy" not in sys.modules
        torch.autograd.grad((root,), (edge,), (torch.ones(()),))
        assert "sympy" in sys.modules
    """
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def test_of_nodes_that_are_ready_the_one_with_the_highest_number_runs_first() -> None:
    order: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
            ctx.name = name
            return tensor * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            order.append(ctx.name)
            return gradient, None

    weight = leaf()
    older, newer = Noted.apply(weight, "older"), Noted.apply(weight, "newer")
    assert _torch.sequence_number(older.grad_fn) < _torch.sequence_number(newer.grad_fn)
    (older + newer).sum().backward(retain_graph=True)
    assert order == ["newer", "older"]
    _torch.set_sequence_number(older.grad_fn, 1 << 62)
    (older + newer).sum().backward()
    assert order[2:] == ["older", "newer"]


def test_a_node_knows_what_enters_it() -> None:
    node = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True) * 2).grad_fn
    metadata = _torch.input_metadata(node, 0)
    assert (tuple(metadata.shape), metadata.dtype, metadata.device) == ((2, 3), torch.float64, torch.device("cpu"))


def test_a_node_sees_what_the_caller_of_the_engine_gave_it_to_carry() -> None:
    """On the calling thread; tests/test_autograd_device.py shows it on the thread of a device."""
    seen: list[Any] = []
    weight = leaf()
    weight.register_hook(lambda gradient: seen.append(_torch.carried_by_engine()))
    assert _torch.carried_by_engine() is None
    for value in ("this", "another", None):
        _torch.carry_in_engine(value)
        weight.sum().backward()
    assert seen == ["this", "another", None]


def test_what_the_engine_carries_is_kept_alive_no_longer_than_it_is_set() -> None:
    value = leaf()
    known = weakref.ref(value)
    _torch.carry_in_engine(value)
    leaf().sum().backward()
    _torch.carry_in_engine(None)
    del value
    assert known() is None


def test_cpu_nodes_do_not_run_on_a_device() -> None:
    assert not _torch.runs_on_device(leaf().sum().grad_fn)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_hooks_of_a_leaf_are_seen_and_can_be_taken_away() -> None:
    weight, seen = leaf(), []
    assert not _torch.tensor_hooks(weight)
    assert not _torch.post_accumulate_hooks(weight)
    weight.register_hook(lambda gradient: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda tensor: seen.append("post"))
    weight.sum().backward()
    assert seen == ["hook", "post"]
    hooks = _torch.tensor_hooks(weight)
    assert hooks is not None
    taken = dict(hooks)
    hooks.clear()
    weight.sum().backward()
    assert seen == ["hook", "post", "post"]
    hooks.update(taken)
    weight.sum().backward()
    assert seen == ["hook", "post", "post", "hook", "post"]
    assert len(_torch.post_accumulate_hooks(weight) or ()) == 1


def test_views() -> None:
    base = torch.ones(4)
    assert not _torch.is_view(base)
    assert not _torch.is_view(base.data)
    with torch.no_grad():
        assert all(_torch.is_view(view) for view in (base[1:], base.view(2, 2), base.expand(3, 4)))


def test_a_tensor_can_pass_for_a_parameter() -> None:
    tensor = leaf() * 2
    assert not isinstance(tensor, nn.Parameter)
    _torch.mark_as_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)
    assert tensor.grad_fn is not None


def test_the_parts_of_a_sparse_tensor_that_is_not_coalesced() -> None:
    values = torch.tensor([1.0, 2.0])
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3,), check_invariants=False)
    with pytest.raises(RuntimeError, match="uncoalesced"):
        tensor.values()
    indices, found = _torch.sparse_parts(tensor)
    assert (indices.tolist(), found.tolist()) == ([[1, 1]], [1.0, 2.0])
    assert found.data_ptr() == values.data_ptr()


def test_negative_views() -> None:
    tensor = _torch.negative_view(torch.tensor([1.0, -2.0]))
    assert tensor.is_neg()
    assert tensor.tolist() == [-1.0, 2.0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_made_of_their_parts() -> None:
    whole = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 3, torch.qint8)
    again = _torch.make_quantized_per_tensor(whole.int_repr(), 0.5, 3)
    assert (again.dtype, again.dequantize().tolist()) == (torch.qint8, [0.5, 1.0])
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([1, 2])
    whole = torch.quantize_per_channel(torch.tensor([[0.5], [1.0]]), scales, zeros, 0, torch.quint8)
    again = _torch.make_quantized_per_channel(whole.int_repr(), scales, zeros, 0)
    assert (again.dtype, again.dequantize().tolist()) == (torch.quint8, [[0.5], [1.0]])


def test_a_gradient_that_something_else_holds_outlives_the_reference_to_it() -> None:
    """What ``autograd.leaves`` relies on: a view, or C++, keeps the Python object of a tensor alive."""
    for hold, held in [
        (lambda tensor: tensor, True),
        (lambda tensor: [tensor], True),
        (lambda tensor: tensor[1:], True),
        (torch.utils.dlpack.to_dlpack, True),
        (lambda tensor: None, False),
        (lambda tensor: tensor.data, False),
    ]:
        tensor = torch.ones(4)
        kept = hold(tensor)
        reference = weakref.ref(tensor)
        del tensor
        assert (reference() is not None) is held, hold
        del kept


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_then_of_a_future_gives_the_base_class() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    assert issubclass(torch.futures.Future, _torch.FutureBase)
    assert isinstance(future.then(lambda done: done.wait()), _torch.FutureBase)


def test_what_loading_a_state_returns() -> None:
    layer = nn.Linear(1, 1)
    assert isinstance(layer.load_state_dict(layer.state_dict()), _torch.IncompatibleKeys)
    assert _torch.IncompatibleKeys(["a"], ["b"]).unexpected_keys == ["b"]


def test_trees_of_tensors() -> None:
    tree = {"state": [torch.ones(1), 2, (torch.ones(2),)]}
    doubled = _torch.tree_map_only(Tensor, lambda tensor: tensor * 2, tree)
    assert doubled["state"][0].tolist() == [2.0]
    assert doubled["state"][1] == 2
    assert doubled["state"][2][0].tolist() == [2.0, 2.0]


def test_stores_and_their_error_are_the_public_ones() -> None:
    for name in ("DistNetworkError", "FileStore", "Store", "TCPStore"):
        assert getattr(_torch, name) is getattr(dist, name)


def test_what_ddp_is_asked_and_told() -> None:
    model = nn.ModuleDict({"reduced": nn.Linear(2, 1, bias=False), "ignored": nn.Linear(2, 1, bias=False)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored.weight"])
    assert _torch.is_ignored_by_ddp(model["ignored"].weight)
    assert not _torch.is_ignored_by_ddp(model["reduced"].weight)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Linear(2, 1, bias=False)
        wrapped = DistributedDataParallel(layer, static_graph=True)
        assert _torch.is_first_static_backward(wrapped)
        assert not _torch.is_first_static_backward(DistributedDataParallel(nn.Linear(2, 1)))
        _torch.take_first_static_backward(wrapped)
        assert not _torch.is_first_static_backward(wrapped)
        wrapped(torch.ones(1, 2)).sum().backward()
        _torch.reduce_static_graph(wrapped)
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0, 1.0]]
        del wrapped
    finally:
        dist.destroy_process_group()


# --- no other module has any ------------------------------------------------------------------------------------------

#: Names that begin with an underscore, and are of torch.
PRIVATE = re.compile(
    r"_(C|neg_view|make_per_\w+|execution_engine|engine_run_backward|backward_cls|sequence_nr|set_sequence_nr"
    r"|input_metadata|backward_hooks|post_accumulate_grad_hooks|is_view|is_param|indices|values|cdata|storage_Use_Count"
    r"|use_count|IncompatibleKeys|pytree|ddp_ignored|delay_all_reduce|static_graph_delay\w+|foreach_\w+|base|version"
    r"|distributed_c10d|DistNetworkError)"
)


@pytest.mark.parametrize(
    "path",
    [each for each in sorted(SOURCE.rglob("*.py")) if "compat" not in each.parts and each.name != "_torch.py"],
    ids=lambda each: str(each.relative_to(SOURCE)),
)
def test_private_names_of_torch_stand_in_one_module(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        found += [f"line {node.lineno}: {name}" for name in names if PRIVATE.fullmatch(name)]
    assert not found, f"put these into telegrad._torch: {found}"
