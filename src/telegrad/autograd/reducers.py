"""``DistributedDataParallel`` in a backward across workers.

Its reducer listens on the AccumulateGrad nodes of its parameters, which a pass captures and does not run.  So what such
leaves get is held back until no more can come from this worker's graph, and then all their AccumulateGrad nodes run in
one call of torch's engine: the reducer sees each of them once, averages over its process group, and leaves the average
in ``.grad``, from where it goes into the context.

    units of this worker ──▶ held back ──▶ AccumulateGrad ──▶ reducer ──▶ .grad ──▶ context
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from telegrad.autograd.context import Context, add_up

#: Seconds before a module goes in which the GIL is free.  The module may take its process group with it, which joins
#: gloo's thread with the GIL held; and if that thread has just averaged a tensor that Python knows, it needs the GIL to
#: let go of it.  In torch alone this hangs in 1 of 20 runs of its own test; with more threads about, in 1 of 2.
_PARTING = 0.02

#: Which module reduces a parameter's gradient.
_reduced_by: Any = WeakIdKeyDictionary()


def _register(module: DistributedDataParallel) -> None:
    for parameter in _parameters(module):
        _reduced_by[parameter] = weakref.ref(module)


def _parameters(module: DistributedDataParallel) -> list[Tensor]:
    """Those that the module reduces."""
    return [each for each in module.parameters() if each.requires_grad and not getattr(each, "_ddp_ignored", False)]


def watch() -> None:
    """From now on every new DDP module is known; those that are there already, too."""
    make = DistributedDataParallel.__init__
    if hasattr(make, "_telegrad"):
        return

    @functools.wraps(make)
    def remember(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _register(self)
        weakref.finalize(self, time.sleep, _PARTING).atexit = False

    remember._telegrad = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = remember  # type: ignore[method-assign]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for each in gc.get_objects():
            if isinstance(each, DistributedDataParallel):
                _register(each)


def any_known() -> bool:
    return bool(_reduced_by.data)


def reducing(leaf: Tensor) -> DistributedDataParallel | None:
    """The module that reduces this leaf's gradient."""
    known = _reduced_by.get(leaf)
    return known() if known is not None else None


class Swapping:
    """Says who may use ``.grad`` of a parameter, for a while, for the gradients of a context.

    A step or a hook is short, and holds the lock of the worker: ``with swapping:``.  A reduction waits for other
    processes, which may wait for a step here, so it must not hold that lock: it has its parameters ``lent``.  Whoever
    needs ``.grad`` of these waits for their return with the lock released: ``with swapping.of(parameters):``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)
        self._lent: set[int] = set()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def of(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the lock is held, and no reduction has any of these."""
        with self._lock:
            if self._lent:
                self._wait_for({id(each) for each in parameters})
            yield

    @contextmanager
    def lent(self, things: Sequence[Any]) -> Iterator[None]:
        """Inside, nobody else has any of these; the lock is not held."""
        own = {id(each) for each in things}
        with self._lock:
            self._wait_for(own)
            self._lent |= own
        try:
            yield
        finally:
            with self._lock:
                self._lent -= own
                self._returned.notify_all()

    def _wait_for(self, wanted: set[int]) -> None:
        self._returned.wait_for(lambda: self._lent.isdisjoint(wanted))


class Reduction:
    """What the parameters of one module get in one pass on one worker."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.waits_for: set[Any] = set()  # jobs that may bring more
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        # A module with a static graph reduces nothing before the end of its first backward, by a callback that it would
        # hang onto the first call of torch's engine that comes by; but then nothing has been handed over yet.
        self._first = bool(module.static_graph and not module._static_graph_delay_allreduce_enqueued)
        if self._first:
            module._static_graph_delay_allreduce_enqueued = True

    def __bool__(self) -> bool:
        """Whether there is anything to reduce."""
        return bool(self._gradients)

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        known = self._gradients.get(id(leaf))
        self._gradients[id(leaf)] = (leaf, add_up(known[1], gradient) if known is not None else gradient)

    def run(self, context: Context, swapping: Swapping) -> bool:
        """Waits for the other processes of the module's group."""
        parameters = _parameters(self.module)
        # The group, too: processes match its collectives by their order, so two modules must not mix theirs.
        with swapping.lent([*parameters, self.module.process_group]):
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            try:
                self._hand_over()
                for parameter in parameters:
                    if parameter.grad is not None:
                        shared = self.module.gradient_as_bucket_view
                        context.add_gradient(parameter, parameter.grad.clone() if shared else parameter.grad)
            finally:
                for parameter, gradient in zip(parameters, before, strict=True):
                    parameter.grad = gradient
        return True

    def _hand_over(self) -> None:
        leaves = [leaf for leaf, _ in self._gradients.values()]
        gradients = [gradient for _, gradient in self._gradients.values()]
        self._gradients.clear()
        hooks = _take_hooks(leaves)
        self._say_what_is_used(leaves)
        try:
            edges = tuple(get_gradient_edge(leaf) for leaf in leaves)
            _engine_run_backward(edges, tuple(gradients), False, False, (), True, accumulate_grad=True)
            if self._first:
                self.module.reducer._delay_all_reduce()  # type: ignore[attr-defined]
        finally:
            for leaf, kept in zip(leaves, hooks, strict=True):
                if kept:
                    leaf._backward_hooks.update(kept)  # type: ignore[union-attr]

    def _say_what_is_used(self, leaves: Iterable[Tensor]) -> None:
        """With ``find_unused_parameters`` the reducer has looked for them itself, but its graph ends at every recv."""
        module = self.module
        if module.find_unused_parameters and module.require_forward_param_sync and not module.static_graph:
            with torch.enable_grad():
                module.reducer.prepare_for_backward([leaf.view_as(leaf) for leaf in leaves])


def _take_hooks(leaves: Iterable[Tensor]) -> list[dict[Any, Any]]:
    """Tensor hooks have fired when the gradient was captured, and would again when the node runs."""
    taken = []
    for leaf in leaves:
        hooks = leaf._backward_hooks
        taken.append(dict(hooks) if hooks else {})
        if hooks:
            hooks.clear()
    return taken
