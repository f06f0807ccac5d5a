"""A mixture of experts on other workers, with a residual connection: ``h + sum of weight * expert(h)``.

The trainer's gate sends each row to its top-k experts.  An expert that no row chose may be left alone, or be asked and
its answer thrown away: one ``backward`` serves both.  Each way trains a model here, and both are compared with one
process.

    telegrad run --workers 4 examples/experts/experts.py
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import torch
from mixture import INPUTS, Expert, Forward, Model, ask_everyone, ask_the_chosen, in_one_process
from torch import Tensor, optim
from torch.nn.functional import mse_loss

from telegrad import autograd, rpc
from telegrad.errors import MissingGradientError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

TOPICS, ROWS = 3, 32
RATE = 0.01
TOLERANCE = 1e-9


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows of one topic, as the tokens of a document are; each topic has a place, and a function to learn."""
    fixed = torch.Generator().manual_seed(0)
    places = 1.5 * torch.randn(TOPICS, INPUTS, generator=fixed)
    slopes = torch.randn(TOPICS, INPUTS, generator=fixed)
    fresh = torch.Generator().manual_seed(1 + step)
    topic = int(torch.randint(TOPICS, (), generator=fresh))
    offset = 0.5 * torch.randn(ROWS, INPUTS, generator=fresh)
    return places[topic] + offset, offset @ slopes[topic, :, None]


@dataclass
class Result:
    losses: list[float]
    rows: list[list[int]]  # of each step, for each expert
    state: dict[str, Tensor]


def train(model: Model, forward: Forward, steps: int) -> Result:
    """On the trainer; the experts only answer."""
    parameters = [rpc.RRef(parameter) for parameter in model.parameters()]  # those that are here
    for expert in model.experts:
        parameters += expert.remote_parameters()
    optimizer = DistributedOptimizer(optim.AdamW, parameters, lr=RATE)
    losses, rows = [], []
    for step in range(steps):
        x, target = batch(step)
        with autograd.context() as context_id:
            output, counts = forward(model, x)
            loss = mse_loss(output, target)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        rows.append(counts)
    return Result(losses, rows, model.state_dict())  # which fetches what the experts have learned


def train_in_one_process(model: Model, steps: int) -> Result:
    """The same with plain torch."""
    optimizer = optim.AdamW(model.parameters(), lr=RATE)
    losses, rows = [], []
    for step in range(steps):
        x, target = batch(step)
        output, counts = in_one_process(model, x)
        loss = mse_loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rows.append(counts)
    return Result(losses, rows, model.state_dict())


def try_fast(model: Model, steps: int) -> str:
    """What FAST says of a step with an idle expert: as PyTorch does, it takes every answer for used."""
    for step in range(steps):
        x, target = batch(step)
        with autograd.context() as context_id:
            output, rows = ask_everyone(model, x)
            if 0 in rows:
                try:
                    autograd.backward(context_id, [mse_loss(output, target)], mode="fast")
                except MissingGradientError as error:
                    return f"with mode='fast' and rows {rows}: {error}"
    return "no expert was idle: nothing for mode='fast' to complain about"


def difference(found: Result, expected: Result) -> float:
    """The largest, of any loss and any parameter."""
    if found.rows != expected.rows:
        return float("inf")  # rows went elsewhere: it is another model
    pairs = [(torch.tensor(found.losses), torch.tensor(expected.losses))]
    pairs += [(found.state[name], value) for name, value in expected.state.items()]
    return torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()


def show(result: Result) -> None:
    """About ten lines: the mean loss since the line before, and the rows of that very step."""
    steps, experts = len(result.losses), len(result.rows[0])
    print("  step     loss" + "".join(f"  expert{i + 1}" for i in range(experts)))
    every = max(steps // 10, 1)
    for end in range(every, steps + 1, every):
        loss = sum(result.losses[end - every : end]) / every
        print(f"{end:6} {loss:8.4f}" + "".join(f"{count:9}" for count in result.rows[end - 1]))


def run(names: list[str], top_k: int, steps: int) -> float:
    """Trains three models from the same start; how far they are apart in the end."""
    torch.manual_seed(0)
    alone = Model([Expert() for _ in names], top_k)
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    expected = train_in_one_process(alone, steps)
    results = []
    for forward in (ask_the_chosen, ask_everyone):
        model = Model([RemoteModule(name, Expert) for name in names], top_k)
        model.load_state_dict(start)  # which sends each expert its part
        results.append(train(model, forward, steps))
    show(results[0])
    idle = sum(counts.count(0) for counts in results[0].rows)
    print(f"times that no row chose an expert: {idle}")
    differences = [difference(result, expected) for result in results]
    print(f"not called then: difference {differences[0]:.1e}")
    print(f"called, answer not used: difference {differences[1]:.1e}")
    print(try_fast(model, steps))
    largest = torch.tensor(differences).max().item()  # which keeps a NaN, as Python's max may not
    print(f"largest difference from one process: {largest:.1e}")
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--top-k", type=int, default=2, help="to how many experts each row goes (default: 2)")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not 1 <= options.top_k < world_size:
        parser.error(f"--top-k {options.top_k} does not fit {world_size - 1} experts: start more workers")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    experts = [f"expert{number}" for number in range(1, world_size)]
    rpc.init_rpc(["trainer", *experts][rank], rank=rank, world_size=world_size)
    largest = run(experts, options.top_k, options.steps) if rank == 0 else 0.0
    rpc.shutdown()
    if not largest <= TOLERANCE:  # also if it is not a number
        sys.exit(f"more than {TOLERANCE:g}: the workers did not train what one process trains")


if __name__ == "__main__":
    main()
