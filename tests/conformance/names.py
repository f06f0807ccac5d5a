"""Every public name of torch's modules and its state on telegrad: checked, and written into ``docs/migration.md``.

``python -m tests.conformance.names`` writes; with ``--check`` it only says whether what is written is up to date.  The
states stand in ``names.toml``.  A name that is in no state, in the wrong one, or in two, is an error: so a new torch
cannot bring names that nobody has thought about.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "migration.md"
BEGIN, END = "<!-- names -->", "<!-- /names -->"


class Part(NamedTuple):
    """A module or class of torch's, and what stands for it."""

    theirs: str
    ours: str
    same: list[str]
    differs: dict[str, str] = {}  # noqa: RUF012 - never changed
    missing: dict[str, str] = {}  # noqa: RUF012


def load() -> list[Part]:
    return [Part(**table) for table in tomllib.loads((HERE / "names.toml").read_text())["part"]]


def public_names(thing: Any) -> set[str]:
    """What a program may take from it: of a module what is defined there, of a class what its bases do not have."""
    names = {name for name in dir(thing) if not name.startswith("_")}
    if isinstance(thing, ModuleType):
        declared = set(getattr(thing, "__all__", ()))
        return {name for name in names if name in declared or _is_own(thing, getattr(thing, name))} | declared
    inherited = {name for base in thing.__mro__[1:] if not _is_rpc(base) for name in dir(base)}
    return names - inherited


def _is_own(module: ModuleType, value: Any) -> bool:
    return not isinstance(value, ModuleType) and _is_rpc(value, module.__name__)


def _is_rpc(value: Any, module: str = "torch.distributed.rpc") -> bool:
    of = getattr(value, "__module__", None) or ""
    return of.startswith(
        (module, "torch._C._distributed_rpc", "torch._C._distributed_autograd", "torch.distributed.nn")
    )


def find(path: str) -> Any:
    """The module or class of that name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def problems(part: Part) -> list[str]:
    """What in the table is not true."""
    theirs, ours = find(part.theirs), find(part.ours)
    there = public_names(theirs)
    listed = Counter([*part.same, *part.differs, *part.missing])
    found = [f"{part.theirs}.{name} is in no state" for name in there - listed.keys()]
    found += [f"{part.theirs} has no {name}" for name in listed.keys() - there]
    found += [f"{part.theirs}.{name} is in two states" for name in listed if listed[name] > 1]
    found += [f"{part.ours} has {name}, though it is said to be missing" for name in part.missing if _has(ours, name)]
    found += [f"{part.ours} has no {name}" for name in (*part.same, *part.differs) if not _has(ours, name)]
    found += [
        f"{part.ours}.{name} takes other arguments: {wrong}"
        for name in part.same
        if name in there and _has(ours, name) and (wrong := other_arguments(getattr(theirs, name), _get(ours, name)))
    ]
    return sorted(found)


def _has(ours: Any, name: str) -> bool:
    """Options and fields are arguments of the constructor, and attributes of the object only."""
    return hasattr(ours, name) or (isinstance(ours, type) and name in inspect.signature(ours).parameters)


def _get(ours: Any, name: str) -> Any:
    return getattr(ours, name, None)


def other_arguments(theirs: Any, ours: Any) -> str:
    """Which of their arguments ours does not take, in the same place, with the same default."""
    if isinstance(theirs, type) or not callable(theirs) or not callable(ours):
        return ""
    try:
        wanted = list(inspect.signature(theirs).parameters.values())
    except ValueError:
        return ""  # a function of C++ does not tell
    offered = list(inspect.signature(ours).parameters.values())
    for place, parameter in enumerate(wanted):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "self":
            continue
        mine = offered[place] if place < len(offered) else None
        if mine is None or (mine.name, mine.default) != (parameter.name, parameter.default):
            return str(parameter)
    return ""


def tables(parts: list[Part]) -> str:
    """As Markdown."""
    return "\n\n".join(_table(part) for part in parts)


def _table(part: Part) -> str:
    lines = [f"**`{part.theirs}`** → `{part.ours}`"]
    if part.same:
        lines += ["", f"The same: {', '.join(f'`{name}`' for name in sorted(part.same, key=str.lower))}."]
    if part.differs or part.missing:
        lines += ["", "| name | state | |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | differs | {how} |" for name, how in sorted(part.differs.items())]
        lines += [f"| `{name}` | not there | {why} |" for name, why in sorted(part.missing.items())]
    return "\n".join(lines)


def rewritten(document: str, parts: list[Part]) -> str:
    """The document with the tables between its markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no place for the tables, between {BEGIN} and {END}")
    return f"{before}{begin}\n\n{tables(parts)}\n\n{end}{after}"


def main() -> int:
    parts = load()
    wrong = [problem for part in parts for problem in problems(part)]
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    old = DOCUMENT.read_text()
    new = rewritten(old, parts)
    if "--check" in sys.argv[1:]:
        if new != old:
            print(f"{DOCUMENT.name} is out of date: python -m tests.conformance.names", file=sys.stderr)
        return int(new != old)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
