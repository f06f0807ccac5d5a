"""Calls a function on all owners of some parameters at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from telegrad._core.interface import Pending
from telegrad._current import current_worker
from telegrad._rref.rref import UNSET_TIMEOUT, RRef
from telegrad.errors import RpcTimeoutError, UsageError, WorkerLostError, WorkersFailedError


def checked(parameters: Iterable[Any], what: str) -> list[RRef[Tensor]]:
    """The parameters as a list; raises ``UsageError`` unless all are RRefs."""
    if isinstance(parameters, RRef | Tensor):
        raise UsageError(f"{what} takes a list of RRefs, not a single {type(parameters).__name__}")
    found = list(parameters)
    for index, parameter in enumerate(found):
        if not isinstance(parameter, RRef):
            raise UsageError(
                f"parameter {index} is a {type(parameter).__name__}, not an RRef: {what} takes RRefs, "
                "such as RRef(parameter) made by the owner, or what RemoteModule.remote_parameters() gives"
            )
    return found


def by_owner(parameters: Sequence[RRef[Tensor]]) -> dict[str, list[int]]:
    """For each owner, the indices of its parameters."""
    owners: dict[str, list[int]] = {}
    for index, parameter in enumerate(parameters):
        owners.setdefault(parameter.owner_name(), []).append(index)
    return owners


def check_context(context_id: Any) -> None:
    """Raises ``UsageError`` on the driver, so that not every owner raises the same."""
    if not isinstance(context_id, int) or isinstance(context_id, bool):
        raise UsageError(f"a context is named by the number that `with context() as number` gives, not {context_id!r}")
    current_worker().autograd.registry.check(context_id)


def ask_all(
    function: Callable[..., Any],
    arguments: Mapping[str, tuple[Any, ...]],
    timeout: float = UNSET_TIMEOUT,
    own: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Calls a function on all these workers at the same time, and waits for all; their errors become one.

    ``own`` runs on this thread meanwhile, for this worker.
    """
    here = current_worker()
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    calls: dict[str, Pending] = {}
    try:
        for worker, args in arguments.items():
            try:
                calls[worker] = here.start_call(worker, function, args, timeout=timeout)
            except (WorkerLostError, RpcTimeoutError) as error:
                errors[worker] = error
        if own is not None:
            _note(here.name, own, results, errors)
        for worker, call in list(calls.items()):
            _note(worker, partial(here.agent.wait, call), results, errors)
            del calls[worker]
    finally:
        for call in calls.values():  # they will not be waited for: an argument could not be sent, or a Ctrl-C came
            here.agent.give_up(call)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise WorkersFailedError(errors)
    return results


def _note(worker: str, ask: Callable[[], Any], results: dict[str, Any], errors: dict[str, Exception]) -> None:
    try:
        results[worker] = ask()
    except Exception as error:
        errors[worker] = error


def local_tensors(references: Sequence[RRef[Any]]) -> list[Tensor]:
    """On the owner: the tensors of these references."""
    tensors = []
    for reference in references:
        value = reference.local_value()
        if not isinstance(value, Tensor):
            raise UsageError(f"{reference!r} refers to a {type(value).__qualname__}, not to a tensor")
        tensors.append(value)
    return tensors
