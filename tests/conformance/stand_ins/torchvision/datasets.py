"""Images of ten patterns under noise: as easy to learn as digits are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 28


class MNIST(Dataset[tuple[Any, int]]):
    """The arguments of torchvision's; nothing is read or downloaded."""

    def __init__(
        self, root: str, train: bool = True, download: bool = False, transform: Callable[[Tensor], Any] | None = None
    ) -> None:
        self._transform = transform or (lambda image: image)
        own = torch.Generator().manual_seed(1 if train else 2)
        self._labels = torch.randint(10, (960 if train else 320,), generator=own)
        patterns = torch.rand(10, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        noise = torch.rand(len(self._labels), SIDE, SIDE, generator=own)
        self._images = 0.8 * patterns[self._labels] + 0.2 * noise

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._images[index]), int(self._labels[index])
