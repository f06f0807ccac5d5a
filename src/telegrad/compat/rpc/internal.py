"""What stands in for ``torch.distributed.rpc.internal``: names that programs import, over telegrad's own pickling."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor

from telegrad._wire import pickles
from telegrad.compat.profiling import profiling_key
from telegrad.compat.rref import RRef
from telegrad.errors import SerializationError

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function is called; part of the names under which torch profiles calls."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception, as torch sends it; telegrad has its own way, and nothing here makes one."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Values as bytes and a table of tensors, for classes that pickle themselves in this way."""

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """torch's ``remote_module`` registers its own class here, in whose place telegrad's stands."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        writer, data, buffers = pickles.dump(obj, same_main=True, allow_cloudpickle=False)
        if buffers:
            raise SerializationError("an array beside the pickle: only tensors can go there; send it inside a call")
        forks = [cast("RRef[Any]", rref)._serialize() for rref in writer.rrefs]
        return pickle.dumps((data, forks)), writer.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Tensor]) -> Any:
        data, forks = pickle.loads(binary_data)
        return pickles.load(data, [], tensor_table, [RRef._deserialize(fork) for fork in forks])


_internal_rpc_pickler = _InternalRPCPickler()
serialize = _internal_rpc_pickler.serialize
deserialize = _internal_rpc_pickler.deserialize


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in a profile."""
    return profiling_key(exec_type.value, func_name, current_worker_name, dst_worker_name)
