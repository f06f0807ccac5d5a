"""Distributed autograd for PyTorch: call functions on other machines, and run one backward through all of them.

What a program uses::

    from telegrad import rpc      # init_rpc, rpc_sync, rpc_async, remote, RRef, shutdown: torch.distributed.rpc's names
    from telegrad import autograd # context, backward, get_gradients: torch.distributed.autograd's names
    from telegrad import optim    # DistributedOptimizer, clipping
    from telegrad import nn       # RemoteModule
    from telegrad import checkpoint  # save and load what lives on many workers
    from telegrad import errors   # what all of this may raise
    from telegrad import compat   # programs written for torch.distributed.rpc, unedited
    from telegrad import testing  # many workers in one process, and declared faults

What it is made of; a module imports only what stands above it::

    errors, _ids    the exceptions; the ids of workers, calls and references
    _wire/          messages, and how they and the values in them become bytes
    _transport/     sockets, TLS, identity, receive memory, shared memory of one host
    _core/          the data plane: links, pending calls, threads
    _current        which worker the running code belongs to
    _agent/         one worker's messages: sending them, and running what they ask for
    _rref/          references to values on other workers
    autograd/       gradients through calls
    _call_arguments the callable and the arguments of a call
    _worker         one worker: its agent, its references and its autograd engine
    rpc/            the public functions, the options, how the workers of a job find each other
    optim/          the optimizer over many workers
    nn/             modules on other workers
    checkpoint/     saves and restores all of it
    compat/         torch's names, private ones too, and how they get into a program
    launch/, cli    the ``telegrad`` command
    testing/        workers in one process

``docs/design.md`` describes how it works.

Nothing is imported before it is used, so that the ``telegrad`` command starts without loading torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad import autograd as autograd
    from telegrad import checkpoint as checkpoint
    from telegrad import compat as compat
    from telegrad import errors as errors
    from telegrad import nn as nn
    from telegrad import optim as optim
    from telegrad import rpc as rpc
    from telegrad import testing as testing

    __version__: str

__all__ = ["__version__", "autograd", "checkpoint", "compat", "errors", "nn", "optim", "rpc", "testing"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return importlib.metadata.version("telegrad")
        except importlib.metadata.PackageNotFoundError:
            return "0+unknown"  # running from a source tree
    if name in __all__:
        return importlib.import_module(f"telegrad.{name}")
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
