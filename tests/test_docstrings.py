"""Every public name has a docstring that tells its arguments, and the examples in the docstrings do what they show.

There are two kinds of examples.  Those with ``>>>`` run here, on ``worker0`` of two workers in one process, with
``torch``, ``rpc`` and ``autograd`` imported.  Those that begin with a command, ``# $ telegrad run --workers 2
program.py``, are programs: they run in processes of their own, and print what their ``# prints`` lines say.
"""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, checkpoint, compat, errors, launch, nn, optim, rpc, testing
from telegrad._agent.futures import Future
from telegrad.testing import cluster

MODULES = [telegrad, rpc, rpc.functions, autograd, optim, nn, checkpoint, errors, testing, compat, launch]


def public() -> Iterator[tuple[str, Any]]:
    """The public functions and classes, and what these classes define under a public name."""
    found = [(f"{module.__name__}.{name}", getattr(module, name)) for module in MODULES for name in module.__all__]
    seen: list[Any] = []
    for name, value in [*found, ("Future", Future)]:
        if isinstance(value, (types.ModuleType, str)) or any(value is each for each in seen):
            continue  # some classes have two names
        seen.append(value)
        yield name, value
        if isinstance(value, type):
            own = ((each, member) for each, member in vars(value).items() if not each.startswith("_"))
            yield from ((f"{name}.{each}", member) for each, member in own if _is_method(member))


def _is_method(member: Any) -> bool:
    return isinstance(member, (types.FunctionType, staticmethod, classmethod, property))


PUBLIC = dict(public())

# --- what a docstring says --------------------------------------------------------------------------------------------


def section(text: str, title: str) -> list[str]:
    """The names of a section's entries: ``name (type): what it is``."""
    body = re.search(rf"^{title}:\n((?: .*\n|\n)+)", text + "\n", re.MULTILINE)
    entries = re.findall(r"^    (?! )([\w*, ]+?)(?: \(.*?\))?: ", body[1], re.MULTILINE) if body else []
    return [name.lstrip("*") for entry in entries for name in entry.split(", ")]


def parameters(value: Any) -> list[str]:
    """What a docstring has to name; private ones need not be."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property) or (isinstance(value, type) and issubclass(value, Exception) and _plain(value)):
        return []
    names = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    return [name for name in names if not name.startswith("_")]


def _plain(kind: type) -> bool:
    """Whether it is made as any exception is."""
    return kind.__init__ is Exception.__init__ or "__init__" not in vars(kind)


def problems(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    if len(text.splitlines()) < 2:
        return ["has no docstring of more than one line"]
    given, told = parameters(value), section(text, "Args") or section(text, "Attributes")
    found = [f"does not tell of {name}" for name in given if name not in told]
    found += [f"tells of {name}, which it does not take" for name in told if name not in given]
    if not isinstance(value, (type, property)) and "Returns:\n" not in text:
        function = getattr(value, "__func__", value)
        if function.__annotations__.get("return") not in ("None", "NoReturn"):
            found.append("does not tell what it returns")
    for name in section(text, "Raises"):
        kind = getattr(errors, name, getattr(builtins, name, None))
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            found.append(f"raises {name}, which is no exception")
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_its_arguments(name: str) -> None:
    if isinstance(PUBLIC[name], type) and issubclass(PUBLIC[name], rpc.BackendType):
        return  # an enum, whose members are what there is to tell
    assert problems(PUBLIC[name]) == []


def complete(first: int, *rest: int, second: str = "") -> int:
    """Does something.

    Args:
        first (int): One: the first.
        *rest (int): Others,
            with a second line: here.
        second (str, optional): Another.

    Returns:
        A number.

    Raises:
        ValueError: If not.
        UsageError: If so.
    """
    raise NotImplementedError


def brief(first: int) -> None:
    """Does something."""


def incomplete(first: int, second: int) -> int:
    """Does something.

    Args:
        first (int): One.
        third (int): Another.

    Raises:
        NoSuchError: Never.
    """
    raise NotImplementedError


def test_what_a_docstring_lacks_is_told() -> None:
    assert problems(complete) == []
    assert problems(brief) == ["has no docstring of more than one line"]
    assert problems(incomplete) == [
        "does not tell of second",
        "tells of third, which it does not take",
        "does not tell what it returns",
        "raises NoSuchError, which is no exception",
    ]


# --- examples ---------------------------------------------------------------------------------------------------------

TEXTS = {module.__name__: module.__doc__ or "" for module in MODULES} | {
    name: inspect.getdoc(value) or "" for name, value in PUBLIC.items()
}
EXAMPLES = {name: found for name, text in TEXTS.items() if (found := doctest.DocTestParser().get_examples(text))}
PROGRAM = re.compile(r"^( +)# \$ .*\n(?:\1.*\n|\n)+", re.MULTILINE)
PROGRAMS = {name: found[0] for name, text in TEXTS.items() if (found := PROGRAM.search(text + "\n"))}

EXAMPLE = "docstring_example"
HAVE_EXAMPLES = """
    rpc.init_rpc rpc.shutdown rpc.rpc_sync rpc.rpc_async rpc.remote rpc.RRef rpc.RpcBackendOptions rpc.export
    rpc.functions.async_execution autograd.context autograd.backward autograd.get_gradients optim.DistributedOptimizer
    optim.clip_grad_norm_ nn.RemoteModule checkpoint.save checkpoint.load testing.cluster compat.install
    launch.run_workers
""".split()


@pytest.mark.parametrize("name", HAVE_EXAMPLES)
def test_what_a_program_uses_first_has_an_example(name: str) -> None:
    assert f"telegrad.{name}" in EXAMPLES.keys() | PROGRAMS.keys()


def run_examples(name: str, examples: list[doctest.Example]) -> str:
    """What went wrong."""
    module = types.ModuleType(EXAMPLE)  # its functions are sent by name, as those of a program are
    vars(module).update(torch=torch, rpc=rpc, autograd=autograd)
    test = doctest.DocTest(examples, {}, name, None, 0, None)
    test.globs = vars(module)
    sys.modules[EXAMPLE] = module
    said: list[str] = []
    try:
        with cluster("worker0", "worker1") as workers, workers.on("worker0"):
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
            vars(module).clear()  # no reference outlives its worker
    finally:
        del sys.modules[EXAMPLE]
    return "".join(said)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples(name, EXAMPLES[name]) == ""


def test_an_example_that_is_wrong_is_found() -> None:
    wrong = doctest.DocTestParser().get_examples(">>> rpc.rpc_sync('worker1', abs, (-1,))\n2\n>>> 1 / 0\n0\n")
    said = run_examples("wrong", wrong)
    assert "Expected:\n    2\nGot:\n    1\n" in said
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    text = textwrap.dedent(PROGRAMS[name])
    (program := tmp_path / "program.py").write_text(text)
    python, telegrad_command = [sys.executable], [sys.executable, "-m", "telegrad"]
    _, _, command, *words = text.splitlines()[0].split()
    command_line = [*(telegrad_command if command == "telegrad" else python), *words]
    arguments = [str(program) if word == program.name else word for word in command_line]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    shown = re.findall(r"# prints (.*)", text)
    assert shown
    assert (sorted(done.stdout.splitlines()), done.returncode) == (sorted(shown), 0), done.stderr
