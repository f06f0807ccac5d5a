"""Clipping the gradients of a context, on all owners as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad._wire.callables import export
from telegrad.errors import UsageError
from telegrad.optim.fanout import ask_all, by_owner, check_context, checked, local_tensors
from telegrad.optim.local import gradients_of


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[RRef[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients in a context so that the norm of all of them together is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, over the gradients of parameters on all workers. Call it between ``backward``
    and ``step``. The gradients of the context are replaced, not changed in place.

    Args:
        context_id (int): The context, inside of its ``with`` block.
        params_rref (iterable): RRefs to the parameters.
        max_norm (float): The largest norm.
        norm_type (float, optional): The order of the norm; ``inf`` for the largest element (default: 2).
        error_if_nonfinite (bool, optional): If True, a norm that is infinite or NaN is an error (default: False).

    Returns:
        The norm before, as a tensor of float64.

    Raises:
        UsageError: A parameter is no RRef to a tensor, the context has ended, or the norm is not finite.
        Exception: What an owner raised.
        WorkersFailedError: Several owners failed.

    Example::

        >>> # on worker0, in a job with worker1
        >>> from telegrad.optim import clip_grad_norm_
        >>> there = rpc.remote("worker1", torch.ones, args=(1,), kwargs={"requires_grad": True})
        >>> here = torch.ones(1, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [(3 * here + 4 * there.to_here()).sum()])
        ...     norm = clip_grad_norm_(context_id, [rpc.RRef(here), there], max_norm=1.0)
        ...     print(norm, autograd.get_gradients(context_id)[here])
        tensor(5., dtype=torch.float64) tensor([0.6000])
    """
    check_context(context_id)
    parameters = checked(params_rref, "clip_grad_norm_")
    shares = {owner: [parameters[i] for i in indices] for owner, indices in by_owner(parameters).items()}
    norms = ask_all(_norm, {owner: (context_id, share, norm_type) for owner, share in shares.items()})
    total: Tensor = torch.linalg.vector_norm(torch.tensor(list(norms.values()), dtype=torch.float64), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise UsageError(
            f"the norm of order {norm_type:g} of the gradients in context {context_id} is {total.item()}: not clipped"
        )
    factor = max_norm / (total.item() + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        ask_all(_scale, {owner: (context_id, share, factor) for owner, share in shares.items()})
    return total


def clip_grad_value_(context_id: int, params_rref: Iterable[RRef[Tensor]], clip_value: float) -> None:
    """Clamps every element of the gradients in a context to ``[-clip_value, clip_value]``.

    As ``torch.nn.utils.clip_grad_value_``, over the gradients of parameters on all workers. The gradients of the
    context are replaced, not changed in place.

    Args:
        context_id (int): The context, inside of its ``with`` block.
        params_rref (iterable): RRefs to the parameters.
        clip_value (float): The largest absolute value.

    Raises:
        UsageError: A parameter is no RRef to a tensor, or the context has ended.
        Exception: What an owner raised.
        WorkersFailedError: Several owners failed.

    Example::

        >>> # on worker0, in a job with worker1
        >>> from telegrad.optim import clip_grad_value_
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.sum, args=(x * torch.tensor([0.5, -7.0]),))
        ...     autograd.backward(context_id, [loss])
        ...     clip_grad_value_(context_id, [rpc.RRef(x)], 1.0)
        ...     print(autograd.get_gradients(context_id)[x])
        tensor([ 0.5000, -1.0000])
    """
    check_context(context_id)
    parameters = checked(params_rref, "clip_grad_value_")
    shares = {owner: [parameters[i] for i in indices] for owner, indices in by_owner(parameters).items()}
    ask_all(_cut, {owner: (context_id, share, float(clip_value)) for owner, share in shares.items()})


# --- on the owner -----------------------------------------------------------------------------------------------------


def _own(context_id: int, references: Sequence[RRef[Any]]) -> list[tuple[Tensor, Tensor]]:
    """These parameters and their gradients, each once, where there is one."""
    parameters = list(dict.fromkeys(local_tensors(references)))
    found = zip(parameters, gradients_of(context_id, parameters), strict=True)
    return [(parameter, gradient) for parameter, gradient in found if gradient is not None]


@export
def _norm(context_id: int, references: Sequence[RRef[Any]], norm_type: float) -> float:
    values = [_values(gradient) for _, gradient in _own(context_id, references)]
    norms = [torch.linalg.vector_norm(each, norm_type, dtype=_wide(each)) for each in values if each.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0


@export
def _scale(context_id: int, references: Sequence[RRef[Any]], factor: float) -> None:
    context = current_worker().autograd.registry.find(context_id)
    for parameter, gradient in _own(context_id, references):
        assert context is not None
        context.set_gradient(parameter, gradient * factor)


@export
def _cut(context_id: int, references: Sequence[RRef[Any]], value: float) -> None:
    context = current_worker().autograd.registry.find(context_id)
    for parameter, gradient in _own(context_id, references):
        assert context is not None
        if gradient.is_sparse:
            cut = gradient.coalesce()  # the parts of a sum must not be clipped one by one
            cut = torch.sparse_coo_tensor(
                cut.indices(), cut.values().clamp(-value, value), cut.shape, is_coalesced=True, check_invariants=False
            )
        else:
            cut = gradient.clamp(-value, value)
        context.set_gradient(parameter, cut)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which a norm is summed, so that the order of the workers makes no difference."""
    return torch.complex128 if tensor.is_complex() else torch.float64
