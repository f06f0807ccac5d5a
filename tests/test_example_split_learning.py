"""The example ``split_learning``: two programs train one model, and neither gets more of the other than it offers."""

from __future__ import annotations

import ast
import importlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import EXAMPLES, difference, run_example
from telegrad.launch import free_port
from worker_processes import clean_environment, run_python

FOLDER = EXAMPLES / "split_learning"


@pytest.fixture(scope="module")
def output() -> str:
    return run_example("split_learning", 2, "--patients", "300", "--epochs", "12", timeout=110)


def test_it_trains_what_one_process_trains(output: str) -> None:
    assert difference(output) < 1e-9


def test_the_table_shows_that_it_learns(output: str) -> None:
    lines = re.findall(r"^worker1 \| +(\d+) +([\d.]+) +([\d.]+)%$", output, re.MULTILINE)
    assert [int(epoch) for epoch, *_ in lines] == [2, 4, 6, 8, 10, 12]
    assert float(lines[-1][1]) < 0.7 * float(lines[0][1]), lines


def test_what_is_not_offered_is_refused(output: str) -> None:
    refused = re.findall(r"^worker1 \| refused: (.*)$", output, re.MULTILINE)
    assert len(refused) == 3
    assert "'__main__:read' is not exported here" in refused[0]
    assert "'os:system' is not exported here" in refused[1]
    assert "without pickle (allow_pickle=False)" in refused[2]


def test_it_says_what_leaks(output: str) -> None:
    """The figures of README.md are no accident: gradients tell the hospital the results."""
    ((guessed, frequent),) = re.findall(r"guess of the lab's results: ([\d.]+)% \(([\d.]+)% without", output)
    assert float(guessed) > 90 > float(frequent)
    (explained,) = re.findall(r"guess of the hospital's measurements: ([\d.]+)% of their variance", output)
    assert 10 < float(explained) < 90


@pytest.mark.parametrize("party", ["hospital", "lab"])
def test_a_party_needs_nothing_but_its_own_program(party: str) -> None:
    tree = ast.parse((FOLDER / f"{party}.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {module.partition(".")[0] for module in modules} <= {"torch", "telegrad", *sys.stdlib_module_names}


# --- a lab that does not keep to the rules ----------------------------------------------------------------------------

ROGUE = '''
"""Runs instead of lab.py, and tries what a party may try that has changed its own telegrad."""

import sys
from pathlib import Path

from telegrad import autograd, rpc
from telegrad._current import current_worker
from telegrad._ids import GlobalId


class Trap:
    def __reduce__(self):
        return Path.touch, (Path(sys.argv[1]),)


def attempt(what, function, *args):
    try:
        print(f"{what}: got {function(*args)!r}")
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")


def call(name, *args):
    return rpc.rpc_sync("hospital", name, args)


rpc.init_rpc("lab", rpc_backend_options=rpc.RpcBackendOptions(allow_pickle=False, rpc_timeout=20))
with autograd.context() as context_id:
    activations = call("activations", [1000, 1001])
    autograd.backward(context_id, [activations.sum()])
    call("step", context_id)
for name in ("__main__:read", "hospital:read", "__main__:Hospital", "builtins:eval", "torch:load", "_encoder"):
    attempt(f"function {name}", call, name, "x")
for number in range(8):
    attempt(f"reference {number}", current_worker().fetch, 0, GlobalId(0, number), 5.0, "a guess")
current_worker().agent.peer("hospital").route.allow_pickle = True
attempt("pickle", call, "activations", Trap())
attempt("afterwards", lambda: list(call("activations", [1000]).shape))
rpc.shutdown()
'''


def test_a_lab_that_cheats_gets_nothing_either(tmp_path: Path) -> None:
    """It names what is not offered, guesses references, and sends a pickle although it must not."""
    rogue, trap, records = tmp_path / "rogue.py", tmp_path / "trap", tmp_path / "hospital.csv"
    rogue.write_text(ROGUE)
    python = [sys.executable, "-P"]
    subprocess.run([*python, FOLDER / "patients.py", "hospital", records], check=True, timeout=30)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TELEGRAD_SECRET": "ours"}
    hospital = subprocess.Popen(
        [*python, FOLDER / "hospital.py", "--records", records, "--save", tmp_path / "hospital.pt"],
        env=clean_environment(RANK="0", **job),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        done = run_python("-P", rogue, trap, **job, RANK="1")
        assert done.returncode == 0, done.stderr
        _, errors = hospital.communicate(timeout=15)
        assert hospital.returncode == 0, errors
    finally:
        hospital.kill()
        hospital.communicate()
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("function ")]
    assert len(refused) == 6
    assert all("SerializationError" in line and "is not exported here" in line for line in refused), refused
    references = [line for line in lines if line.startswith("reference ")]
    assert len(references) == 8
    assert not any(": got " in line for line in references), references
    (pickled,) = [line for line in lines if line.startswith("pickle: ")]
    assert "SerializationError" in pickled, pickled
    assert "this worker takes none (allow_pickle=False)" in pickled
    assert not trap.exists()
    assert lines[-1] == "afterwards: got [1, 4]"


# --- that the check can fail ------------------------------------------------------------------------------------------


@pytest.fixture
def referee(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The referee's module; ``tmp_path`` has the files of two parties who did what they should."""
    monkeypatch.syspath_prepend(FOLDER)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    patients, module = importlib.import_module("patients"), importlib.import_module("referee")
    for party in ("hospital", "lab"):
        patients.write(party, tmp_path / f"{party}.csv", 120)
    save(module.train_in_one_process(tmp_path, 6)[0], tmp_path)
    yield module
    torch.set_default_dtype(before)


def save(outcome: Any, folder: Path) -> None:
    torch.save(outcome.encoder, folder / "hospital.pt")
    torch.save({"head": outcome.head, "losses": outcome.losses}, folder / "lab.pt")


def judge(referee: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["referee.py", str(folder)])
    referee.main()


def test_the_referee_lets_the_right_weights_pass(
    referee: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge(referee, tmp_path, monkeypatch)
    assert difference(capsys.readouterr().out) == 0.0


@pytest.mark.parametrize("wrong", [1e-6, math.nan])
@pytest.mark.parametrize("what", ["encoder", "head", "losses"])
def test_the_referee_sees_a_wrong_value_of_either_party(
    referee: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, wrong: float
) -> None:
    outcome = referee.found_by_the_parties(tmp_path)
    if what == "losses":
        outcome.losses[2] += wrong
    else:
        getattr(outcome, what)["2.bias"][0] += wrong
    save(outcome, tmp_path)
    with pytest.raises(SystemExit, match="did not train what one process trains"):
        judge(referee, tmp_path, monkeypatch)


def test_without_gradients_there_is_nothing_to_guess_from(referee: Any, tmp_path: Path) -> None:
    """So the figure of the run does come from the gradients."""
    _, crossings = referee.train_in_one_process(tmp_path, 6)
    noise = torch.Generator().manual_seed(1)
    for crossing in crossings:
        crossing.gradients = torch.randn(crossing.gradients.shape, generator=noise)
        crossing.activations = torch.randn(crossing.activations.shape, generator=noise)
    assert referee.results_from_gradients(crossings)[0] < 0.65
    assert referee.measurements_from_activations(crossings) < 0.1
