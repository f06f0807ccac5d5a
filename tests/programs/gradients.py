"""What tests of autograd let worker processes do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

from programs import remote_functions
from telegrad import autograd, rpc
from telegrad._current import current_worker
from telegrad._wire.messages import Discover, DropContext

WEIGHT = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)

_suicide = ""  # at which moment this process is to die


def die_at(moment: str) -> None:
    """From now on this process kills itself when it comes to that moment."""
    global _suicide
    _suicide = moment
    if moment in ("discovery", "clean-up"):
        kind = Discover if moment == "discovery" else DropContext
        current_worker().agent.on_message(kind, lambda *_: _die())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def scale(x: Tensor) -> Tensor:
    """Runs on the victim."""
    if _suicide == "forward":
        _die()
    y = x * WEIGHT
    if _suicide == "backward":
        y.register_hook(lambda _: _die())
    return y


def scale_via(to: str, x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync(to, scale, args=(x,))
    return y * WEIGHT


def gradient_of(to: str, via: str = "") -> tuple[list[float], float]:
    """One context in which sources meet: x goes out, and is used here too.  The gradient of x, and its seconds."""
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    started = time.time()
    with autograd.context() as context_id:
        z = x * 3
        y = rpc.rpc_sync(via, scale_via, args=(to, z)) if via else rpc.rpc_sync(to, scale, args=(z,))
        autograd.backward(context_id, [(y * z).sum()])
        gradient = autograd.get_gradients(context_id)[x].tolist()
    return gradient, time.time() - started


def outcome(to: str, via: str = "") -> tuple[str, str, float]:
    """How a context ends that should fail: the error's type and text, and the seconds until it came."""
    started = time.time()
    try:
        gradient_of(to, via)
    except Exception as error:
        return type(error).__name__, str(error), time.time() - started
    return "", "no error", time.time() - started


def hold_a_context(to: tuple[str, ...]) -> None:
    """Leaves a context open that others know."""
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with autograd.context():
        for name in to:
            rpc.rpc_sync(name, scale, args=(x,))
        remote_functions.wait_forever()


def wait_for_a_context() -> bool:
    deadline = time.monotonic() + 10
    while not autograd.debug_info()["contexts"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(autograd.debug_info()["contexts"])


def left_over() -> dict[str, Any]:
    """What autograd still holds, given a moment to let go."""
    deadline = time.monotonic() + 5
    while (info := autograd.debug_info())["contexts"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return info


def run_contexts(to: tuple[str, str], count: int) -> None:
    for number in range(count):
        x = torch.ones(4, requires_grad=True)
        with autograd.context() as context_id:
            z = x * 2
            y = rpc.rpc_sync(to[number % 2], scale_via, args=(to[1 - number % 2], z))
            rpc.rpc_sync(to[1], scale, args=(z,))  # of no use
            if number % 10:
                autograd.backward(context_id, [(y * z).sum()])


def contexts_and_measure(to: tuple[str, str], warm_up: int, count: int) -> dict[str, list[tuple[int, int, int]]]:
    """Resources of each worker, before and after."""
    names = [rpc.get_worker_info().name, *to]
    run_contexts(to, warm_up)
    before = {name: rpc.rpc_sync(name, remote_functions.resources) for name in names}
    run_contexts(to, count)
    for name in names:
        assert rpc.rpc_sync(name, left_over)["contexts"] == []
    return {name: [before[name], rpc.rpc_sync(name, remote_functions.resources)] for name in names}
