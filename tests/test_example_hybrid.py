"""The hybrid model, which is also the demo: five workers train as one process does, and if not, it says so."""

from __future__ import annotations

import fcntl
import importlib
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from examples import EXAMPLES, difference, run_example
from worker_processes import clean_environment, run_python

HYBRID = EXAMPLES / "hybrid"
STEPS = 40
NORMAL = ("--steps", str(STEPS), "--batch", "256")
TOLERANCE = 1e-9
LIMIT = 110  # seconds; most of it is Python that starts five times, on a machine that may be busy

PARTS = {
    **{f"trainer{i}": ["dense.0.weight", "dense.0.bias", "dense.2.weight", "dense.2.bias"] for i in range(2)},
    **{f"ps{i}": ["users.weight", "items.weight"] for i in range(2)},
    "top": ["top.0.weight", "top.0.bias", "top.2.weight", "top.2.bias"],
}

# The demo, but for a reference that starts from another table.
WRONG = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import demo, one_process
table = one_process.table
one_process.table = lambda rows, seed: table(rows, seed + (seed == 3))
sys.exit(demo.main())
"""


def rows_of(output: str) -> list[tuple[str, str, float, str]]:
    """Worker, part, norm of the gradient, and mark, as the table shows them."""
    number = r"(\d\.\d+e[+-]\d+)"
    pattern = rf"(?:(\w+) +)?(\w+[.\w]*\.(?:weight|bias)) +[\d×]+ +{number} +{number} +\S+ +\S+ +([✔✘])"
    rows, worker = [], ""
    for name, part, norm, alone, mark in re.findall(pattern, output):
        worker = name or worker
        rows.append((worker, part, float(norm), mark))
        assert mark == "✘" or norm == alone
    return rows


def losses_of(output: str, title: str) -> list[float]:
    """Of the plain lines that stand for the bar."""
    lines = re.findall(rf"{title} +step +(\d+)/{STEPS}  loss (\d\.\d+) +[\d,]+ samples/s", output)
    assert [int(step) for step, _ in lines] == [STEPS // 10 * (i + 1) for i in range(10)], output
    return [float(loss) for _, loss in lines]


def check_good(output: str, drawn: Path) -> None:
    assert difference(output) < TOLERANCE
    rows = rows_of(output)
    assert [(worker, part) for worker, part, _, _ in rows] == [
        (w, part) for w, parts in PARTS.items() for part in parts
    ]
    assert all(norm > 0 and mark == "✔" for _, _, norm, mark in rows), output
    losses = losses_of(output, "5 workers")
    assert losses[-1] < losses[0] - 0.03
    assert losses_of(output, "one process") == losses
    assert "\x1b" not in output
    assert f"drawn: {drawn}" in output
    picture = ET.parse(drawn).getroot()
    kinds = [element.get("class") for element in picture.iter()]
    assert kinds.count("line") == 2  # in the legend, and the loss
    assert kinds.count("dot") > STEPS // 4
    assert kinds.count("floor") == 2


# --- as a whole -------------------------------------------------------------------------------------------------------


def test_it_trains_under_telegrad_run(tmp_path: Path) -> None:
    drawn = tmp_path / "loss.svg"
    output = run_example("hybrid", 5, *NORMAL, "--picture", str(drawn), timeout=LIMIT)
    check_good(re.sub(r"^worker0 \| ", "", output, flags=re.MULTILINE), drawn)


def test_the_demo_starts_its_workers_itself(tmp_path: Path) -> None:
    drawn = tmp_path / "a new folder" / "loss.svg"
    done = run_python(HYBRID / "demo.py", *NORMAL, "--picture", drawn, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    # On a busy machine it says for whom it waits.
    assert [line for line in done.stderr.splitlines() if not re.search(" waits for | has waited ", line)] == []
    check_good(done.stdout, drawn)


def test_a_terminal_has_a_bar_and_a_difference_is_a_failure(tmp_path: Path) -> None:
    code, output = in_terminal(80, "-c", WRONG, str(HYBRID), *NORMAL, "--picture", str(tmp_path / "loss.svg"))
    assert code == 1, output
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output)
    steps = [
        int(step) for step in re.findall(rf"5 workers +[━╸╺]+ +(\d+)/{STEPS} loss \d\.\d+ +[\d,]+ samples/s", shown)
    ]
    assert len(steps) > 3, "the bar moves"
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert "step " not in shown, "plain lines are for files"
    assert "…" not in rows_text(shown), "the table fits"
    marks = {(worker, part): mark for worker, part, _, mark in rows_of(shown)}
    assert len(marks) == sum(map(len, PARTS.values()))
    assert marks["ps0", "items.weight"] == marks["ps1", "items.weight"] == "✘"
    assert difference(shown) > TOLERANCE
    assert "This is not the training of one process" in shown
    assert "five workers trained as one process does" not in shown


def rows_text(shown: str) -> str:
    return shown[shown.index("Gradients of the last step") :]


def in_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Runs Python in a terminal of that width; its exit code, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {key: value for key, value in clean_environment(TERM="xterm").items() if key not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen([sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    ending = threading.Timer(LIMIT, process.kill)
    ending.start()
    written = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    except OSError:  # this is how a terminal says that the last writer has left
        pass
    finally:
        code = process.wait(LIMIT)
        ending.cancel()
        os.close(ours)
    return code, written.decode()


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Those of the example; their names are short, and others may have the same."""
    names = [path.stem for path in HYBRID.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(HYBRID))
    yield {name: importlib.import_module(name) for name in names if name != "demo"}
    for name in names:
        sys.modules.pop(name, None)


def test_the_comparison_finds_another_start(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    one_process, comparison = modules["one_process"], modules["comparison"]
    first, again = (one_process.train(3, 8, lambda loss: None) for _ in range(2))
    assert comparison.compare(first, again).equal
    assert comparison.compare(first, again).largest == 0
    table = one_process.table
    monkeypatch.setattr(one_process, "table", lambda rows, seed: table(rows, seed + 7))
    other = comparison.compare(first, one_process.train(3, 8, lambda loss: None))
    assert not other.equal
    assert other.largest > 1e-3
    assert other.losses > 1e-6


@pytest.mark.parametrize("what", ["gradients", "values"])
@pytest.mark.parametrize("wrong", [1e-6, float("nan")])
@pytest.mark.parametrize("part", [("trainer1", "dense.2.bias"), ("ps1", "users.weight"), ("top", "top.0.weight")])
def test_the_comparison_finds_one_wrong_number(
    modules: dict[str, ModuleType], what: str, wrong: float, part: tuple[str, str]
) -> None:
    train, compare = modules["one_process"].train, modules["comparison"].compare
    one, other = (train(1, 8, lambda loss: None) for _ in range(2))
    tensors = getattr(one, what)
    tensors[part] = tensors[part].clone()
    tensors[part].view(-1)[-1] += wrong
    found = compare(one, other)
    assert not found.equal
    assert [(row.worker, row.part) for row in found.rows if not row.equal] == [part]
    assert not found.largest <= TOLERANCE


def test_what_was_not_trained_is_no_success(modules: dict[str, ModuleType]) -> None:
    train, compare = modules["one_process"].train, modules["comparison"].compare
    one = train(1, 8, lambda loss: None)
    for part in one.gradients:
        one.gradients[part] = one.gradients[part] * 0
    assert not compare(one, one).equal
    del one.gradients["top", "top.2.bias"]
    with pytest.raises(ValueError, match=r"top\.2\.bias"):
        compare(one, train(1, 8, lambda loss: None))
