"""``DistributedDataParallel`` in a backward across workers.

Its reducer has hooks on the AccumulateGrad nodes of its parameters, which a pass captures and does not run.  So the
gradients of such leaves are held back until no more can come from this worker's graph.  Then all their AccumulateGrad
nodes run in one call of torch's engine: the reducer sees each of them once, averages over its process group, and leaves
the average in ``.grad``, from where it goes into the context.

    units of this worker ──▶ held back ──▶ AccumulateGrad ──▶ reducer ──▶ .grad ──▶ context
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from telegrad._torch import (
    is_first_static_backward,
    is_ignored_by_ddp,
    reduce_static_graph,
    run_engine,
    take_first_static_backward,
    tensor_hooks,
)
from telegrad.autograd.context import Context, add_up
from telegrad.errors import UsageError

#: The DDP modules of this process, in the order in which they were found.  Replaced as a whole, under the lock.
_modules: list[weakref.ref[DistributedDataParallel]] = []
_lock = threading.Lock()


def watch() -> RemovableHandle:
    """Finds the DDP modules that exist, and notes each new one until the handle is removed.

    A DDP module registers the module that it wraps as its child, which torch tells to a registration hook.  The modules
    that were made before are found among the objects that refer to the class; there are none without a process group.
    """
    handle = register_module_module_registration_hook(_on_registration)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for each in gc.get_referrers(*_with_subclasses(DistributedDataParallel)):
            if issubclass(type(each), DistributedDataParallel):  # isinstance would ask a proxy for its class
                _note(each)
    return handle


def _on_registration(module: torch.nn.Module, name: str, child: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        _note(module)


def _note(module: DistributedDataParallel) -> None:
    global _modules
    with _lock:
        alive = [reference for reference in _modules if reference() is not None]
        if not any(reference() is module for reference in alive):
            alive.append(weakref.ref(module))
        _modules = alive


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    found = [kind]
    for subclass in kind.__subclasses__():
        found += _with_subclasses(subclass)
    return found


def reduced_parameters() -> dict[int, DistributedDataParallel]:
    """By the id of a parameter, the module that reduces its gradient."""
    if not _modules:
        return {}
    modules = [module for reference in _modules if (module := reference()) is not None and hasattr(module, "reducer")]
    return {id(parameter): module for module in modules for parameter in _parameters(module)}


def _parameters(module: DistributedDataParallel) -> list[Tensor]:
    """Those that the module reduces."""
    return [each for each in module.parameters() if each.requires_grad and not is_ignored_by_ddp(each)]


class Swapping:
    """Gives one user at a time ``.grad`` of a parameter, for the gradients of a context.

    A step or a hook is short, and holds the lock of the worker: ``with swapping:``.  A reduction waits for other
    processes, which may wait for a step here, so it must not hold that lock: its parameters are ``lent`` to it.  A step
    or hook that needs ``.grad`` of these waits for their return with the lock released: ``with swapping.of(...):``.
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
        """Inside, the lock is held, and none of these is lent to a reduction."""
        with self._lock:
            if self._lent:
                self._wait_for({id(each) for each in parameters})
            yield

    @contextmanager
    def lent(self, things: Sequence[Any]) -> Iterator[None]:
        """Inside, no other thread uses any of these; the lock is not held."""
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
    """The gradients of the parameters of one module in one pass on one worker."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.waits_for: set[Any] = set()  # jobs that may bring more
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        # A module with a static graph reduces nothing before the end of its first backward, by a callback that it would
        # add to the next call of torch's engine; but that call may come before the gradients do.
        self._first = is_first_static_backward(module)
        if self._first:
            take_first_static_backward(module)
        self._group = _move_group_last(module)

    def __bool__(self) -> bool:
        """Whether there is anything to reduce."""
        return bool(self._gradients)

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        known = self._gradients.get(id(leaf))
        self._gradients[id(leaf)] = (leaf, add_up(known[1], gradient) if known is not None else gradient)

    def run(self, context: Context, swapping: Swapping) -> None:
        """Waits for the other processes of the module's group."""
        parameters = _parameters(self.module)
        # The group, too: processes match its collectives by their order, so two modules must not mix theirs.
        with swapping.lent([*parameters, self._group]):
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

    def _hand_over(self) -> None:
        module = self.module
        leaves = [leaf for leaf, _ in self._gradients.values()]
        gradients = [gradient for _, gradient in self._gradients.values()]
        self._gradients.clear()
        # Tensor hooks have fired when the gradient was captured, and would again when the node runs.
        hooks = [(now, dict(now)) for leaf in leaves if (now := tensor_hooks(leaf))]
        for now, _ in hooks:
            now.clear()
        # With ``find_unused_parameters`` the reducer has looked for them itself, but its graph ends at every recv.
        if module.find_unused_parameters and module.require_forward_param_sync and not module.static_graph:
            with torch.enable_grad():
                module.reducer.prepare_for_backward([leaf.view_as(leaf) for leaf in leaves])
        try:
            edges = tuple(get_gradient_edge(leaf) for leaf in leaves)
            run_engine(edges, tuple(gradients), False, False, (), True, accumulate_grad=True)
            if self._first:
                reduce_static_graph(module)
        finally:
            for now, kept in hooks:
                now.update(kept)


class Reductions:
    """The reductions of one pass on one worker."""

    def __init__(self, jobs: Iterable[Any], reduced: dict[int, DistributedDataParallel], create_graph: bool) -> None:
        """``reduced``: see ``reduced_parameters``."""
        self._by_module: dict[int, Reduction] = {}
        self._by_leaf: dict[int, Reduction] = {}
        for job in jobs:
            for leaf in job.unit.leaves:
                module = reduced.get(id(leaf.variable))
                if module is None:
                    continue
                if create_graph:
                    raise UsageError("create_graph does not go through DistributedDataParallel, here as in torch")
                if id(module) not in self._by_module:
                    self._by_module[id(module)] = Reduction(module)
                reduction = self._by_leaf[id(leaf.variable)] = self._by_module[id(module)]
                reduction.waits_for.add(job)

    def hold_back(self, leaf: Tensor, gradient: Tensor) -> bool:
        """Adds to the gradient of a leaf that a module reduces; False if none does."""
        reduction = self._by_leaf.get(id(leaf))
        if reduction is not None:
            reduction.add(leaf, gradient)
        return reduction is not None

    def after(self, jobs: Iterable[Any]) -> list[Reduction]:
        """These jobs are done; returns the reductions that can get no more gradients and have some."""
        ready = []
        for key, reduction in list(self._by_module.items()):
            reduction.waits_for.difference_update(jobs)
            if not reduction.waits_for:
                ready.append(self._by_module.pop(key))
        return [reduction for reduction in ready if reduction]

    def take_rest(self) -> list[Reduction]:
        """The pass is over: no job will bring more."""
        rest, self._by_module = self._by_module, {}
        return [reduction for reduction in rest.values() if reduction]

    def __bool__(self) -> bool:
        """Whether gradients are held back."""
        return any(self._by_module.values())


def _move_group_last(module: DistributedDataParallel) -> Any:
    """Moves ``process_group`` to the end of the module's attributes, which Python frees in their order; returns it.

    The destructor of a gloo group joins gloo's threads, and such a thread may need the GIL to free a tensor that it has
    just averaged.  A group that Python frees releases the GIL first.  The reducer does not, if it holds the last
    reference to the group: torch's own test of DDP under distributed autograd then hangs, with torch's RPC in 1 of 20
    runs, with telegrad's threads in 1 of 2.
    """
    attributes = module.__dict__
    with _lock:
        if list(attributes).index("process_group") < list(attributes).index("reducer"):
            attributes["process_group"] = attributes.pop("process_group")
        return attributes["process_group"]
