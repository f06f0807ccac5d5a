"""The documents tell the truth: the README's example runs, links lead somewhere, and what is named exists."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import TelegradError
from telegrad.rpc import options
from test_import_order import LAYERS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "telegrad"
sys.path.insert(0, str(ROOT))  # bench is run from the checkout, never installed

from bench import markdown  # noqa: E402

README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path: path.read_text() for path in DOCUMENTS}

by_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands in backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


# --- the example ------------------------------------------------------------------------------------------------------


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    (program,) = fenced(TEXT[README], "python")
    (script := tmp_path / "hello.py").write_text(program)
    shown = next(block for block in fenced(TEXT[README], "console") if "telegrad run" in block)
    command, output = re.fullmatch(r"\$ \S*/telegrad (run .*)\n((?:.*\n)+)", shown).groups()  # type: ignore[union-attr]
    arguments = command.replace("examples/hello.py", str(script)).split()
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_the_example_is_the_one_in_the_examples() -> None:
    assert (ROOT / "examples" / "hello.py").read_text() == fenced(TEXT[README], "python")[0]


@pytest.mark.parametrize("heading", ["Gradients", "Training"])
def test_a_program_under_a_heading_prints_what_follows_it(heading: str, tmp_path: Path) -> None:
    section = TEXT[README].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (program,), (output,) = fenced(section, "py"), fenced(section, "text")
    (script := tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "telegrad", "run", "--workers", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_every_program_of_the_readme_is_run() -> None:
    assert len(fenced(TEXT[README], "py")) == 2  # those of the two headings above


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[path]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert linked.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}: no such heading"


# --- names ------------------------------------------------------------------------------------------------------------


@by_document
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z]+)", TEXT[path], re.MULTILINE))
    assert named <= targets


@by_document
def test_command_line_options_exist(path: Path) -> None:
    known = {"--hook-type", "--strict"}  # of pre-commit and mypy
    for program in (SOURCE / "cli.py", ROOT / "bench" / "__main__.py", ROOT / "tests" / "walk" / "__main__.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', program.read_text()))
    assert set(re.findall(r"(?<![\w<!-])--[a-z][a-z-]+", TEXT[path])) <= known


@by_document
def test_keyword_arguments_exist(path: Path) -> None:
    functions = [rpc.RpcBackendOptions, rpc.init_rpc, rpc.rpc_sync, rpc.shutdown, rpc.export, autograd.backward]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    named = {match[1] for span in spans(TEXT[path]) if (match := re.match(r"(?:\w+\()?([a-z_]+)=", span))}
    assert named <= known


@by_document
def test_environment_variables_are_read(path: Path) -> None:
    known = {*options._VARIABLES, *options._OWN_VARIABLES}
    assert set(re.findall(r"TELEGRAD_([A-Z_]+)", TEXT[path])) <= known


@by_document
def test_files_named_in_backticks_exist(path: Path) -> None:
    for span in spans(TEXT[path]):
        if re.fullmatch(r"[\w./]+/[\w.]*\.(py|md)", span):
            assert (ROOT / span).exists() or (SOURCE / span).exists(), span


def definitions() -> dict[str, set[str]]:
    """What every class and every module of the source has, by the name of the class or module."""
    found: dict[str, set[str]] = {"telegrad": set(telegrad.__all__)}
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        module = found.setdefault(file.parent.name if file.stem == "__init__" else file.stem, set())
        module |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        module |= {target.id for node in tree.body for target in targets(node) if isinstance(target, ast.Name)}
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            names = found.setdefault(kind.name, set())
            names |= {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
            names |= {target.id for node in kind.body for target in targets(node) if isinstance(target, ast.Name)}
            names |= {each.attr for node in ast.walk(kind) for each in targets(node) if isinstance(each, ast.Attribute)}
    found["rpc"].update(rpc.__all__)
    return found


def targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def test_the_design_names_functions_that_exist() -> None:
    known = definitions()
    picture = "\n".join(re.findall(r">([^<]+)</text>", (ROOT / "docs" / "call.svg").read_text()))
    pattern = r"\b([A-Za-z_]+)\.([A-Za-z_]+)\b"
    written = {pair for span in spans(TEXT[ROOT / "docs" / "design.md"]) for pair in re.findall(rf"^{pattern}", span)}
    named = {(owner, name) for owner, name in written if name not in ("py", "md", "txt") and owner != "torch"}
    drawn = set(re.findall(pattern, picture))
    assert len(named) > 30
    assert len(drawn) > 15
    assert not [f"{owner}.{name}" for owner, name in sorted(named | drawn) if name not in known.get(owner, ())]


def test_exceptions_named_in_the_documents_exist() -> None:
    from telegrad import errors

    builtin = {"TimeoutError", "ConnectionError", "ValueError", "RuntimeError"}
    named = {span for text in TEXT.values() for span in spans(text) if re.fullmatch(r"[A-Z]\w+Error", span)}
    assert named - builtin <= set(errors.__all__)
    assert issubclass(TelegradError, RuntimeError)


# --- the map ----------------------------------------------------------------------------------------------------------


def test_the_map_has_the_order_of_the_imports() -> None:
    section = TEXT[ROOT / "docs" / "design.md"].split("## The map")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    held = dict.fromkeys(module.split(".")[1] for layer in LAYERS for module in layer if "." in module)
    assert shown == [name for name in held if name != "__main__"]


def test_importing_telegrad_does_not_load_torch() -> None:
    code = "import sys, telegrad; print(telegrad.__version__, telegrad.errors.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split()[1:] == ["telegrad.errors", "False"]


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_benchmark_finds_its_place_in_the_readme() -> None:
    text = TEXT[README]
    assert text.count(markdown.BEGIN) == text.count(markdown.END) == 1
    once = markdown.replace_block(text, "| new |")
    assert once == markdown.replace_block(once, "| new |")
    assert once.split(markdown.BEGIN)[0] == text.split(markdown.BEGIN)[0]
    assert once.split(markdown.END)[1] == text.split(markdown.END)[1]
    with pytest.raises(ValueError, match="no <!-- bench -->"):
        markdown.replace_block("nothing here", "| new |")
