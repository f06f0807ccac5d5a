"""The public functions; they look the current worker up and delegate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._current import current_worker
from telegrad._rref.rref import UNSET_TIMEOUT, RRef
from telegrad.autograd.context import Context, Entered, Scope
from telegrad.autograd.engine import Engine
from telegrad.errors import UsageError

Root = Tensor | RRef[Any]

_AS_IT_IS = nullcontext()


def _engine() -> Engine:
    return current_worker().autograd


def context() -> AbstractContextManager[int]:
    """Makes an autograd context: what crosses between workers inside is recorded for :func:`backward`.

    A context is one forward pass with its backward passes. Inside, calls take the context along: the functions that
    they run, and the calls which those make, belong to it too. Gradients go into the context, on the worker that has
    the leaf, and never into ``.grad``; so nothing needs to be zeroed, and several threads may train at the same time,
    each in a context of its own. When the block ends, every worker forgets the context, its graph and its gradients. So
    :func:`get_gradients` and the step of an optimizer belong inside the block.

    A context belongs to the thread, or the asyncio task, that enters it. Contexts do not nest.

    Returns:
        A context manager. It gives the id of the context, an int, which names the context on all workers.

    Raises:
        UsageError: The thread is in a context already.
        NotInitializedError: This process has no worker.

    Example::

        >>> # in the program of both workers
        >>> weight = torch.tensor([2.0, 5.0], requires_grad=True)
        >>> def scale(tensor):
        ...     return weight * tensor
        >>> def gradient_of_weight(context_id):
        ...     return autograd.get_gradients(context_id)[weight].tolist()
        >>> # on worker0
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        ...     autograd.backward(context_id, [loss])
        ...     print("x here:", autograd.get_gradients(context_id)[x].tolist())
        ...     print("weight there:", rpc.rpc_sync("worker1", gradient_of_weight, args=(context_id,)))
        x here: [2.0, 5.0]
        weight there: [3.0, 4.0]
    """
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
    """Computes the gradients of the roots on every worker that took part, into the context.

    It runs through all calls of the context that lead to the roots and blocks until the gradients are there on all
    workers; :func:`get_gradients` gives them. They equal those that one process would compute: every node runs once,
    and every hook of a tensor fires once, with the whole gradient. Several calls of ``backward`` in one context add up.

    If it fails anywhere, the reason is raised here, and the pass ends on every worker. The context then has the
    gradients that had been computed by then, so do not use them.

    Args:
        context_id (int): What ``with context() as context_id`` gave.
        roots (list): Tensors, or RRefs to tensors, to start from. Each is a scalar, or has a gradient in
            ``grad_tensors``.
        retain_graph (bool, optional): If True, the graph stays, so that ``backward`` can run through it again (default:
            False).
        grad_tensors (list, optional): For each root its gradient, or None for a scalar one (default: all are scalars).
        mode (str, optional): ``"smart"`` finds out which tensors that were sent get a gradient, where that makes a
            difference: results that are not used need no care. ``"fast"`` assumes, as torch does, that all do, and
            raises ``MissingGradientError`` if one does not (default: ``"smart"``).
        create_graph (bool, optional): If True, the gradients have a graph of their own, across workers, for gradients
            of gradients; it implies ``retain_graph`` (default: False).
        timeout (float, optional): Seconds that it may take; 0 means no limit. The default is ``rpc_timeout`` of the
            options.

    Raises:
        UsageError: The context is not known here or has ended, a root needs no gradient or is no scalar.
        RpcTimeoutError: It took too long; the text tells what was waited for, and from which worker.
        WorkerLostError: A worker that is needed was lost.
        MissingGradientError: With ``mode="fast"``, a tensor that was sent got no gradient.
        Exception: What torch, or a function with a backward of its own, raised on any worker. For example, torch's
            ``RuntimeError`` for a second backward without ``retain_graph``.

    Example::

        >>> # on worker0, in a job with worker1
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.mul, args=(x, x))
        ...     unused = rpc.rpc_sync("worker1", torch.neg, args=(x,))
        ...     autograd.backward(context_id, [y], grad_tensors=[torch.tensor([1.0, 10.0])])
        ...     print(autograd.get_gradients(context_id)[x])
        tensor([ 2., 40.])
    """
    worker = current_worker()
    engine = worker.autograd
    known = engine.registry.get(context_id, engine.passes.name_of)
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
    """Returns the gradients that leaves of this worker got in a context.

    To see those of another worker, call a function there that calls this.

    Args:
        context_id (int): What ``with context() as context_id`` gave. Inside a function that runs for another worker,
            take it as an argument.

    Returns:
        A dict from each leaf to its gradient. It is a new one each time; the tensors in it are those of the context. It
        has no entry for leaves that got no gradient.

    Raises:
        UsageError: No such context is known on this worker: it has ended, or none of its calls has come here.
        NotInitializedError: This process has no worker.

    Example::

        >>> # on worker0, in a job with worker1
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.sum, args=(3 * x,))
        ...     autograd.backward(context_id, [loss])
        ...     autograd.get_gradients(context_id)
        {tensor([1., 1.], requires_grad=True): tensor([3., 3.])}
    """
    engine = _engine()
    return engine.registry.get(context_id, engine.passes.name_of).gradients()


def is_available() -> bool:
    """Tells whether distributed autograd can be used, for programs that ask torch the same.

    Returns:
        True.
    """
    return True


def debug_info() -> dict[str, Any]:
    """Describes the contexts and backward passes that this worker knows, for people to read.

    The keys and texts may change between versions.

    Returns:
        A dict with the contexts, the passes that run, and the numbers of sends and recvs: of messages whose tensors
        need a gradient.

    Raises:
        NotInitializedError: This process has no worker.

    Example::

        >>> autograd.debug_info()
        {'contexts': [], 'passes': [], 'sends': 0, 'recvs': 0}
    """
    engine = _engine()
    contexts = list(engine.registry)
    return {
        "contexts": [repr(each) for each in contexts],
        "passes": [repr(each) for each in engine.passes],
        "sends": sum(len(each.sends) for each in contexts),
        "recvs": sum(each.recvs for each in contexts),
    }
