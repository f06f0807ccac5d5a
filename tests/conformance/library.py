"""Puts the library that is tested in the place of torch's modules.

In the worker, from which the children of tests are forked, and with spawn in the children themselves: each imports
``cases``, which begins with this.  It must happen before a suite is imported, as suites take names from
``torch.distributed`` when they are.
"""

from __future__ import annotations

import importlib
import sys
from typing import Literal, get_args

from .suites import SUITES

Library = Literal["telegrad", "torch", "none"]
LIBRARIES = get_args(Library)


def put_in_place(library: Library) -> None:
    """telegrad: its own stand-ins, and torch's C++ sealed off.  torch: as it is.  none: for tests without torch."""
    if library != "telegrad":
        return
    import torch.distributed.nn
    import torch.distributed.optim
    import torch.distributed.rpc

    from .seal import Entries

    if early := [suite.module for suite in SUITES.values() if suite.module in sys.modules]:
        raise RuntimeError(f"imported before telegrad was in place: {', '.join(early)}")
    theirs, entries = torch.distributed.rpc.rpc_sync, Entries()
    importlib.import_module("telegrad.compat").install()
    if importlib.import_module("torch.distributed.rpc").rpc_sync is theirs:
        raise RuntimeError("telegrad.compat.install() left torch.distributed.rpc in its place")
    entries.seal()
