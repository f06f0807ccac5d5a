"""Programs written for ``torch.distributed.rpc``, ``.autograd``, ``.optim.DistributedOptimizer`` and
``.nn.RemoteModule``, unedited, on telegrad.

* ``telegrad compat program.py args…``, or ``python -m telegrad.compat``: runs one, in all its processes
* :func:`install`: does it from code, before the program imports what it uses
* :mod:`rpc`, :mod:`autograd`, :mod:`optim`, :mod:`nn`: what stands in for torch's modules

Inside: ``error_texts`` (torch's texts for our errors), ``futures``, ``rref``, ``worker`` (what torch's do differently),
``graph_view`` (contexts as torch shows them), ``profiling``; ``installing``, ``children``, ``site`` (how the modules
get into a program and its children).  Private names of torch live here and not in the core; ``rpc``, ``autograd`` and
``nn`` have tables of them.

What is not supported raises an error that says what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.compat.installing import install as install

__all__ = ["install"]


def __getattr__(name: str) -> Any:
    if name == "install":  # it imports torch, which the command need not
        from telegrad.compat.installing import install

        return install
    raise AttributeError(f"module 'telegrad.compat' has no attribute {name!r}")
