"""Optimise parameters that live on many workers.

* :class:`DistributedOptimizer`: any ``torch.optim`` optimizer, run by each owner on its own parameters
* :func:`clip_grad_norm_`, :func:`clip_grad_value_`: clip the gradients of a context, on all owners as one
"""

from telegrad.optim.clipping import clip_grad_norm_, clip_grad_value_
from telegrad.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_", "clip_grad_value_"]
