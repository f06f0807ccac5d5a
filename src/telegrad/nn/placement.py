"""Where a module is to live: "worker/device", as ``torch.distributed.nn.RemoteModule`` writes it."""

from __future__ import annotations

import torch

from telegrad._wire.values import Route
from telegrad.errors import UsageError


def parse(place: str | torch.device) -> tuple[str | int | None, torch.device]:
    """A worker, by name or number, and a device of it; None: this worker.

    ``"ps0/cuda:1"``, ``"rank:3/cpu"``; without a device the CPU, without a worker this one.  What can be read as a
    device is one: a worker that is called ``cpu`` is written ``"cpu/cpu"``.
    """
    if isinstance(place, torch.device):
        return None, place
    if not isinstance(place, str):
        raise TypeError(f'remote_device must be a text such as "worker1/cpu", not {place!r}')
    worker, slash, device = place.partition("/")
    if not slash:
        try:
            return None, torch.device(place)
        except RuntimeError:
            device = "cpu"
    if not worker:
        raise UsageError(f'remote_device {place!r} names no worker: write "worker/device", such as "worker1/cpu"')
    try:
        there = torch.device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f'remote_device {place!r} is not "worker/device", such as "worker1/cpu": {reason}') from error
    kind, _, rank = worker.partition(":")
    return int(rank) if kind == "rank" and rank.isdecimal() else worker, there


def has_device_map(route: Route) -> bool:
    """Whether this worker has a device map for that worker."""
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    return any(goes(route, torch.device(accelerator.type, i)) for i in range(max(torch.accelerator.device_count(), 1)))


def goes(route: Route, device: torch.device) -> bool:
    """Whether a tensor of that device can be sent as it is."""
    try:
        route.device_for(device)
    except UsageError:
        return False
    return True
