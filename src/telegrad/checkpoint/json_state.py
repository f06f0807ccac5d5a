"""State as plain data: numbers, text and containers that JSON can hold, and tensors beside them.

::

    {"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": tensor}
      │ take_apart                                ▲ put_together
      ▼                                           │
    {"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": TensorName("exp_avg")}     and     {"exp_avg": tensor}
      │ to_json                                   ▲ from_json
      ▼                                           │
    {"lr": 0.1, "betas": {"$": "tuple", "of": [0.9, 0.99]}, "exp_avg": {"$": "tensor", "of": "exp_avg"}}

There is no pickle in a checkpoint: reading one cannot execute anything, and needs no code but this.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_SCALARS = frozenset((type(None), bool, int, float, str))
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),  # MultiStepLR has one
}
_DICT_TYPES = frozenset((dict, OrderedDict, Counter))


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands for a tensor that is kept elsewhere."""

    name: str


class Parts:
    """A state, taken apart into plain data and tensors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []

    def take_apart(self, value: Any) -> Any:
        """The value with names in the place of its tensors."""
        try:
            return self._take(value, "")
        except RecursionError:
            self.problems.append(f"{self._name} is nested too deeply, or contains itself")
            return None

    def _take(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind in (list, tuple):
            return kind(self._take(each, _join(path, index)) for index, each in enumerate(value))
        if kind in _DICT_TYPES:
            for key in value:
                if type(key) not in _SCALARS:
                    self._refuse(f"has the key {key!r}, a {_type_name(key)}", path)
            return kind({key: self._take(each, _join(path, key)) for key, each in value.items()})
        self._refuse(f"is a {_type_name(value)}", path)
        return None

    def _tensor(self, tensor: Tensor, path: str) -> TensorName:
        name = path or "tensor"
        # {"a.b": …, "a": {"b": …}} has two of one path, and a safetensors file keeps one name for itself.
        while name in self.tensors or name == "__metadata__":
            name += "'"
        self.tensors[name] = tensor
        return TensorName(name)

    def _refuse(self, what: str, path: str) -> None:
        self.problems.append(
            f"{_join(self._name, path)} {what}: a checkpoint holds tensors, numbers, text, True, False, None, and "
            "lists, tuples and dicts of them"
        )


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state again, from what it was taken apart into."""
    if isinstance(value, TensorName):
        return tensors[value.name]
    if isinstance(value, dict):
        return type(value)({key: put_together(each, tensors) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(put_together(each, tensors) for each in value)
    return value


def tensor_names(value: Any) -> Iterator[str]:
    """Of the tensors that this needs."""
    if isinstance(value, TensorName):
        yield value.name
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensor_names(each)


def to_json(value: Any) -> Any:
    """What JSON does not know becomes an object with a ``"$"`` in it, which says what it was."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"$": "float", "of": repr(value)}
    if kind in _SCALARS:
        return value
    if kind is TensorName:
        return {"$": "tensor", "of": value.name}
    if kind is list:
        return [to_json(each) for each in value]
    if kind is tuple:
        return {"$": "tuple", "of": [to_json(each) for each in value]}
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: to_json(each) for key, each in value.items()}
    return {"$": kind.__name__, "of": [[to_json(key), to_json(each)] for key, each in value.items()]}


def from_json(value: Any) -> Any:
    """Raises a ``ValueError`` for what ``to_json`` does not write."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: from_json(each) for key, each in value.items()}
    try:
        kind, of = value["$"], value["of"]
        if kind in _DICTS:
            return _DICTS[kind]([(from_json(key), from_json(each)) for key, each in of])
        return _OTHERS[kind](of)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(value)[:100]} is no value") from error


_OTHERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "tensor": TensorName,
    "tuple": lambda items: tuple(map(from_json, items)),
}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path and key != "" else f"{path}{key}"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
