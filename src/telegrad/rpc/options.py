"""The options of ``init_rpc``."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from telegrad._worker import Worker
from telegrad.errors import UsageError

DEFAULT_TIMEOUT = 60.0
DEFAULT_THREADS = 16
DEFAULT_INIT_METHOD = "env://"
DEFAULT_HEARTBEAT = 10.0
DEFAULT_INIT_TIMEOUT = 300.0
SECRET_VARIABLE = "TELEGRAD_SECRET"
HOST_VARIABLE = "TELEGRAD_HOST"
MIN_SECRET = 16  # characters

_PREFIX = "TELEGRAD_"
#: The names of the environment variables of options, without the prefix.
_VARIABLES = (
    "NUM_WORKER_THREADS RPC_TIMEOUT SECRET TRANSPORTS HOST PORT TLS_CERTIFICATE TLS_KEY TLS_CA HEARTBEAT INIT_TIMEOUT "
    "ALLOW_PICKLE ALLOW_CLOUDPICKLE"
).split()
_OWN_VARIABLES = "COMPAT CONFORMANCE FUZZ_EXAMPLES".split()  # set by ``telegrad compat`` and by our tests

TRANSPORTS = ("unix", "tcp")

log = logging.getLogger("telegrad.rpc")

_NAME = re.compile(r"[A-Za-z0-9_:\-]{1,127}")

Device = int | str | torch.device
DeviceMap = Mapping[Device, Device]


class _Unset:
    """The default of an option that also has an environment variable."""

    def __repr__(self) -> str:
        return "<from the environment, or the default>"


UNSET: Any = _Unset()


class RpcBackendOptions:
    """How a worker runs, for ``rpc_backend_options`` of :func:`init_rpc`.

    The first five options are those of ``torch.distributed.rpc``, the others are telegrad's own. All of them are also
    attributes, and may be changed until ``init_rpc``.

    Most options that are not given are taken from the environment, where there is a variable that is not empty:
    ``TELEGRAD_`` and the name of the option in capitals, such as ``TELEGRAD_HEARTBEAT``. This does not hold for
    ``init_method``, ``device_maps`` and ``devices``. A list is written with commas, a bool as 0 or 1. An argument wins
    over the environment.

    Args:
        num_worker_threads (int, optional): How many calls of other workers run at the same time (default: 16).
            Functions that wait for another worker do not count, so that calls which call each other cannot run out of
            threads.
        rpc_timeout (float, optional): Seconds that a call may take unless it has a timeout of its own; 0 means no limit
            (default: 60).
        init_method (str, optional): Where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``
            (default: ``env://``, which means ``MASTER_ADDR`` and ``MASTER_PORT``).
        device_maps (dict, optional): For each worker, by name, a map from devices of this worker to devices of that
            one, as in :meth:`set_device_map`.
        devices (list, optional): Accepted as in torch, and not needed.
        secret (str or bytes, optional): A text that only the workers of the job know; at least 16 random characters.
            Without a secret the job is confined to one host and one user.
        transports (list, optional): Which of ``"unix"`` (within a host) and ``"tcp"`` may be used (default: both). TCP
            needs a secret.
        host (str, optional): The address on which this worker listens for workers of other hosts. By default it is the
            one by which this host reaches the rendezvous.
        port (int, optional): The TCP port on which this worker listens; 0 means any that is free (default: 0). Each
            worker of a host needs its own.
        tls_certificate (path, optional): A PEM file with a certificate for this worker, in place of the one that is
            made at start. It goes together with the next two.
        tls_key (path, optional): A PEM file with the key of the certificate, without a password.
        tls_ca (path, optional): A PEM file with the authority that has signed the certificates of all workers.
        heartbeat (float, optional): Seconds after which a host that does not respond counts as lost (default: 10). A
            process that dies on a host that still runs is noticed immediately.
        init_timeout (float, optional): Seconds that ``init_rpc`` waits for the other workers (default: 300).
        allow_pickle (bool, optional): If False, this worker neither sends nor reads pickles: plain data, tensors and
            references can be sent, and others can call functions with :func:`export` and some operators of torch only
            (default: True).
        allow_cloudpickle (bool, optional): If False, lambdas, local functions, and functions of a main program that the
            callee does not run are not sent by value, and raise ``SerializationError`` (default: True).

    Raises:
        UsageError: An option, or its environment variable, has a value that is not valid.

    Example::

        >>> options = rpc.RpcBackendOptions(rpc_timeout=20, init_method="tcp://10.0.0.1:29500", secret="f3a9" * 8)
        >>> options.rpc_timeout, options.num_worker_threads, options.transports
        (20.0, 16, ('unix', 'tcp'))
        >>> rpc.RpcBackendOptions(heartbeat=0)
        Traceback (most recent call last):
          ...
        telegrad.errors.UsageError: heartbeat must be more than 0 seconds
    """

    #: The class of the worker that ``init_rpc`` makes; subclasses of the options may name a subclass.
    worker_type: type[Worker] = Worker

    def __init__(
        self,
        *,
        num_worker_threads: int = UNSET,
        rpc_timeout: float = UNSET,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        secret: str | bytes | None = None,
        transports: Sequence[str] = UNSET,
        host: str | None = None,
        port: int = UNSET,
        tls_certificate: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        heartbeat: float = UNSET,
        init_timeout: float = UNSET,
        allow_pickle: bool = UNSET,
        allow_cloudpickle: bool = UNSET,
        _transports: Any = None,  # of TensorPipe, which programs written for it may name
        _channels: Any = None,
    ) -> None:
        num_worker_threads = _option("num_worker_threads", num_worker_threads, DEFAULT_THREADS, int, _check_positive)
        rpc_timeout = _option("rpc_timeout", rpc_timeout, DEFAULT_TIMEOUT, float, _check_seconds)
        transports = _option("transports", transports, TRANSPORTS, _words, _check_transports)
        host = host if host is not None else _option("host", UNSET, None, str)
        port = _option("port", port, 0, int, _check_port)
        if tls_certificate is None and tls_key is None and tls_ca is None:  # they go together
            tls_certificate = _option("tls_certificate", UNSET, None, str)
            tls_key = _option("tls_key", UNSET, None, str)
            tls_ca = _option("tls_ca", UNSET, None, str)
        heartbeat = _option("heartbeat", heartbeat, DEFAULT_HEARTBEAT, float, _check_heartbeat)
        init_timeout = _option("init_timeout", init_timeout, DEFAULT_INIT_TIMEOUT, float, _check_seconds)
        allow_pickle = _option("allow_pickle", allow_pickle, True, _yes_or_no)
        allow_cloudpickle = _option("allow_cloudpickle", allow_cloudpickle, True, _yes_or_no)
        if len({each is None for each in (tls_certificate, tls_key, tls_ca)}) == 2:
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
        """Sets to which devices of another worker tensors of this worker's devices go. Several calls add up.

        The map applies to tensors that this worker sends, as arguments and as results: for tensors that come back on a
        device, the other worker needs a map for this one. Tensors of the CPU stay on the CPU, and need no map. Tensors
        of a device that is not in the map cannot be sent. They go by way of host memory.

        Args:
            to (str): The name of the other worker.
            device_map (dict): From devices here to devices there, as int, str or ``torch.device``. No two devices may
                be mapped to the same one.

        Raises:
            UsageError: A device is mapped already, two are mapped to the same one, or torch does not know it.

        Example::

            >>> options = rpc.RpcBackendOptions()
            >>> options.set_device_map("worker1", {"cuda:0": "cuda:1"})
            >>> options.device_maps
            {'worker1': {device(type='cuda', index=0): device(type='cuda', index=1)}}
        """
        mine = self.device_maps.setdefault(to, {})
        for here, there in device_map.items():
            source, target = _device(here), _device(there)
            if mine.get(source, target) != target:
                raise UsageError(f"{source} is already mapped to {mine[source]} on worker {to!r}")
            if any(there == target for here, there in mine.items() if here != source):
                raise UsageError(f"two devices are mapped to {target} on worker {to!r}: each needs one of its own")
            mine[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Sets ``devices``, as in torch. telegrad does not need it.

        Args:
            devices (list): Devices of this worker, as int, str or ``torch.device``.

        Raises:
            UsageError: torch does not know one of them.
        """
        self.devices = [_device(device) for device in devices]

    def secret_bytes(self) -> bytes | None:
        """Returns the job's secret: that of the options, or else of the environment variable ``TELEGRAD_SECRET``.

        Returns:
            The secret as bytes, or None if there is none.
        """
        secret = self.secret if self.secret is not None else os.environ.get(SECRET_VARIABLE)
        if isinstance(secret, str):
            secret = secret.encode()
        return secret or None

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "secret"}
        return f"RpcBackendOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def warn_of_short_secret(secret: bytes | None) -> None:
    if secret is not None and len(secret) < MIN_SECRET:
        log.warning(
            "the secret has %d characters only: a process that can read the rendezvous can find it by guessing. Use at "
            'least %d random ones, as from: python -c "import secrets; print(secrets.token_hex(32))"',
            len(secret),
            MIN_SECRET,
        )


_warned_of: set[str] = set()


def warn_of_unknown_variables() -> None:
    """Warns once of each environment variable that begins like an option but is none."""
    for variable in sorted(os.environ.keys() - _warned_of):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in _VARIABLES or name in _OWN_VARIABLES:
            continue
        _warned_of.add(variable)
        nearest = difflib.get_close_matches(name.upper(), _VARIABLES, n=1)
        meant = nearest or _VARIABLES
        log.warning(
            "the environment variable %s is ignored: telegrad knows no such option. %s %s",
            variable,
            "Did you mean" if nearest else "Known are",
            ", ".join(_PREFIX + each for each in meant) + ("?" if nearest else ""),
        )


def _option(
    name: str,
    value: Any,
    default: Any,
    parse: Callable[[str], Any],
    check: Callable[[str, Any], None] = lambda name, value: None,
) -> Any:
    """The value that was given, or else that of the environment, or else the default."""
    if value is not UNSET:
        check(name, value)
        return value
    variable = _PREFIX + name.upper()
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        value = parse(text)
        check(name, value)
    except ValueError as error:
        raise UsageError(f"the environment variable {variable} cannot be {text!r}: {error}") from None
    return value


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive number, not {value!r}")


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UsageError(f"{name} must be a number of seconds, not {value!r}")


def _check_heartbeat(name: str, value: Any) -> None:
    _check_seconds(name, value)
    if value == 0:
        raise UsageError(f"{name} must be more than 0 seconds")


def _check_port(name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise UsageError(f"{name} must be a number from 0 to 65535, not {value!r}")


def _check_transports(name: str, value: Any) -> None:
    if not value or set(value) - set(TRANSPORTS):
        raise UsageError(f"{name} must be of {', '.join(TRANSPORTS)}, not {list(value)!r}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _yes_or_no(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return values[text.lower()]
    except KeyError:
        raise ValueError("it must be 0 or 1") from None


def _device(device: Device) -> torch.device:
    """The device that was given.  A number means a device of the accelerator; torch raises if there is none."""
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
