"""Stands in for what ``torch.distributed.optim`` has for RPC."""

from telegrad.optim import DistributedOptimizer as TelegradOptimizer

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(TelegradOptimizer):
    """As telegrad's, but a step without gradients does nothing, as in torch."""

    def _had_no_gradients(self, context_id: int | None) -> None:
        pass
