"""Saving, on the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from telegrad.checkpoint import manifest
from telegrad.checkpoint.fanout import Written, write_parts
from telegrad.checkpoint.folder import Folder
from telegrad.checkpoint.json_state import Parts
from telegrad.checkpoint.manifest import FORMAT, Manifest, Parameter, Thing
from telegrad.checkpoint.targets import Target, prefix_of, targets_of
from telegrad.checkpoint.tensors import TensorRecord
from telegrad.errors import CheckpointError, UsageError
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.fanout import ask_all

T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    things: Mapping[str, Any],
    step: int | None = None,
    metadata: Any = None,
    *,
    keep: int | None = None,
    timeout: float = 0.0,
) -> int:
    """Saves named things into a new checkpoint in the folder ``path``, each owner its own part.

    When this returns, the checkpoint is complete. If it fails, or if this process is killed, the previous one is kept.
    Reading a checkpoint executes nothing: tensors are in ``safetensors`` files, everything else is JSON.

    Call it between steps, on one worker: each worker's part is consistent in itself, but only the program knows when
    all are. Gradients, also those that ``accumulate`` keeps, are not saved.

    Args:
        path (path): The folder that the checkpoints are in; it is made if needed. All owners of the things must see it
            under this path.
        things (dict): By name, what to save: an RRef to a module, a ``RemoteModule``, a ``DistributedOptimizer``, or
            anything with ``state_dict`` and ``load_state_dict``, here or behind an RRef. Each RemoteModule inside of a
            module is saved by its own worker.
        step (int, optional): The number of the checkpoint (default: the next one). One of the same step is replaced.
        metadata (Any, optional): Plain data, which :func:`load` gives back.
        keep (int, optional): How many of the checkpoints saved here stay, the last ones (default: all).
        timeout (float, optional): Seconds that the owners may take; 0, the default, means no limit. A worker that dies
            ends it in any case.

    Returns:
        The step.

    Raises:
        CheckpointError: Something cannot be saved, or cannot be written; ``problems`` lists everything.
        UsageError: An argument is not valid, or another process is saving into the folder.
        WorkerLostError: An owner was lost.
        RpcTimeoutError: The owners took longer than ``timeout``.
        WorkersFailedError: Several owners failed.

    Example::

        >>> # on worker0, in a job with worker1
        >>> from telegrad import checkpoint
        >>> from telegrad.nn import RemoteModule
        >>> from telegrad.optim import DistributedOptimizer
        >>> model = RemoteModule("worker1", torch.nn.Linear, args=(4, 2))
        >>> optimizer = DistributedOptimizer(torch.optim.Adam, model.remote_parameters(), lr=1e-3)
        >>> things = {"model": model, "optimizer": optimizer}
        >>> checkpoint.save("run", things, step=100, metadata={"epoch": 3}, keep=2)
        100
        >>> checkpoint.load("run", things)
        Checkpoint(step=100, metadata={'epoch': 3})
    """
    _check_number("step", step, 0)
    _check_number("keep", keep, 1)
    targets = targets_of(things, timeout)
    notes = Parts("metadata")
    metadata = notes.take_apart(metadata)
    problems = notes.problems + [f"metadata.{name} is a tensor: save it with a thing" for name in notes.tensors]
    if problems:
        raise CheckpointError(f"cannot save {path}", problems)
    folder = Folder(path)
    with folder.saving() as temporary:
        number = folder.next_step() if step is None else step
        answers = ask_all(write_parts, {owner: (temporary, mine) for owner, mine in targets.items()}, timeout)
        problems = [problem for _, wrong in answers.values() for problem in wrong]
        written = {owner: parts for owner, (parts, _) in answers.items()}
        with temporary.opened() as directory:
            problems = problems or _check_sizes(directory, written)
        if problems:
            raise CheckpointError(f"cannot save step {number} in {folder.path}", problems)
        files = {part.file: part.size for parts in written.values() for part in parts if part.size}
        saved = {name: _whole(name, thing, targets, written) for name, thing in things.items()}
        with temporary.opened() as directory:
            manifest.write(directory, Manifest(FORMAT, number, metadata, saved, files))
        folder.commit(temporary, number, keep)
    return number


def _check_number(what: str, number: int | None, least: int) -> None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < least):
        raise UsageError(f"{what} is a whole number from {least} on, not {number!r}")


def _check_sizes(directory: int, written: Mapping[str, list[Written]]) -> list[str]:
    """Checks that the files which the owners wrote are visible here, with the same sizes."""
    wrong = []
    for owner, parts in written.items():
        for part in parts:
            try:
                size = os.stat(part.file, dir_fd=directory, follow_symlinks=False).st_size if part.size else 0
            except FileNotFoundError:
                wrong.append(f"worker {owner!r} wrote {part.file}, but here it is missing")
                continue
            if size != part.size:
                wrong.append(f"worker {owner!r} wrote {part.size:,} bytes to {part.file}, but here it has {size:,}")
    return wrong


def _whole(name: str, thing: Any, targets: Mapping[str, list[Target]], written: Mapping[str, list[Written]]) -> Thing:
    """Joins the parts of one thing that all owners have."""
    parts = [
        (target, part.thing)
        for owner, mine in targets.items()
        for target, part in zip(mine, written[owner], strict=True)
        if target.name == name
    ]
    if not isinstance(thing, DistributedOptimizer):
        return parts[0][1] if len(parts[0][0].prefixes) == 1 else _whole_module(parts)
    state: dict[int, Any] = {}
    records: dict[str, TensorRecord] = {}
    parameters: dict[int, Parameter] = {}
    groups: list[Any] = []
    for target, part in parts:
        assert target.share is not None
        state |= part.state["state"]
        groups = part.state.get("param_groups", groups)
        records |= part.tensors
        parameters |= zip(target.share.numbers, part.parameters, strict=True)
    return Thing(
        "optimizer",
        {"state": _sorted(state), "param_groups": groups},
        records,
        parameters=list(_sorted(parameters).values()),
        settings=sorted(thing.defaults),
    )


def _whole_module(parts: Sequence[tuple[Target, Thing]]) -> Thing:
    states: dict[str, dict[str, Any]] = {}
    records: dict[str, TensorRecord] = {}
    versions: dict[str, int] = {}
    for target, part in parts:
        states |= {prefix: {} for prefix in target.references}
        for key, value in part.state.items():
            states[prefix_of(key, target.prefixes)][key] = value
        records |= part.tensors
        versions |= part.versions

    def joined(prefix: str) -> Iterator[tuple[str, Any]]:
        """Puts the keys of remote parts where they would be in one process."""
        for key, value in states[prefix].items():
            if f"{key}." in states:
                yield from joined(f"{key}.")
            else:
                yield key, value

    return Thing("module", dict(joined("")), records, versions)


def _sorted(numbered: dict[int, T]) -> dict[int, T]:
    return {number: numbered[number] for number in sorted(numbered)}
