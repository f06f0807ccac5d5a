"""The transforms that programs for MNIST use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self._transforms:
            image = transform(image)
        return image


class ToTensor:
    """Images are tensors here already; they get the axis of channels."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.unsqueeze(0)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self._mean) / self._std
