"""Every private name of torch that telegrad uses, each with the reason.

``tests/test_torch.py`` fails if torch changes one of them, or if another module uses any.  Only ``telegrad.compat``
uses others: the private names of the modules that it replaces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _DistNetworkError as DistNetworkError
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_map_only

__all__ = [
    "DistNetworkError",  # this and the stores are public in torch.distributed, but not to a type checker
    "FileStore",
    "Store",
    "TCPStore",
    "tree_map_only",  # the state of an optimizer is nested, and torch has no public function for it
]

# --- the engine and its graph -----------------------------------------------------------------------------------------

#: Runs the engine: (roots, gradients, retain_graph, create_graph, inputs, allow_unused, accumulate_grad=...).
#: ``torch.autograd.grad`` imports sympy to check its arguments, which makes the first backward half a second slower.
run_engine: Callable[..., Any] = _engine_run_backward

#: The number by which the engine chooses among nodes that are ready, the highest first.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def set_sequence_number(node: Any, number: int) -> None:
    """Gates must run last, and units that share an engine call one after the other."""
    node._set_sequence_nr(number)


_CARRIED = "telegrad.autograd"  # the key under which the engine carries an object


def carry_in_engine(value: Any) -> None:
    """Sets the object that nodes on a device see in the next engine call of this thread.

    The engine keeps such objects in its graph task, with the other state of the calling thread, and restores them on
    each thread that runs nodes of the task.  A device's thread sees no ``threading.local`` and no ``ContextVar`` of the
    caller.  ``_current_graph_task_id`` is the same on all of these threads, but the caller does not know the id before
    the first node runs.

    Use it for devices, and inside of an engine call, which restores the state of the thread at its end: torch cannot
    remove the key again.  The thread would need the GIL after its last line of Python, to free the value, and the
    process is aborted if the interpreter ends at that moment.
    """
    torch._C._stash_obj_in_tls(_CARRIED, value)


def carried_by_engine() -> Any:
    """What ``carry_in_engine`` was given for the engine call that runs the calling node; None outside of one."""
    return torch._C._get_obj_in_tls(_CARRIED) if torch._C._is_key_in_tls(_CARRIED) else None


def in_engine_call() -> bool:
    """Whether the engine runs a node on the calling thread, whose hook, say, is about to call the engine again."""
    return bool(torch._C._current_graph_task_id() != -1)


def input_metadata(node: Any, output: int) -> Any:
    """Shape, dtype and device of what enters a node: for zeros in place of a missing gradient, and for messages."""
    return node._input_metadata[output]


def runs_on_device(node: Any) -> bool:
    """Whether the engine runs a node on the thread of a device, and not on the thread that called the engine."""
    return any(metadata.device.type != "cpu" for metadata in node._input_metadata)


# --- tensors ----------------------------------------------------------------------------------------------------------


def tensor_hooks(leaf: Tensor) -> dict[Any, Any] | None:
    """Hooks of ``register_hook``: a leaf that has some must see the whole gradient, and see it once."""
    hooks: dict[Any, Any] | None = leaf._backward_hooks
    return hooks


def post_accumulate_hooks(leaf: Tensor) -> dict[Any, Any] | None:
    """Hooks of ``register_post_accumulate_grad_hook``, which the engine runs only when it writes ``.grad``."""
    hooks: dict[Any, Any] | None = leaf._post_accumulate_grad_hooks
    return hooks


def is_view(tensor: Tensor) -> bool:
    """A view cannot be marked as changed in place, and its memory belongs to its base."""
    return tensor._is_view()


def mark_as_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, Parameter)`` true for a parameter that was received, and has a history now."""
    tensor._is_param = True


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor as they are.  The public methods refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


#: A view with the negative bit, as ``conj().imag`` has it: such a tensor is sent with its bit.
negative_view: Callable[[Tensor], Tensor] = torch._neg_view

#: Quantized tensors of their parts: the public functions quantize floats again.
make_quantized_per_tensor: Callable[[Tensor, float, int], Tensor] = torch._make_per_tensor_quantized_tensor
make_quantized_per_channel: Callable[[Tensor, Tensor, Tensor, int], Tensor] = torch._make_per_channel_quantized_tensor

# --- the rest ---------------------------------------------------------------------------------------------------------

#: ``Future.then`` returns this class and not its subclass ``torch.futures.Future``.
FutureBase: Any = torch._C.Future

#: What ``Module.load_state_dict`` returns.
IncompatibleKeys: Any = _IncompatibleKeys


def is_ignored_by_ddp(parameter: Tensor) -> bool:
    """Whether DDP is configured not to reduce this parameter."""
    return getattr(parameter, "_ddp_ignored", False)


def is_first_static_backward(module: Any) -> bool:
    """Whether a DDP module with a static graph has not had its first backward, at whose end it reduces gradients."""
    return bool(module.static_graph and not module._static_graph_delay_allreduce_enqueued)


def take_first_static_backward(module: Any) -> None:
    """From now on the caller calls ``reduce_static_graph``; DDP does not at the end of the next engine call."""
    module._static_graph_delay_allreduce_enqueued = True


def reduce_static_graph(module: Any) -> None:
    module.reducer._delay_all_reduce()
