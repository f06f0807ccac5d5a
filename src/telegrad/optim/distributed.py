"""An optimizer whose parameters live on many workers.

It is driven from one worker.  Each owner has an ordinary ``torch.optim`` optimizer for its own parameters, and a step
is one call to each owner, all at the same time.  Settings such as a learning rate are sent with the next step, so that
any ``torch.optim.lr_scheduler`` works.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad.errors import UsageError
from telegrad.optim import local
from telegrad.optim.fanout import ask_all, by_owner, check_context, checked
from telegrad.optim.local import Group, LocalOptimizer


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimises parameters that live on many workers, with any optimizer of ``torch.optim``.

    It is made on one worker and driven from there. Each owner of parameters gets an ordinary optimizer for its own
    parameters, and a step is one call to each owner, all at the same time. Gradients come from an autograd context;
    ``.grad`` is left as it was.

    It is a ``torch.optim.Optimizer``. Learning rates and other settings are in ``param_groups``: what a program, or a
    scheduler of ``torch.optim.lr_scheduler``, changes there is sent with the next step. Its state is with the
    owners: ``state`` is empty, and :meth:`state_dict` collects it. It cannot be sent to another worker.

    Several drivers may have optimizers for the same parameters: steps on one worker come one after the other. With
    several drivers a step may use parameters that another driver has just changed, as usual with asynchronous training.

    Args:
        optimizer_class (type): A class of ``torch.optim``, or any other that takes parameters and options in the same
            way. A class that is not torch's own is sent to the owners as any class is.
        params_rref (iterable): RRefs to the parameters, as ``RemoteModule.remote_parameters()`` gives them, or groups
            of them: ``[{"params": [...], "lr": 0.1}, ...]``.
        *args (Any): More positional arguments for the class, on every owner.
        **kwargs (Any): Options for the class, such as ``lr``, on every owner.

    Raises:
        UsageError: A parameter is no RRef to a tensor, there are none, or ``optimizer_class`` is no class.
        Exception: What an owner raised, such as a ``WorkerLostError`` or the error of an option.
        WorkersFailedError: Several owners failed.

    Example::

        >>> # on worker0, in a job with worker1
        >>> from telegrad.nn import RemoteModule
        >>> from telegrad.optim import DistributedOptimizer
        >>> model = RemoteModule("worker1", torch.nn.Linear, args=(1, 1))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.3)
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> for _ in range(40):
        ...     with autograd.context() as context_id:
        ...         loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1)
        ...         autograd.backward(context_id, [loss])
        ...         optimizer.step(context_id)
        >>> bool(loss < 0.01)
        True
    """

    # The base class is there for torch's schedulers, which check the type.  Its constructor is not called: it takes
    # tensors.
    def __init__(
        self, optimizer_class: Any, params_rref: Iterable[RRef[Tensor] | Group], *args: Any, **kwargs: Any
    ) -> None:
        kind = _checked_class(optimizer_class)
        groups = _groups(params_rref)
        self._parameters: list[RRef[Tensor]] = [rref for group in groups for rref in group["params"]]
        if not self._parameters:
            raise UsageError("DistributedOptimizer was given no parameters")
        self._of_owner = by_owner(self._parameters)
        shares = {owner: _share(groups, owner) for owner in self._of_owner}
        made = ask_all(local.make, {owner: (kind, share, args, kwargs) for owner, share in shares.items()})
        self._locals: dict[str, RRef[LocalOptimizer]] = {owner: reference for owner, (reference, _) in made.items()}
        self.defaults, settings = next(iter(made.values()))[1]
        self.param_groups = [
            {"params": group["params"], **chosen} for group, chosen in zip(groups, settings, strict=True)
        ]
        self._known = self._settings()  # to the owners
        self.state = {}  # type: ignore[assignment]  # it is with the owners: see state_dict
        self._kept = 0  # gradients that the owners keep for the next step
        # What the base class would have made; its hooks of states and of loading are not offered.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the optimizers of the owners.

        There is one for each owner, in the order in which the owners first occur among the parameters.
        """
        return list(self._locals.values())

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Makes one step on all owners, at the same time, with the gradients of a context.

        It takes the gradients that :meth:`accumulate` has kept as well. Parameters without a gradient stay as they are,
        and so do those of owners that took no part in the context. It returns when all owners are done.

        Args:
            context_id (int, optional): The context, inside of its ``with`` block. It may be left out after
                :meth:`accumulate`.

        Raises:
            UsageError: No parameter has a gradient in the context, which is mostly the wrong context; or it has ended.
            Exception: What an owner raised, such as ``WorkerLostError``. The other owners have made their step.
            WorkersFailedError: Several owners failed; its ``errors`` has them by name.
        """
        if context_id is None and not self._kept:
            raise UsageError("step() needs a context: step(context_id), or accumulate(context_id) before it")
        if context_id is not None:
            check_context(context_id)
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (context_id,), {})
        settings = self._settings()
        changes = [
            {key: value for key, value in new.items() if not _same(value, old.get(key))}
            for new, old in zip(settings, self._known, strict=True)
        ]
        if not any(changes):
            changes = []
        others = self._locals.copy()
        mine = others.pop(current_worker().name, None)
        counts = ask_all(
            local.step,
            {owner: (own, context_id, changes) for owner, own in others.items()},
            own=None if mine is None else partial(local.step, mine, context_id, changes),
        )
        self._known, self._kept = settings, 0
        if not any(counts.values()):
            self._had_no_gradients(context_id)
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (context_id,), {})

    def _had_no_gradients(self, context_id: int | None) -> None:
        raise UsageError(f"nothing to step with: no parameter has a gradient in {self._describe(context_id)}")

    def accumulate(self, context_id: int) -> None:
        """Keeps the gradients of a context for the next step, so that one step can use several contexts.

        The gradients add up, so scale the losses as you would in one process.

        Args:
            context_id (int): The context, inside of its ``with`` block.

        Raises:
            UsageError: No parameter has a gradient in the context, or it has ended.
            Exception: What an owner raised.
            WorkersFailedError: Several owners failed.

        Example::

            >>> # on worker0, in a job with worker1
            >>> from telegrad.optim import DistributedOptimizer
            >>> weight = rpc.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
            >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
            >>> for factor in (1.0, 2.0):
            ...     with autograd.context() as context_id:
            ...         autograd.backward(context_id, [(factor * weight.to_here()).sum()])
            ...         optimizer.accumulate(context_id)
            >>> optimizer.step()
            >>> weight.to_here().tolist()
            [-2.0, -2.0]
        """
        check_context(context_id)
        counts = ask_all(local.accumulate, {owner: (own, context_id) for owner, own in self._locals.items()})
        if not any(counts.values()):
            raise UsageError(f"nothing to keep: no parameter has a gradient in {self._describe(context_id)}")
        self._kept += sum(counts.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that :meth:`accumulate` has kept.

        Gradients of contexts need no zeroing: each context has its own.

        Args:
            set_to_none (bool, optional): Accepted as in torch, and not used.
        """
        ask_all(local.forget, {owner: (own,) for owner, own in self._locals.items()})
        self._kept = 0

    def add_param_group(self, param_group: Group) -> NoReturn:
        """Is not offered: the parameters are fixed when the optimizer is made.

        Args:
            param_group (dict): What torch's method takes.

        Raises:
            UsageError: Always. Make a new optimizer, with all groups.
        """
        raise UsageError("a DistributedOptimizer keeps its parameters: make a new one, with all groups")

    def _describe(self, context_id: int | None) -> str:
        which = ", ".join(f"{indices} on {owner!r}" for owner, indices in self._of_owner.items())
        return f"context {context_id} (parameters {which})"

    def _settings(self) -> list[Group]:
        """As they are now: a rate that is a tensor may be changed in place later."""
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.param_groups
        ]

    # --- saving and loading -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Collects the state of all owners, in the form that an optimizer of one process has.

        Parameters are numbered in the order in which they were given, whichever worker owns them. So the state can be
        loaded by an optimizer of one process, or by a DistributedOptimizer with the same parameters on other workers.
        :func:`telegrad.checkpoint.save` needs no such copy: each owner writes its own part.

        Returns:
            A dict with ``"state"`` and ``"param_groups"``. The tensors are copies.

        Raises:
            Exception: What an owner raised.
            WorkersFailedError: Several owners failed.
        """
        states = ask_all(local.get_state, {owner: (own,) for owner, own in self._locals.items()})
        numbers = iter(range(len(self._parameters)))
        groups = [
            {**setting, "params": [next(numbers) for _ in group["params"]]}
            for setting, group in zip(self._settings(), self.param_groups, strict=True)
        ]
        state = {self._of_owner[owner][place]: each for owner, own in states.items() for place, each in own.items()}
        return {"state": {number: state[number] for number in sorted(state)}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave, here or in one process, on any placement of the same parameters.

        Args:
            state_dict (dict): The state.

        Raises:
            UsageError: The groups have other numbers of parameters. Then nothing was changed.
            Exception: What an owner raised.
            WorkersFailedError: Several owners failed.
        """
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes, given = [len(group["params"]) for group in self.param_groups], [len(group["params"]) for group in groups]
        if sizes != given:
            raise UsageError(f"this optimizer has groups of {sizes} parameters, but the state is of groups of {given}")
        numbers = [number for group in groups for number in group["params"]]
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        shares = {
            owner: {place: state[numbers[i]] for place, i in enumerate(indices) if numbers[i] in state}
            for owner, indices in self._of_owner.items()
        }
        ask_all(local.set_state, {owner: (own, shares[owner], settings) for owner, own in self._locals.items()})
        self.param_groups = [
            {"params": group["params"], **setting} for group, setting in zip(self.param_groups, settings, strict=True)
        ]
        self._known = self._settings()

    def __getstate__(self) -> NoReturn:
        raise UsageError("a DistributedOptimizer stays where it was made: send its state_dict(), or make another one")

    def __repr__(self) -> str:
        owners = ", ".join(f"{owner}: {len(indices)}" for owner, indices in self._of_owner.items())
        return f"<DistributedOptimizer of {len(self._parameters)} parameters ({owners}), {self._settings()}>"


def _groups(given: Iterable[Any]) -> list[Group]:
    if isinstance(given, RRef | Tensor | dict):
        raise UsageError(f"DistributedOptimizer takes a list of RRefs, or of groups, not a {type(given).__name__}")
    items: Sequence[Any] = list(given)
    if not any(isinstance(item, dict) for item in items):
        return [{"params": checked(items, "DistributedOptimizer")}]
    groups = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or "params" not in item:
            raise UsageError(f'group {index} is no dict with "params": give RRefs, or groups, but not both')
        references = [item["params"]] if isinstance(item["params"], RRef) else item["params"]
        groups.append({**item, "params": checked(references, f"group {index}")})
    return groups


def _checked_class(optimizer: Any) -> Any:
    """The class that the owners make.  Classes of ``torch.optim`` are sent by name, which needs no pickle."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise UsageError(
            f"DistributedOptimizer was given an instance of {kind}, but each owner makes an optimizer of its own: give "
            f"the class and its options, as in DistributedOptimizer({kind}, params_rref, lr=0.1)"
        )
    if not callable(optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer class, such as torch.optim.SGD, not a "
            f"{type(optimizer).__name__}: {optimizer!r}"
        )
    name = getattr(optimizer, "__name__", "")
    return name if getattr(torch.optim, name, None) is optimizer else optimizer


def _share(groups: Sequence[Group], owner: str) -> list[Group]:
    """The parameters of each group that one owner has; also empty groups, so that all owners number them alike."""
    return [{**group, "params": [rref for rref in group["params"] if rref.owner_name() == owner]} for group in groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
