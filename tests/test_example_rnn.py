"""The example of a recurrent model: it learns its grammar, and clips and trains as one process does."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import EXAMPLES, difference, load_example, run_example
from worker_processes import telegrad_run

SMALL = ("--windows", "60", "--length", "15")

#: The one process clips each part of the model by itself, as workers would that did not ask each other.
WRONG = """
import sys

from torch import nn, stack

sys.path.insert(0, {folder!r})
import rnn

clip = nn.utils.clip_grad_norm_


def clip_parts(parameters, norm):
    embedding, *lstm, weight, bias = parameters
    return stack([clip(part, norm) for part in ([embedding], lstm, [weight, bias])]).norm()


nn.utils.clip_grad_norm_ = clip_parts
rnn.main()
"""


@pytest.fixture(scope="module")
def rnn() -> ModuleType:
    return load_example("rnn", "rnn")


@pytest.fixture(scope="module")
def output() -> str:
    return run_example("rnn", 3, *SMALL, timeout=110)


def test_it_trains_as_one_process_does(output: str) -> None:
    assert difference(output) <= 1e-9
    rows = re.findall(r"^worker0 \| +\d+ +(\d\.\d+) +\d+\.\d+$", output, re.MULTILINE)
    assert len(rows) == 10
    assert float(rows[-1]) < float(rows[0]) / 2


def test_some_windows_are_clipped_and_some_are_not(output: str) -> None:
    ((clipped, windows),) = re.findall(r"clipped to [\d.]+: (\d+) of (\d+) windows", output)
    assert 0 < int(clipped) < int(windows)


def test_it_writes_letters_of_its_alphabet(output: str, rnn: ModuleType) -> None:
    (text,) = re.findall(r"it writes: (.+)$", output, re.MULTILINE)
    assert len(text) > 40
    assert set(text) <= set(rnn.ALPHABET)


def test_a_norm_of_each_part_alone_would_be_noticed(tmp_path: Path) -> None:
    (program := tmp_path / "wrong.py").write_text(WRONG.format(folder=str(EXAMPLES / "rnn")))
    done = telegrad_run(3, program, *SMALL)
    assert done.returncode == 1, done.stderr
    assert difference(done.stdout) > 1e-9
    assert "the workers computed something else than one process does" in done.stderr


def test_the_difference_sees_one_wrong_value(rnn: ModuleType) -> None:
    history = [(2.0, 0.5), (1.0, 0.25)]
    ours, theirs = rnn.outcome(rnn.model_here(), history), rnn.outcome(rnn.model_here(), history)
    assert {"embedding.weight", "lstm.weight_hh_l0", "decoder.bias", "losses", "norms"} <= ours.keys()
    assert rnn.largest_difference(ours, theirs) == 0
    for name in ours:
        changed = {**theirs, name: theirs[name] + 1e-3}
        assert rnn.largest_difference(ours, changed) == pytest.approx(1e-3, rel=1e-2)
        changed[name] = theirs[name] * torch.nan
        assert not rnn.largest_difference(ours, changed) <= rnn.TOLERANCE


def test_windows_go_on_where_the_last_one_ended(rnn: ModuleType) -> None:
    first, second, third = rnn.windows(3, 10)
    for (inputs, targets), (following, _) in ((first, second), (second, third)):
        assert inputs.shape == targets.shape == (10, rnn.STREAMS)
        assert torch.equal(inputs[1:], targets[:-1])
        assert torch.equal(targets[-1], following[0])


def test_the_grammar_has_the_bits_that_its_text_has(rnn: ModuleType) -> None:
    """Counted in a long text: each sentence has the same chance, so its bits are the logarithm of their number."""
    (whole, _), *_ = rnn.windows(1, 20_000)
    text = "".join(rnn.ALPHABET[number] for number in whole.T.flatten())
    length = len(text) / text.count(".")
    sentences = torch.tensor([len(words) for words in rnn.SENTENCE]).prod()
    assert rnn.bits_of_the_grammar() == pytest.approx(sentences.log2().item() / length, rel=0.01)
