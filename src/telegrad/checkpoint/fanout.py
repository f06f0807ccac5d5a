"""The functions that run on the owners, and calling all owners at the same time.

Failures that can be foreseen travel as text, so that the driver can list those of all owners: a disk that is full, a
folder that is not there, a model that does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from safetensors import SafetensorError

from telegrad._current import current_worker
from telegrad._rref.rref import RRef
from telegrad.checkpoint.files import Directory
from telegrad.checkpoint.json_state import Parts, put_together
from telegrad.checkpoint.manifest import Thing
from telegrad.checkpoint.stateful import Stateful, stateful_of
from telegrad.checkpoint.targets import Target
from telegrad.checkpoint.tensors import read, unfit, write
from telegrad.errors import UsageError


def _statefuls(targets: Sequence[Target]) -> tuple[list[tuple[Target, Stateful]], list[str]]:
    """Of these, and what has none."""
    found, problems = [], []
    for target in targets:
        try:
            found.append((target, stateful_of(target)))
        except UsageError as error:
            problems.append(str(error))
    return found, problems


# --- saving -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Written:
    """The part of one thing that an owner has written."""

    thing: Thing
    file: str
    size: int  # 0: it has no tensors, and there is no file


def write_parts(folder: Directory, targets: Sequence[Target]) -> tuple[list[Written], list[str]]:
    """Writes this worker's parts, one file for each."""
    try:
        directory = folder.open()
    except OSError as error:
        return [], [_unseen(folder, error)]
    try:
        return _write_all(directory, targets)
    finally:
        os.close(directory)


def _write_all(directory: int, targets: Sequence[Target]) -> tuple[list[Written], list[str]]:
    worker = current_worker()
    statefuls, problems = _statefuls(targets)
    with worker.autograd.swapping:  # no step of an optimizer runs at the same time
        taken, more = _take(statefuls)
        problems += more
        try:
            if not problems:
                return [_write(directory, *each) for each in taken], []
        except (OSError, SafetensorError) as error:
            problems = [f"cannot write: {error}"]
    return [], [f"worker {worker.name!r}: {problem}" for problem in problems]


def _take(statefuls: Sequence[tuple[Target, Stateful]]) -> tuple[list[tuple[str, Thing, Parts]], list[str]]:
    """The contents of each file, and the problems."""
    taken = []
    problems: list[str] = []
    for target, stateful in statefuls:
        thing, parts = stateful.take(), Parts(target.name)
        thing = msgspec.structs.replace(thing, state=parts.take_apart(thing.state))
        problems += parts.problems
        problems += [why for key, each in parts.tensors.items() if (why := unfit(f"{target.name}.{key}", each))]
        taken.append((f"{target.name}.{current_worker().name}.safetensors", thing, parts))
    return taken, problems


def _write(directory: int, file: str, thing: Thing, parts: Parts) -> Written:
    if not parts.tensors:
        return Written(thing, file, 0)
    records, size = write(directory, file, parts.tensors)
    return Written(msgspec.structs.replace(thing, tensors=records), file, size)


# --- loading ----------------------------------------------------------------------------------------------------------


class Ready:
    """Everything that an owner loads: read and compared, but not yet set."""

    def __init__(self) -> None:
        self.loads: list[tuple[Stateful, Any, Thing]] = []

    def load(self) -> None:
        for stateful, state, thing in self.loads:
            stateful.load(state, thing)


def prepare_parts(
    folder: Directory, sizes: Mapping[str, int], parts: Sequence[tuple[Target, Thing]]
) -> tuple[RRef[Ready], list[str]]:
    """Reads this worker's parts and compares them with the present state; changes nothing."""
    ready = Ready()
    try:
        directory = folder.open()
    except OSError as error:
        return RRef(ready), [_unseen(folder, error)]
    try:
        problems = _prepare(ready, directory, sizes, parts)
    finally:
        os.close(directory)
    return RRef(ready), [f"worker {current_worker().name!r}: {problem}" for problem in problems]


def _prepare(
    ready: Ready, directory: int, sizes: Mapping[str, int], parts: Sequence[tuple[Target, Thing]]
) -> list[str]:
    things = {target.name: thing for target, thing in parts}
    statefuls, problems = _statefuls([target for target, _ in parts])
    for target, stateful in statefuls:
        thing = things[target.name]
        wrong = stateful.compare(target.name, thing)
        found, damaged = read(directory, thing.tensors, sizes)
        problems += wrong + damaged
        if not problems:
            ready.loads.append((stateful, put_together(thing.state, found), thing))
    return problems


def load_parts(ready: RRef[Ready]) -> None:
    ready.local_value().load()


def _unseen(folder: Directory, error: OSError) -> str:
    me = current_worker().name
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"worker {me!r} cannot open {folder.path}: {error.strerror}"
    return f"worker {me!r} does not see {folder.path}: a checkpoint is on a file system that all workers share"
