"""The example ``experts``: rows go to remote experts, idle ones do no harm, and the model is that of one process."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import EXAMPLES, difference, run_example


@pytest.fixture(scope="module")
def output() -> str:
    return run_example("experts", 4, "--steps", "30", timeout=110)


def test_it_trains_what_one_process_trains(output: str) -> None:
    assert difference(output) < 1e-9
    apart = [float(figure) for figure in re.findall(r": difference (\S+)", output)]
    assert len(apart) == 2, "of the two ways to treat an idle expert"
    assert max(apart) == difference(output)


def test_the_table_shows_that_it_learns_and_that_experts_were_idle(output: str) -> None:
    lines = re.findall(r"^worker0 \| +(\d+) +([\d.]+) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in lines] == list(range(3, 31, 3))
    assert all(sum(map(int, rows)) == 2 * 32 for _, _, *rows in lines), "every row goes to two experts"
    losses = [float(loss) for _, loss, *_ in lines]
    assert sum(losses[5:]) < 0.8 * sum(losses[:5]), losses
    (idle,) = re.findall(r"times that no row chose an expert: (\d+)", output)
    assert int(idle) > 0


def test_fast_names_the_expert_whose_answer_nobody_used(output: str) -> None:
    ((rows, who),) = re.findall(
        r"mode='fast' and rows \[(.*)\]: \d+ sends got no gradient.* to worker 'expert(\d)'", output
    )
    assert rows.split(", ")[int(who) - 1] == "0"


def test_it_runs_with_any_number_of_experts() -> None:
    output = run_example("experts", 3, "--steps", "6", "--top-k", "1", timeout=110)
    assert "expert2" in output
    assert "expert3" not in output
    assert difference(output) < 1e-9


# --- that the check can fail ------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module."""
    monkeypatch.syspath_prepend(EXAMPLES / "experts")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield importlib.import_module("experts")
    torch.set_default_dtype(before)


def trained(program: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return program.train_in_one_process(program.Model([program.Expert() for _ in range(3)], 2), 3)


def test_the_comparison_sees_another_start_another_value_and_another_way(program: Any) -> None:
    expected = trained(program, 0)
    assert program.difference(trained(program, 0), expected) == 0.0
    assert program.difference(trained(program, 1), expected) > program.TOLERANCE
    for name in expected.state:
        other = trained(program, 0)
        other.state[name].view(-1)[-1] += 1e-6
        assert program.difference(other, expected) == pytest.approx(1e-6), name
        other.state[name].view(-1)[-1] = math.nan
        assert math.isnan(program.difference(other, expected)), name
    other = trained(program, 0)
    other.losses[1] += 1e-6
    assert program.difference(other, expected) == pytest.approx(1e-6)
    other = trained(program, 0)
    other.rows[2][0] += 1
    assert program.difference(other, expected) == math.inf


@pytest.mark.parametrize("found", [1e-6, math.inf, math.nan])
def test_a_difference_ends_the_program_with_an_error(
    program: Any, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["experts.py"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(program.rpc, "init_rpc", lambda *_, **__: None)
    monkeypatch.setattr(program.rpc, "shutdown", lambda: None)
    monkeypatch.setattr(program, "run", lambda *_: found)
    with pytest.raises(SystemExit, match="did not train what one process trains"):
        program.main()


# --- and that the two ways are what they say --------------------------------------------------------------------------


def expert_that_counts(program: Any) -> Any:
    class Counting(program.Expert):  # type: ignore[name-defined,misc]
        def forward_async(self, rows: Tensor) -> Any:
            self.seen = [*getattr(self, "seen", []), len(rows)]
            answer: Any = torch.futures.Future()
            answer.set_result(self(rows))
            return answer

    return Counting()


@pytest.mark.parametrize("way", ["ask_the_chosen", "ask_everyone"])
def test_an_idle_expert_is_called_in_one_way_and_not_in_the_other(program: Any, way: str) -> None:
    torch.manual_seed(0)
    model = program.Model([expert_that_counts(program) for _ in range(3)], 2)
    with torch.no_grad():
        model.gate.bias[1] = -100.0  # nobody will choose that one
    x, _ = program.batch(0)
    output, rows = getattr(program, way)(model, x)
    assert rows == [32, 0, 32]
    seen = [getattr(expert, "seen", []) for expert in model.experts]
    assert seen == ([[32], [], [32]] if way == "ask_the_chosen" else [[32], [32], [32]])
    torch.testing.assert_close(output, program.in_one_process(model, x)[0])
