"""Functions for workers that let no pickle in, and a worker that sends one anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from programs import remote_functions
from telegrad import rpc
from telegrad._agent.marshal import Marshal
from telegrad._wire import values


@rpc.export
def scale(items: Any, by: int) -> Any:
    return [item * by for item in items]


@rpc.export(name="short")
def plus_one(number: int) -> int:
    return number + 1


@rpc.export
def total(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors.values()]).sum()


@rpc.export
class Tally:
    def __init__(self) -> None:
        self.value = 0

    def add(self, by: int) -> int:
        self.value += by
        return self.value


def not_exported(value: Any) -> Any:
    return value


def use_tensors(to: str) -> bool:
    small = rpc.rpc_sync(to, total, args=({"a": torch.ones(3), "b": torch.ones(2, 2)},))
    added = rpc.rpc_sync(to, torch.add, args=(torch.ones(3), 1))
    return bool(small == 7) and torch.equal(added, torch.full((3,), 2.0))


def use_reference(to: str) -> int:
    rref = rpc.remote(to, Tally)
    assert rref.rpc_sync().add(1) == 1
    result: int = rref.rpc_sync().add(2)
    return result


def reinterpret_quantised(to: str) -> None:
    """Would crash the other worker, if it took the dtype."""
    values = torch._make_per_tensor_quantized_tensor(torch.zeros(8, 4, dtype=torch.uint8), 0.1, 0)
    rpc.remote(to, torch.relu, args=(values,)).remote().view(torch.int8).rpc_sync().clone()


def multiply_sparse(to: str) -> None:
    """Would crash the other worker, if it multiplied them."""
    indices, values = torch.zeros(2, 3, dtype=torch.long), torch.ones(3, 2, 2)
    sparse = torch.sparse_coo_tensor(indices, values, (3, 2**40, 2, 2), check_invariants=True)
    rpc.rpc_sync(to, "torch:mul", args=(sparse, sparse))


def call_lambda(to: str) -> tuple[str, str]:
    return remote_functions.error_of_call(to, lambda: 1)


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def pickle_anyway() -> None:
    """From now on this worker sends pickles to whom it must not."""

    def pack(self: Marshal, peer: Any, link: Any, value: Any, answered: bool = False) -> values.PackedValue:
        return values.pack(value, values.Route(peer.id, allow_pickle=True), None)

    assert hasattr(Marshal, "pack")
    Marshal.pack = pack  # type: ignore[method-assign]


def send_trap(to: str, path: str) -> tuple[str, str]:
    return remote_functions.error_of_call(to, scale, Trap(path), 1)


@rpc.export
def return_trap(path: str) -> Any:
    return Trap(path)
