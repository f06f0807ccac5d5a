"""Loading, on the driver: all owners read and compare everything before any of them sets anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from telegrad.checkpoint import manifest, tensors
from telegrad.checkpoint.fanout import load_parts, prepare_parts
from telegrad.checkpoint.folder import Folder
from telegrad.checkpoint.json_state import put_together, tensor_names
from telegrad.checkpoint.manifest import Manifest, Thing
from telegrad.checkpoint.stateful import compare_optimizer
from telegrad.checkpoint.targets import Target, prefix_of, targets_of
from telegrad.errors import CheckpointError
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.fanout import ask_all

Groups = list[dict[str, Any]]


class Checkpoint(NamedTuple):
    """What :func:`load` has loaded.

    Attributes:
        step (int): The step of the checkpoint.
        metadata (Any): What was given to ``save`` as ``metadata``.
    """

    step: int
    metadata: Any


def load(
    path: str | os.PathLike[str], things: Mapping[str, Any], step: int | None = None, *, timeout: float = 0.0
) -> Checkpoint:
    """Loads named things from a checkpoint.

    Things are found by their names and tensors by their keys: it does not matter which workers had them when they were
    saved. What the checkpoint has beside these things is left alone. Everything is read and compared on all workers
    before anything is changed. Only a ``load_state_dict`` that raises, or a worker that dies, can come later, when
    others have loaded already.

    Args:
        path (path): The folder that the checkpoints are in, or one checkpoint.
        things (dict): By name, what to load into: the same kinds of things as for :func:`save`.
        step (int, optional): Which checkpoint (default: the one that was saved last).
        timeout (float, optional): Seconds that the owners may take; 0, the default, means no limit.

    Returns:
        A :class:`Checkpoint`: the step and the metadata.

    Raises:
        CheckpointError: The checkpoint is damaged or does not fit; ``problems`` lists everything that is wrong, and
            nothing was changed.
        UsageError: There is no such checkpoint, or an argument makes no sense.
        WorkerLostError: An owner was lost.
        RpcTimeoutError: The owners took longer than ``timeout``.
        WorkersFailedError: Several owners failed.

    Example::

        >>> from telegrad import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint.save("run", {"model": model})
        0
        >>> checkpoint.load("run", {"model": model})
        Checkpoint(step=0, metadata=None)
        >>> checkpoint.load("run", {"model": torch.nn.Linear(3, 1)})
        Traceback (most recent call last):
          ...
        telegrad.errors.CheckpointError: cannot load ...
    """
    targets = targets_of(things, timeout)
    folder = Folder(path).find(step)
    saved = manifest.read(folder)
    with folder.opened() as directory:
        problems, groups = _prepare_here(directory, saved, things)
    asked = {
        owner: (
            folder,
            saved.files,
            [(target, _part(target, saved.things[target.name])) for target in mine if target.name not in problems],
        )
        for owner, mine in targets.items()
    }
    answers = ask_all(prepare_parts, asked, timeout)
    found = [problem for wrong in problems.values() for problem in wrong]
    found += [problem for _, wrong in answers.values() for problem in wrong]
    if found:
        answers.clear()  # frees what the owners have read, even if the program keeps the error
        raise CheckpointError(f"cannot load {folder.path}, and nothing was touched", found)
    ask_all(load_parts, {owner: (ready,) for owner, (ready, _) in answers.items()}, timeout)
    for name, settings in groups.items():
        _set_groups(things[name], settings)
    return Checkpoint(saved.step, saved.metadata)


def read(path: str | os.PathLike[str], name: str, step: int | None = None) -> Any:
    """Reads the state of one thing from a checkpoint; it needs no workers.

    It is for a look at a state, or where ``load`` is too strict: ``model.load_state_dict(checkpoint.read(path,
    "model"), strict=False)``.

    Args:
        path (path): The folder that the checkpoints are in, or one checkpoint.
        name (str): The name of the thing.
        step (int, optional): Which checkpoint (default: the one that was saved last).

    Returns:
        The state, as the thing's ``state_dict`` gave it; that of a ``DistributedOptimizer`` is as if one process had
        it.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no such thing.
        UsageError: There is no such checkpoint.

    Example::

        >>> from telegrad import checkpoint
        >>> checkpoint.save("run", {"model": torch.nn.Linear(2, 1)})
        0
        >>> list(checkpoint.read("run", "model"))
        ['weight', 'bias']
    """
    folder = Folder(path).find(step)
    saved = manifest.read(folder)
    problems = _missing(name, saved)
    if not problems:
        thing = saved.things[name]
        with folder.opened() as directory:
            found, problems = tensors.read(directory, thing.tensors, saved.files)
    if problems:
        raise CheckpointError(f"cannot read {folder.path}", problems)
    return put_together(thing.state, found)


def _missing(name: str, saved: Manifest) -> list[str]:
    return [] if name in saved.things else [f"there is no {name!r} in it, only {', '.join(map(repr, saved.things))}"]


def _prepare_here(
    directory: int, saved: Manifest, things: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, Groups]]:
    """The checks that need no owner: problems by name, and the settings of the groups of optimizers."""
    problems: dict[str, list[str]] = {}
    groups: dict[str, Groups] = {}
    for name, thing in things.items():
        wrong = _missing(name, saved)
        if not wrong and isinstance(thing, DistributedOptimizer):
            wrong = compare_optimizer(name, thing, saved.things[name])
            if not wrong:
                settings = saved.things[name].state["param_groups"]
                found, wrong = tensors.read(directory, _records(settings, saved.things[name]), saved.files)
                groups[name] = [] if wrong else put_together(settings, found)
        if wrong:
            problems[name] = wrong
    return problems, groups


def _part(target: Target, thing: Thing) -> Thing:
    """What one owner needs."""
    if target.share is None:
        if thing.kind != "module" or len(target.prefixes) == 1:
            return thing
        mine = {k: v for k, v in thing.state.items() if prefix_of(k, target.prefixes) in target.references}
        return msgspec.structs.replace(thing, state=mine, tensors=_records(mine, thing))
    numbers = target.share.numbers
    states = thing.state["state"]
    state = {
        "state": {place: states[number] for place, number in enumerate(numbers) if number in states},
        "param_groups": thing.state["param_groups"],
    }
    return msgspec.structs.replace(
        thing,
        state=state,
        tensors=_records(state, thing),
        parameters=[thing.parameters[number] for number in numbers],
    )


def _records(state: Any, thing: Thing) -> dict[str, tensors.TensorRecord]:
    needed: Iterable[str] = dict.fromkeys(tensor_names(state))
    return {name: thing.tensors[name] for name in needed}


def _set_groups(optimizer: DistributedOptimizer, groups: Groups) -> None:
    """The owners have them already; the parameters stay the driver's own."""
    optimizer.param_groups = [
        {**settings, "params": group["params"]} for group, settings in zip(optimizer.param_groups, groups, strict=True)
    ]
