"""The defaults of ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta

from telegrad._rref.rref import UNSET_TIMEOUT as UNSET_RPC_TIMEOUT
from telegrad.rpc.api import DEFAULT_SHUTDOWN_TIMEOUT as DEFAULT_SHUTDOWN_TIMEOUT
from telegrad.rpc.options import DEFAULT_INIT_METHOD as DEFAULT_INIT_METHOD
from telegrad.rpc.options import DEFAULT_THREADS as DEFAULT_NUM_WORKER_THREADS
from telegrad.rpc.options import DEFAULT_TIMEOUT as DEFAULT_RPC_TIMEOUT_SEC

DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)  # of a process group that telegrad does not need

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]
