"""The options of ``init_rpc``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from telegrad.errors import UsageError
from telegrad.worker import Worker

DEFAULT_TIMEOUT = 60.0
DEFAULT_THREADS = 16
DEFAULT_INIT_METHOD = "env://"
SECRET_VARIABLE = "TELEGRAD_SECRET"
HOST_VARIABLE = "TELEGRAD_HOST"

TRANSPORTS = ("unix", "tcp")

_NAME = re.compile(r"[A-Za-z0-9_:\-]{1,127}")

Device = int | str | torch.device
DeviceMap = Mapping[Device, Device]


class RpcBackendOptions:
    """How a worker runs.  The first five are those of ``torch.distributed.rpc``; the rest are ours.

    * ``num_worker_threads``: how many calls run at once.
    * ``rpc_timeout``: seconds that a call may take unless it says otherwise; 0: for ever.
    * ``init_method``: where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
    * ``device_maps``: for each worker, where a tensor of a device here goes there.
    * ``devices``: accepted as in torch, and not needed.
    * ``secret``: what all workers of the job know and strangers do not; by default ``$TELEGRAD_SECRET``.
    * ``transports``: of ``"unix"`` (one host) and ``"tcp"``, those that may be used.
    * ``host``: the address that this worker listens on for other hosts; by default ``$TELEGRAD_HOST``, else found out.
    * ``tls_certificate``, ``tls_key``, ``tls_ca``: files, instead of the certificate that is made at start.
    * ``heartbeat``: seconds of silence after which a worker counts as lost.
    * ``init_timeout``: seconds that ``init_rpc`` waits for the others.
    * ``allow_pickle``: False leaves plain data, tensors and functions registered with ``@rpc.export``.
    * ``allow_cloudpickle``: whether lambdas, and functions of a main program that the others do not run, may be sent.
    """

    #: What ``init_rpc`` makes; a subclass of the options may name a subclass of the worker.
    worker_type: type[Worker] = Worker

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_THREADS,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        secret: str | bytes | None = None,
        transports: Sequence[str] = TRANSPORTS,
        host: str | None = None,
        port: int = 0,
        tls_certificate: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        heartbeat: float = 10.0,
        init_timeout: float = 300.0,
        allow_pickle: bool = True,
        allow_cloudpickle: bool = True,
        _transports: Any = None,  # of TensorPipe, which programs written for it may name
        _channels: Any = None,
    ) -> None:
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise UsageError(f"num_worker_threads must be a positive number, not {num_worker_threads!r}")
        for name, seconds in (("rpc_timeout", rpc_timeout), ("heartbeat", heartbeat), ("init_timeout", init_timeout)):
            if not isinstance(seconds, (int, float)) or seconds < 0:
                raise UsageError(f"{name} must be a number of seconds, not {seconds!r}")
        if heartbeat == 0:
            raise UsageError("heartbeat must be more than 0 seconds")
        unknown = set(transports) - set(TRANSPORTS)
        if unknown or not transports:
            raise UsageError(f"transports must be of {', '.join(TRANSPORTS)}, not {list(transports)!r}")
        if (tls_certificate is None) != (tls_key is None):
            raise UsageError("tls_certificate and tls_key go together: give both files or neither")
        if (tls_ca is None) != (tls_certificate is None):
            raise UsageError(
                "tls_certificate, tls_key and tls_ca go together: both ends of a connection show a certificate, and "
                "each checks the other's against tls_ca"
            )
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices = [_device(device) for device in devices or ()]
        self.secret = secret
        self.transports = tuple(transports)
        self.host = host
        self.port = port
        self.tls_certificate = tls_certificate
        self.tls_key = tls_key
        self.tls_ca = tls_ca
        self.heartbeat = float(heartbeat)
        self.init_timeout = float(init_timeout)
        self.allow_pickle = allow_pickle
        self.allow_cloudpickle = allow_cloudpickle
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Adds to where tensors of devices here go on worker ``to``."""
        mine = self.device_maps.setdefault(to, {})
        for here, there in device_map.items():
            source, target = _device(here), _device(there)
            if mine.get(source, target) != target:
                raise UsageError(f"{source} is already mapped to {mine[source]} on worker {to!r}")
            if any(there == target for here, there in mine.items() if here != source):
                raise UsageError(f"two devices are mapped to {target} on worker {to!r}: each needs one of its own")
            mine[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        self.devices = [_device(device) for device in devices]

    def secret_bytes(self) -> bytes | None:
        """The job's secret, from here or from the environment."""
        secret = self.secret if self.secret is not None else os.environ.get(SECRET_VARIABLE)
        if isinstance(secret, str):
            secret = secret.encode()
        return secret or None

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "secret"}
        return f"RpcBackendOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _device(device: Device) -> torch.device:
    """A number is a device of the accelerator, and torch refuses one where there is none."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(
            f"{device!r} is no device on this machine: {reason}. Tensors of the CPU need no device map: leave it out"
        ) from None


def check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"a worker's name has letters, digits, '_', ':' and '-' only and fewer than 128 of them; {name!r} has not"
        )
    return name
