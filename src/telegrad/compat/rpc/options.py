"""TensorPipe's option class: the same fields and checks, for a worker of telegrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from telegrad.compat.error_texts import speaks_as_torch
from telegrad.compat.rpc.constants import DEFAULT_INIT_METHOD
from telegrad.compat.worker import CompatWorker
from telegrad.errors import UsageError
from telegrad.rpc.options import UNSET, Device, DeviceMap, RpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    worker_type = CompatWorker

    def __init__(
        self,
        *,
        num_worker_threads: int = UNSET,
        rpc_timeout: float = UNSET,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Any = None,  # TensorPipe's own, which have no meaning here
        _channels: Any = None,
    ) -> None:
        if rpc_timeout is not UNSET and not isinstance(rpc_timeout, (int, float)):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a number of seconds, not {rpc_timeout!r}"
            )
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
        )

    set_device_map = speaks_as_torch(RpcBackendOptions.set_device_map)


def check_devices(name: str, options: RpcBackendOptions) -> None:
    """A map of devices that are not here is an error at the start, and not when the first tensor is sent."""
    here = torch.cuda.device_count()
    for to, device_map in options.device_maps.items():
        missing = [device for device in device_map if device.type == "cuda" and (device.index or 0) >= here]
        if missing:
            raise UsageError(
                f"Node {name} has source devices with invalid indices in its device map for {to}: "
                f"{', '.join(map(str, missing))}, and this machine has {here or 'no'} CUDA devices. Tensors of the CPU "
                "need no map: leave device_maps out, or make it from torch.cuda.device_count()"
            )
