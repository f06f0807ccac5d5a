"""The example ``reinforcement``: it learns to balance, and plays the very episodes that one process plays."""

from __future__ import annotations

import copy
import importlib
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples import EXAMPLES, difference, run_example


def test_it_learns_what_one_process_learns() -> None:
    output = run_example("reinforcement", 4, "--rounds", "18", timeout=110)
    assert difference(output) < 1e-9
    rows = re.findall(r"^worker0 \| +(\d+) +(\d+) +([\d.]+) +(\d+)$", output, re.MULTILINE)
    assert [(int(number), int(episodes)) for number, episodes, *_ in rows] == [
        (number, 12 * number) for number in (1, 3, 6, 9, 12, 15, 18)
    ]
    lengths = [float(mean) for _, _, mean, _ in rows]
    assert lengths[0] < 40, "a policy that knows nothing falls soon"
    assert lengths[-1] > 75, f"the last ones stand longer: {lengths}"


def test_it_runs_with_any_number_of_actors() -> None:
    output = run_example("reinforcement", 2, "--rounds", "2", "--episodes", "1", timeout=110)
    assert difference(output) < 1e-9


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module."""
    monkeypatch.syspath_prepend(EXAMPLES / "reinforcement")
    yield importlib.import_module("reinforcement")
    sys.modules.pop("reinforcement")


def test_gradients_add_up_the_same_whatever_order_they_come_in(program: Any) -> None:
    policy = program.make_policy()
    leaf = policy[0].weight
    gradients = [torch.randn(leaf.shape, dtype=torch.float64) * 10**power for power in (0, 8, -8, 3)]
    sums = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        copies = program.copies_of(policy, 4)
        rows = [copies[index]["0.weight"] for index in order]
        sums.append(torch.autograd.grad(rows, leaf, [gradients[index] for index in order])[0])
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0], torch.stack(gradients).sum(0))


def test_an_actor_plays_the_same_again_and_its_loss_leads_to_the_parameters(program: Any) -> None:
    (first,), (second,) = program.copies_of(program.make_policy(), 1), program.copies_of(program.make_policy(), 1)
    loss, lengths = program.Actor(3, 2).play(first)
    assert len(lengths) == 2
    assert (loss.item(), lengths) == (program.Actor(3, 2).play(second)[0].item(), lengths)
    assert lengths != program.Actor(4, 2).play(first)[1]
    assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(loss, list(first.values())))


def test_the_return_of_a_step_is_what_follows_it(program: Any) -> None:
    seen, actions, returns = program.Actor(1, 1)._episode()
    assert len(seen) == len(actions) == len(returns)
    expected = [1 - program.DISCOUNT ** (len(actions) - step) for step in range(len(actions))]
    torch.testing.assert_close(returns, torch.tensor(expected, dtype=torch.float64))


# --- that the check can fail ------------------------------------------------------------------------------------------


def test_the_comparison_sees_other_episodes_and_other_values(program: Any) -> None:
    expected = program.learn_in_one_process(2, 1, 3)
    program.compare(program.learn_in_one_process(2, 1, 3), expected)
    with pytest.raises(SystemExit, match="episodes are not those of one process, from round 1 on"):
        program.compare(program.learn_in_one_process(2, 2, 3), expected)
    other = copy.deepcopy(expected)
    other.lengths[2][0] += 1
    with pytest.raises(SystemExit, match="episodes are not those of one process, from round 3 on"):
        program.compare(other, expected)
    for wrong in (1e-6, math.nan):
        other = copy.deepcopy(expected)
        other.losses[-1] += wrong
        with pytest.raises(SystemExit, match="parameters or losses are not those"):
            program.compare(other, expected)
        other = copy.deepcopy(expected)
        with torch.no_grad():
            other.policy[2].bias[-1] += wrong
        with pytest.raises(SystemExit, match="parameters or losses are not those"):
            program.compare(other, expected)
