"""The manifest: one JSON file that says what a checkpoint holds, and in which file each tensor is.

Loading uses the manifest alone, so a tensor may be loaded by another worker than the one that saved it.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from telegrad.checkpoint.files import Directory, create, finish, read_file
from telegrad.checkpoint.json_state import from_json, tensor_names, to_json
from telegrad.checkpoint.tensors import TensorRecord
from telegrad.errors import CheckpointError

FORMAT = 1  # of what this module writes; it reads all up to it
MANIFEST = "manifest.json"

Kind = Literal["module", "optimizer", "object"]


class Parameter(msgspec.Struct, frozen=True):
    """What an optimizer works on."""

    dtype: str
    shape: tuple[int, ...]


class Thing(msgspec.Struct, frozen=True):
    """One thing that was saved."""

    kind: Kind
    state: Any  # its state_dict(), with names in the place of tensors
    tensors: dict[str, TensorRecord] = {}
    versions: dict[str, int] = {}  # of a module: those of its layers, which torch keeps beside the state
    parameters: list[Parameter] = []  # of an optimizer
    settings: list[str] = []  # of an optimizer: the names that its class knows


class Manifest(msgspec.Struct, frozen=True):
    format: int
    step: int
    metadata: Any
    things: dict[str, Thing]
    files: dict[str, int]  # and their sizes


def write(directory: int, manifest: Manifest) -> None:
    """The last file of a checkpoint; safe from a crash of the host."""
    document = msgspec.to_builtins(
        msgspec.structs.replace(
            manifest,
            metadata=to_json(manifest.metadata),
            things={
                name: msgspec.structs.replace(thing, state=to_json(thing.state))
                for name, thing in manifest.things.items()
            },
        )
    )
    with create(MANIFEST, directory) as file:
        file.write(json.dumps(document, allow_nan=False).encode("ascii"))
        finish(file)


def read(folder: Directory) -> Manifest:
    try:
        with folder.opened() as directory:
            document = json.loads(read_file(MANIFEST, directory))
        form = document["format"]
        if isinstance(form, int) and form > FORMAT:
            raise CheckpointError(
                f"cannot read {folder.path}",
                [f"it is of format {form}, and this telegrad reads up to {FORMAT}: update it"],
            )
        manifest = msgspec.convert(document, Manifest)
        things = {
            name: msgspec.structs.replace(thing, state=from_json(thing.state))
            for name, thing in manifest.things.items()
        }
        manifest = msgspec.structs.replace(manifest, metadata=from_json(manifest.metadata), things=things)
        _check(manifest)
    except FileNotFoundError:
        raise CheckpointError(f"cannot read {folder.path}", [f"{MANIFEST} is missing"]) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder.path}", [f"{MANIFEST} cannot be read: {error}"]) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # msgspec's are ValueErrors
        raise CheckpointError(
            f"cannot read {folder.path}", [f"{MANIFEST} is damaged: {type(error).__name__}: {error}"]
        ) from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Checks that the manifest refers only to tensors and files that it lists, and to no file elsewhere."""
    for file in manifest.files:
        if "/" in file:
            raise ValueError(f"{file!r} is no file of a checkpoint")
    for name, thing in manifest.things.items():
        for tensor in tensor_names(thing.state):
            if tensor not in thing.tensors:
                raise ValueError(f"{name} needs a tensor {tensor!r}, and no file has it")
        if thing.kind == "optimizer":
            numbers = [number for group in thing.state["param_groups"] for number in group["params"]]
            if numbers != list(range(len(thing.parameters))) or not isinstance(thing.state["state"], dict):
                raise ValueError(f"{name} has {len(thing.parameters)} parameters, and groups of others")
        for record in thing.tensors.values():
            if record.file not in manifest.files:
                raise ValueError(f"{name} needs the file {record.file!r}, and it is not in the list")
