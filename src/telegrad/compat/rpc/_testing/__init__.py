"""Stands in for ``torch.distributed.rpc._testing``, which registers its faulty backend when it is imported."""

from telegrad.compat.rpc.faulty import FaultyTensorPipeAgent as FaultyTensorPipeAgent
from telegrad.compat.rpc.faulty import FaultyTensorPipeRpcBackendOptions as FaultyTensorPipeRpcBackendOptions
from telegrad.compat.rpc.faulty import register

register()


def is_available() -> bool:
    return True
