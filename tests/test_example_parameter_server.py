"""The example ``parameter_server``: one update answers all trainers, as one process would train, also when one dies."""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from examples import EXAMPLES, difference, run_example
from telegrad.launch import free_port
from telegrad.launch.process import end_with
from worker_processes import clean_environment

ALONE, TOGETHER = "one update for each trainer", "all trainers together"


def table(output: str, name: str) -> list[tuple[int, int, float]]:
    """Update, answers and loss of the rows under that name."""
    rows = re.search(rf"{name}:\n.*update +answers +loss\n((?:.* \d+ +\d+ +\d+\.\d+\n)+)", output)
    assert rows is not None, output
    found = [line.split()[-3:] for line in rows[1].splitlines()]
    return [(int(update), int(answers), float(loss)) for update, answers, loss in found]


def totals(output: str, name: str) -> tuple[int, int]:
    """How many gradients were sent, and how many updates made of them."""
    ((gradients, updates),) = re.findall(rf"{name} +(\d+) +(\d+) +\d+ +\d+ µs", output)
    return int(gradients), int(updates)


def test_one_update_answers_all_trainers_and_trains_as_one_process() -> None:
    output = run_example("parameter_server", 4, "--steps", "50", timeout=110)
    assert difference(output) < 1e-9
    assert totals(output, ALONE) == (150, 150)
    assert totals(output, TOGETHER) == (150, 50)
    assert {answers for _, answers, _ in table(output, ALONE)} == {1}
    rows = table(output, TOGETHER)
    assert [(update, answers) for update, answers, _ in rows] == [(update, 3) for update in range(0, 50, 10)]
    assert rows[-1][2] < 0.6 * rows[0][2], "the loss goes down"


# --- a trainer dies ---------------------------------------------------------------------------------------------------


class Job:
    """Workers that were started by hand: ``telegrad run`` would end them all when one dies."""

    def __init__(self, stack: ExitStack, workers: int, *options: str) -> None:
        env = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(workers))
        program = f"{EXAMPLES}/parameter_server/parameter_server.py"
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-u", program, *options],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=end_with(os.getpid()),
            )
            for rank in range(workers)
        ]
        for worker in self.workers:
            stack.enter_context(worker)
            stack.callback(worker.kill)
        self.output = ""

    def read_until(self, pattern: str) -> None:
        """Takes what the server prints; if it prints nothing more, pytest's own limit ends the test."""
        stdout = self.workers[0].stdout
        assert stdout is not None
        while not re.search(pattern, self.output):
            line = stdout.readline()
            assert line, f"the server ended without {pattern!r}: {self.output}"
            self.output += line

    def finish(self, timeout: float) -> list[int]:
        """The exit codes."""
        deadline = time.monotonic() + timeout
        self.output += self.workers[0].communicate(timeout=timeout)[0]
        return [worker.wait(deadline - time.monotonic()) for worker in self.workers]


def test_trainers_that_are_killed_hold_nobody_up() -> None:
    steps = 400
    with ExitStack() as stack:
        job = Job(stack, 5, "--steps", str(steps))
        for moment, trainer in ((ALONE, 2), (TOGETHER, 3)):
            job.read_until(rf"{moment}:\n.*\n +0 .*\n")  # the first update is done
            job.workers[trainer].send_signal(signal.SIGSTOP)  # in a step: the others send gradients and wait for it
            time.sleep(0.3)
            job.workers[trainer].kill()
        codes = job.finish(60)
    assert codes == [0, 0, -signal.SIGKILL, -signal.SIGKILL, 0], job.output
    assert re.search("went on without one: .*trainer2", job.output)
    assert re.search("went on without one: .*trainer3", job.output)
    gradients, updates = totals(job.output, ALONE)
    assert 3 * steps <= gradients == updates < 4 * steps, "trainer2 died in its first part of the work"
    gradients, updates = totals(job.output, TOGETHER)
    assert updates == steps
    assert 2 * steps < gradients < 3 * steps, "trainer3 took part for a while"
    assert difference(job.output) < 1e-9


# --- the server by itself ---------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module."""
    monkeypatch.syspath_prepend(EXAMPLES / "parameter_server")
    yield importlib.import_module("parameter_server")
    sys.modules.pop("parameter_server")


@pytest.fixture
def server(program: Any) -> Any:
    return program.ParameterServer(torch.zeros(5, dtype=torch.float64), 3, 10)


def send(server: Any, trainer: int) -> Any:
    generator = torch.Generator().manual_seed(trainer)
    gradient = torch.randn(server.parameters.shape, generator=generator, dtype=torch.float64)
    return server.update_together(trainer, gradient, 2.0 * trainer, 2)


def test_no_call_blocks_and_the_last_one_answers_all(server: Any) -> None:
    before = server.parameters.clone()
    first, second = send(server, 1), send(server, 3)  # on one thread: had the first waited, we would hang here
    assert not first.done()
    assert not second.done()
    assert torch.equal(server.parameters, before)
    third = send(server, 2)
    for answer in (first, second, third):
        assert torch.equal(answer.value(), server.parameters)
    assert not torch.equal(server.parameters, before)
    assert (server.rounds, server.losses) == ([[1, 2, 3]], [2.0])
    assert not send(server, 1).done(), "that is the next round"


def test_the_sum_does_not_depend_on_who_comes_first(program: Any) -> None:
    ends = []
    for order in ((1, 2, 3), (3, 1, 2), (2, 3, 1)):
        server = program.ParameterServer(torch.zeros(5, dtype=torch.float64), 3, 10)
        for trainer in order:
            send(server, trainer)
        ends.append(server.parameters)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("sent_before_it_left", [False, True])
def test_who_leaves_is_not_waited_for(server: Any, sent_before_it_left: bool) -> None:
    answers = [send(server, 1), send(server, 2 if sent_before_it_left else 3)]
    assert not answers[0].done()
    server.leave(2)
    if sent_before_it_left:
        assert not answers[0].done(), "trainer3 is still to come"
        answers.append(send(server, 3))
    assert all(answer.done() for answer in answers)
    assert server.rounds == [[1, 2, 3] if sent_before_it_left else [1, 3]]
    with pytest.raises(RuntimeError, match="trainer2 has left"):
        send(server, 2)
    answers = [send(server, 1), send(server, 3)]
    assert all(answer.done() for answer in answers)
    assert server.rounds[1] == [1, 3]


def test_when_all_have_left_nothing_is_left_to_do(server: Any) -> None:
    for trainer in (1, 2, 3):
        server.leave(trainer)
    assert server.rounds == []


# --- that the check can fail ------------------------------------------------------------------------------------------


def test_the_comparison_sees_another_batch_and_another_value(program: Any) -> None:
    rounds = [[1, 2, 3]] * 3
    parameters, losses = program.in_one_process(rounds, 3, 12)
    program.compare(parameters, losses, *program.in_one_process(rounds, 3, 12))
    for other in ([[1, 2, 3], [1, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 3], [2, 3]]):
        with pytest.raises(SystemExit, match="not those of one process"):
            program.compare(parameters, losses, *program.in_one_process(other, 3, 12))
    for wrong in (1e-6, math.nan):
        bad = parameters.clone()
        bad[-1] += wrong
        with pytest.raises(SystemExit, match="not those of one process"):
            program.compare(bad, losses, parameters, losses)
        with pytest.raises(SystemExit, match="not those of one process"):
            program.compare(parameters, [*losses[:-1], losses[-1] + wrong], parameters, losses)
