"""What tests of shared memory let worker processes do; see ``test_segments.py``."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from programs.remote_functions import echo, filled, nothing
from telegrad import rpc
from telegrad._agent import agent, marshal
from telegrad._current import current_worker
from telegrad._transport import shared_memory

# --- called ---------------------------------------------------------------------------------------------------------

kept: list[torch.Tensor] = []
state = torch.zeros(0, dtype=torch.uint8)
_go_on = threading.Event()


def first_of(tensor: torch.Tensor) -> int:
    """The value that all elements have."""
    value = int(tensor[0])
    assert bool((tensor == value).all())
    return value


def first_of_each(*tensors: torch.Tensor) -> list[int]:
    return [first_of(tensor) for tensor in tensors]


def keep(tensor: torch.Tensor) -> int:
    kept.append(tensor)
    return len(kept)


def hand_out_state() -> torch.Tensor:
    """Returns a tensor that lives on here, when the test says so."""
    assert _go_on.wait(30)
    return state


# --- done by the one who is told to ---------------------------------------------------------------------------------


def memory_is_shared(*names: str) -> bool:
    """Whether this worker's calls to these workers may use shared memory; the first call dials."""
    for name in names:
        rpc.rpc_sync(name, nothing)
    links = [current_worker().agent.peer(name).link for name in names]
    return all(link is not None and link.shares_memory for link in links)


def segment_counts() -> dict[str, int]:
    """How many segments this worker has, how many of them are out, and how many bytes of the others wait."""
    gc.collect()
    worker = current_worker()
    out = sum(len(link.held) for peer in worker.agent.peers for link in peer.links)
    pool = worker.agent.marshal.segments
    return {"segments": len(pool._segments), "out": out, "idle": pool._idle.bytes}


def borrowed() -> int:
    """How many segments of others this worker has not given back."""
    return len(current_worker().agent.marshal._borrowed)


def mappings() -> int:
    """How many mappings of segments this process has, its own and those of others."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("/memfd:telegrad-" in line for line in maps)


def kept_values() -> list[int]:
    return [first_of(tensor) for tensor in kept]


def drop_kept() -> None:
    kept.clear()


def become(value: int, size: int) -> None:
    """Makes the state, or changes it in place."""
    global state
    if state.numel() == size:
        state.fill_(value)
    else:
        state = filled(size, value)


def let_go_on() -> None:
    _go_on.set()


_future: Any = None


def send_and_change(to: str, size: int, before: int, after: int) -> None:
    """Sends a tensor and changes it at once; the answer is for later."""
    global _future
    tensor = filled(size, before)
    _future = rpc.rpc_async(to, first_of, args=(tensor,))
    tensor.fill_(after)


def ask_for_state(to: str) -> None:
    global _future
    _future = rpc.rpc_async(to, hand_out_state)


def answer() -> Any:
    value = _future.wait()
    return first_of(value) if isinstance(value, torch.Tensor) else value


def send(to: str, size: int, *values: int) -> list[int]:
    """Sends so many tensors in one call, and lets go of them."""
    found: list[int] = rpc.rpc_sync(to, first_of_each, args=tuple(filled(size, value) for value in values))
    return found


def send_to_keep(to: str, size: int, *values: int) -> None:
    for value in values:
        rpc.rpc_sync(to, keep, args=(filled(size, value),))


def fetch(to: str, size: int, *values: int) -> list[int]:
    """Gets so many tensors, and lets go of them."""
    return [first_of(rpc.rpc_sync(to, filled, args=(size, value))) for value in values]


def fetch_to_keep(to: str, size: int, value: int) -> None:
    kept.append(rpc.rpc_sync(to, filled, args=(size, value)))


# --- setting things up ----------------------------------------------------------------------------------------------


def hurry(kept_seconds: float = 0.05, trim_seconds: float = 0.05) -> None:
    """What usually takes half a minute takes moments."""
    assert marshal._KEPT_SECONDS > 1
    assert agent._TRIM_SECONDS > 1
    marshal._KEPT_SECONDS = kept_seconds
    agent._TRIM_SECONDS = trim_seconds
    current_worker().agent._next_trim = 0.0


def allow_segments(count: int) -> None:
    shared_memory._MOST_SEGMENTS = count


_view: Callable[..., Any] = shared_memory.PeerSegments.view


def refuse_mappings() -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    shared_memory.PeerSegments.view = refuse  # type: ignore[method-assign]


def allow_mappings() -> None:
    shared_memory.PeerSegments.view = _view  # type: ignore[method-assign]


# --- for a long time ------------------------------------------------------------------------------------------------


def trade(world_size: int, seconds: float, seed: int) -> dict[str, int]:
    """Big tensors to and fro with random workers, some of them kept for a while and looked at again and again."""
    dice = random.Random(seed)
    names = [f"worker{rank}" for rank in range(world_size)]
    others = [name for name in names if name != rpc.get_worker_info().name]
    while not memory_is_shared(*others):
        time.sleep(0.01)
    mine: list[tuple[torch.Tensor, int]] = []
    done = {"sent": 0, "kept": 0}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        size, value = dice.randrange(40_000, 3_000_000), dice.randrange(256)
        tensor = filled(size, value)
        future = rpc.rpc_async(dice.choice(names), echo, args=(tensor,))
        if size >= shared_memory.SHARED_FROM:
            tensor.fill_(255 - value)
        back = future.wait()
        assert first_of(back) == value
        done["sent"] += 1
        if dice.random() < 0.3:
            mine.append((back, value))
            done["kept"] += 1
        if len(mine) > 20:
            tensor, value = mine.pop(dice.randrange(len(mine)))
            assert first_of(tensor) == value
    assert all(first_of(tensor) == value for tensor, value in mine)
    return done
