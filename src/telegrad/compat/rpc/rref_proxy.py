"""``torch.distributed.rpc.rref_proxy``: what ``rref.rpc_sync()`` gives."""

from telegrad.compat.rref import _Proxy as RRefProxy

__all__ = ["RRefProxy"]
