"""Stands in for what ``torch.distributed.optim`` has for RPC: telegrad's own does as torch's."""

from telegrad.optim import DistributedOptimizer as DistributedOptimizer

__all__ = ["DistributedOptimizer"]
