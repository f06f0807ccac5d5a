"""Stands in for ``torch.distributed.autograd``: its names, public and private, on a worker of telegrad.

======================================= =====================================================================
torch's private name                    what stands in for it
======================================= =====================================================================
_current_context, _retrieve_context     autograd.context, seen through a DistAutogradContext
_new_context, _release_context          autograd.context.Registry.new, autograd.engine.Engine.drop
_is_valid_context, _get_max_id          autograd.context.Registry
_get_debug_info                         rpc.debugging
_init                                   nothing to do: a worker has its autograd
DistAutogradContext._send_functions     autograd.context.Context.sends, through graph_view
DistAutogradContext._recv_functions     the recvs that CompatWorker has seen, through graph_view
DistAutogradContext._known_worker_ids   autograd.context.Context.workers
======================================= =====================================================================
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType

from torch import Tensor
from torch.autograd.profiler import record_function

from telegrad import autograd
from telegrad._current import current_worker
from telegrad.autograd import is_available as is_available
from telegrad.autograd.context import Context, current_context, enter, leave
from telegrad.compat.error_texts import speaks_as_torch
from telegrad.compat.graph_view import NodeView, recv_view, send_view
from telegrad.compat.profiling import is_profiling
from telegrad.compat.rpc.debugging import autograd_get_debug_info
from telegrad.compat.worker import CompatWorker
from telegrad.errors import TelegradError, UsageError

__all__ = ["backward", "context", "get_gradients", "is_available"]

_MOST_CONTEXTS = (1 << 48) - 1  # of one worker


class DistAutogradContext:
    """A context, as torch's C++ shows it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, NodeView]:
        return {number: send_view(number, send.parts) for number, send in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, NodeView]:
        worker = current_worker()
        seen = worker.recvs.get(self._context, {}) if isinstance(worker, CompatWorker) else {}
        return {number: recv_view(nodes) for number, nodes in seen.items()}

    def _known_worker_ids(self) -> set[int]:
        return set(self._context.workers)

    def __repr__(self) -> str:
        return repr(self._context)


class context:
    """``with context() as context_id:`` what crosses between workers inside is recorded for ``backward``."""

    @speaks_as_torch
    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _release_context(self.autograd_context._context_id())


@speaks_as_torch
def _new_context() -> DistAutogradContext:
    """A new context, current on this thread until it is released."""
    return DistAutogradContext(enter(current_worker().autograd.registry))


def _release_context(context_id: int) -> None:
    """Ends a context, on all workers."""
    leave(context_id)
    current_worker().autograd.drop(context_id)


def _current_context() -> DistAutogradContext:
    context = current_context()
    if context is None:
        raise UsageError("Current thread doesn't have a valid autograd context. Use `with dist_autograd.context()`")
    return DistAutogradContext(context)


@speaks_as_torch
def _retrieve_context(context_id: int) -> DistAutogradContext:
    worker = current_worker()
    return DistAutogradContext(worker.autograd.registry.get(context_id, lambda to: repr(worker.agent.peer(to).name)))


def _is_valid_context(context_id: int) -> None:
    _retrieve_context(context_id)


def _get_max_id() -> int:
    """The highest id that a context of this worker can have."""
    return (current_worker().id << 48) + _MOST_CONTEXTS


def _get_debug_info() -> dict[str, str]:
    return autograd_get_debug_info()


def _init(worker_id: int) -> None:
    """Called by ``init_rpc``, as torch's does; a worker brings its autograd along."""


@speaks_as_torch
def backward(context_id: int, roots: list[Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the roots on every worker, into the context."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError(
            "backward(): incompatible function arguments. It takes the number of a context and a list of tensors, not "
            f"{context_id!r} and {roots!r}"
        )
    known = _retrieve_context(context_id)
    for index, root in enumerate(roots):
        if isinstance(root, Tensor) and not root.requires_grad:
            raise UsageError(f"requires_grad not set on root {index}: nothing that requires it was used to compute it")
        if isinstance(root, Tensor) and root.numel() == 1 and root.grad_fn is None:
            raise UsageError(
                f"root {index} does not have a valid gradient function: it is a leaf, computed from nothing"
            )
    with _profiled(known):
        try:
            autograd.backward(context_id, roots, retain_graph)
        except TelegradError:
            raise
        except Exception as error:
            raise _with_node(error) from error


@contextlib.contextmanager
def _profiled(known: DistAutogradContext) -> Iterator[None]:
    """Under a profiler, the names that torch's events have.

    A recv is a node, which torch's engine profiles.  What comes for a send is handled by any thread, and mostly without
    a node, so a mark stands for it here: one for each message, that takes no time.
    """
    if not is_profiling():
        yield
        return
    with record_function("torch::distributed::autograd::backward"):
        yield
        for _ in known._send_functions():
            with record_function("torch::distributed::autograd::SendRpcBackward"):
                pass


def _with_node(error: Exception) -> Exception:
    """torch makes what a backward raised a RuntimeError, and names the worker by its number."""
    found = re.search(r"This was raised on worker '([^']+)'", str(error))
    worker = current_worker().info(found[1] if found is not None else None)
    return RuntimeError(f"Error on Node {worker.id}: {error}")


@speaks_as_torch
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that this worker's leaves got in that context."""
    return autograd.get_gradients(context_id)
