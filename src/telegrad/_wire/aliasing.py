"""Finds the tensors of a message that share memory, so that they share it at the receiver too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def span(tensor: Tensor) -> int:
    """Number of elements from the tensor's first to its last in memory, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(slots=True)
class Region:
    """A range of bytes of one storage, sent as one buffer for all tensors that overlap in it."""

    start: int
    end: int
    members: list[Tensor]
    buffer: int = -1


def all_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two tensors share a storage.  A quick check of the usual case."""
    try:
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    except (NotImplementedError, RuntimeError):
        return False  # one of them has no storage


def overlaps(tensors: Sequence[Tensor]) -> dict[int, Region]:
    """The tensors whose memory overlaps another's, by id, each with the region that they share."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        plain = tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
        if plain and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    shared: dict[int, Region] = {}
    for group in by_storage.values():
        for region in _regions(group) if len(group) > 1 else ():
            if len(region.members) > 1:
                shared.update((id(member), region) for member in region.members)
    return shared


def _regions(group: list[Tensor]) -> list[Region]:
    regions: list[Region] = []
    for tensor in sorted(group, key=lambda tensor: tensor.storage_offset() * tensor.itemsize):
        start = int(tensor.storage_offset()) * tensor.itemsize
        end = start + span(tensor) * tensor.itemsize
        if regions and start < regions[-1].end:
            regions[-1].end = max(regions[-1].end, end)
            regions[-1].members.append(tensor)
        else:
            regions.append(Region(start, end, [tensor]))
    return regions
