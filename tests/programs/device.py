"""A device that is simulated in Python, and programs whose tensors are on it.

torch knows it as an accelerator: its nodes run on a thread of their own in torch's engine.  The memory of a tensor is a
CPU storage, found by the device storage, and every operation runs on the CPU tensors over these.  To register a device
cannot be undone, so this is for processes that end with their test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from telegrad import autograd, rpc
from telegrad.errors import UsageError

NAME = "simulated"
DEVICE = f"{NAME}:0"

_memory: dict[int, torch.UntypedStorage] = {}
_libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]


def register() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    everything, aten = _libraries
    everything.fallback(_run_on_cpu, "PrivateUse1")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", lambda size, stride, **options: _empty(size, **options), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    tensor: Tensor = torch._C._acc.create_empty_tensor(list(size), dtype)
    _memory[tensor.untyped_storage()._cdata] = torch.empty(list(size), dtype=dtype).untyped_storage()
    return tensor


def _cpu_view(tensor: Tensor) -> Tensor:
    memory = _memory[tensor.untyped_storage()._cdata]
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (_cpu_view(target) if _is_here(target) else target).copy_(_cpu_view(source) if _is_here(source) else source)
    return target


def _run_on_cpu(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: on the CPU, in place where it is in place."""
    given: list[tuple[Tensor, Tensor]] = []

    def to_cpu(value: Any) -> Any:
        if _is_here(value):
            given.append((_cpu_view(value), value))
            return given[-1][0]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for cpu, here in given:
            if cpu is value:
                return here
        made = _empty(value.size(), dtype=value.dtype)
        _cpu_view(made).copy_(value)
        return made

    args, kwargs = tree_map(to_cpu, (args, kwargs))
    return tree_map(to_device, operation(*args, **kwargs))


# --- programs -------------------------------------------------------------------------------------------------------

Call = Callable[..., Tensor]  # call(to, function, *args)

_on_device: dict[str, Tensor] = {}
_threads: set[int] = set()  # on which the gradients of received tensors were complete


def _weight(device: str) -> Tensor:
    """A leaf of this process."""
    if device not in _on_device:
        _on_device[device] = torch.tensor([2.0, 3.0, 0.5, 1.0]).to(device).requires_grad_()
    return _on_device[device]


def _locally(to: str, function: Any, *args: Any) -> Tensor:
    return function(_locally, *args)  # type: ignore[no-any-return]


def _remotely(to: str, function: Any, *args: Any) -> Tensor:
    return rpc.rpc_sync(to, _serve, (function.__name__, *args))  # type: ignore[no-any-return]


def _serve(name: str, *args: Any) -> Tensor:
    result: Tensor = globals()[name](_remotely, *args)
    return result


def scale(call: Call, x: Tensor) -> Tensor:
    x.register_hook(_note_thread)
    return (x * _weight(str(x.device))).sin()


def scale_via(call: Call, to: str, x: Tensor) -> Tensor:
    return call(to, scale, x * 2) * _weight(str(x.device))


def _note_thread(gradient: Tensor) -> None:
    _threads.add(threading.get_ident())


def one_call(call: Call, x: Tensor) -> Tensor:
    return call("worker1", scale, x * 3).pow(2).sum()


def chain(call: Call, x: Tensor) -> Tensor:
    return call("worker1", scale_via, "worker2", x * 3).pow(2).sum()


def fan_out(call: Call, x: Tensor) -> Tensor:
    shared = x.exp()
    return torch.stack([call(to, scale, shared * n) for n in (1, 2) for to in ("worker1", "worker2")]).prod(0).sum()


def around(call: Call, x: Tensor) -> Tensor:
    """The gradient of ``z`` is complete only when those of the calls have come back: their sends are gates."""
    z = x * 3
    return (call("worker1", scale, z) * call("worker2", scale, z) * z).sum()


def around_on_the_cpu(call: Call, x: Tensor) -> Tensor:
    z = (x * 3).cpu()
    return (call("worker1", scale_there, z) * call("worker2", scale_there, z) * z).sum()


def scale_there(call: Call, x: Tensor) -> Tensor:
    """Computes on the device with what came from the CPU."""
    return scale(call, x.to(DEVICE)).cpu()


PROGRAMS = {program.__name__: program for program in (one_call, chain, fan_out, around, around_on_the_cpu)}


def compare(name: str, mode: Any) -> tuple[list[Any], list[Any], str]:
    """The gradients of ``x`` in a program, local and remote, and where they are."""
    program = PROGRAMS[name]
    local = torch.tensor([1.0, 0.5, 2.0, 3.0], requires_grad=True)
    (expected,) = torch.autograd.grad(program(_locally, local), local)
    x = local.detach().to(DEVICE).requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(_remotely, x)], mode=mode)
        found = autograd.get_gradients(context_id)[x]
    return expected.tolist(), found.cpu().tolist(), str(found.device)


def second_order(name: str, mode: Any) -> None:
    """A backward through a recorded backward."""
    x = torch.ones(4).to(DEVICE).requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [one_call(_remotely, x)], create_graph=True)
        autograd.backward(context_id, [autograd.get_gradients(context_id)[x].sum()], mode=mode)


def refused(run: Any, name: str, mode: Any) -> str:
    """The text of the UsageError of a program."""
    try:
        run(name, mode)
    except UsageError as error:
        return str(error)
    return ""


def ran_on_threads_of_the_engine() -> bool:
    """Whether gradients were computed on threads that Python did not start: those of the device."""
    return bool(_threads) and not _threads & {thread.ident for thread in threading.enumerate() if _is_of_python(thread)}


def _is_of_python(thread: threading.Thread) -> bool:
    return not isinstance(thread, threading._DummyThread)
