"""The public functions; they look the current worker up and delegate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._current import current_worker
from telegrad._rref.rref import UNSET_TIMEOUT, RRef
from telegrad.autograd.context import Context, Entered, Scope
from telegrad.autograd.engine import Engine
from telegrad.errors import UsageError

if TYPE_CHECKING:
    from telegrad._worker import Worker

Root = Tensor | RRef[Any]

_AS_IT_IS = nullcontext()


def _engine() -> Engine:
    return current_worker().autograd


def context() -> AbstractContextManager[int]:
    """``with context() as context_id:`` what crosses between workers inside is recorded for ``backward``."""
    engine = _engine()
    return Entered(engine.registry, engine.drop)


def backward(
    context_id: int,
    roots: Sequence[Root],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    mode: Literal["smart", "fast"] = "smart",
    create_graph: bool = False,
    timeout: float = UNSET_TIMEOUT,
) -> None:
    """Computes the gradients of the roots on every worker, into the context (see :func:`get_gradients`).

    A root is a tensor or an RRef to one.  ``mode="smart"`` finds out which sends get a gradient where it matters;
    ``"fast"`` assumes that all of them do, and fails if one does not.  The timeout is by default that of a call.
    """
    worker = current_worker()
    engine = worker.autograd
    known = _known(worker, context_id)
    if mode not in ("smart", "fast"):
        raise UsageError(f"mode is 'smart' or 'fast', not {mode!r}")
    if type(roots) is not list and (isinstance(roots, (Tensor, RRef)) or not isinstance(roots, Sequence)):
        raise UsageError(f"backward takes a list of roots, not {type(roots).__name__}: backward(context_id, [loss])")
    if not roots:
        raise UsageError("backward was given no roots: backward(context_id, [loss])")
    edges, gradients = _roots(known, roots, grad_tensors)
    # As in torch, a no_grad around it says nothing; but this thread will open what other workers send.
    with _AS_IT_IS if torch.is_grad_enabled() else torch.enable_grad():
        engine.backward(
            known,
            edges,
            gradients,
            retain_graph or create_graph,
            create_graph,
            mode == "fast",
            worker.seconds(timeout),
        )


def _roots(
    context: Context, roots: Sequence[Any], given: Sequence[Tensor | None] | None
) -> tuple[list[GradientEdge], list[Tensor]]:
    """The edges of the roots, and the gradients that enter there."""
    if given is not None and len(given) != len(roots):
        raise UsageError(f"{len(roots)} roots, but {len(given)} grad_tensors")
    edges, gradients = [], []
    for index, root in enumerate(roots):
        if isinstance(root, RRef):
            with Scope(context):
                root = root.to_here()
        if not isinstance(root, Tensor):
            raise UsageError(f"root {index} is a {type(root).__name__}, not a tensor or an RRef to one")
        gradient = given[index] if given is not None else None
        if gradient is None:
            if root.numel() != 1 or root.is_complex():
                what = "is complex" if root.is_complex() else f"has shape {list(root.shape)}"
                raise UsageError(f"root {index} {what}: backward needs a scalar, or grad_tensors of its shape")
            gradient = torch.ones_like(root)
        elif not isinstance(gradient, Tensor) or gradient.shape != root.shape:
            shape = list(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise UsageError(f"root {index} has shape {list(root.shape)}, but its grad_tensor {shape}")
        if not root.requires_grad:
            raise UsageError(
                f"root {index} needs no gradient: nothing that requires one was used to compute it"
                + (", or it was computed inside no_grad" if root.is_leaf else "")
            )
        edges.append(get_gradient_edge(root))
        gradients.append(gradient)
    return edges, gradients


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that this worker's leaves got in that context."""
    return _known(current_worker(), context_id).gradients()


def _known(worker: Worker, context_id: int) -> Context:
    registry = worker.autograd.registry
    context = registry.find(context_id) if type(context_id) is int else None
    return context or registry.get(context_id, lambda to: repr(worker.agent.peer(to).name))


def is_available() -> bool:
    """As in torch, whether distributed autograd can be used: it can."""
    return True


def debug_info() -> dict[str, Any]:
    """The contexts and passes that this worker knows, for people to read."""
    engine = _engine()
    contexts = list(engine.registry)
    return {
        "contexts": [repr(each) for each in contexts],
        "passes": [repr(each) for each in engine.passes],
        "sends": sum(len(each.sends) for each in contexts),
        "recvs": sum(each.recvs for each in contexts),
    }
