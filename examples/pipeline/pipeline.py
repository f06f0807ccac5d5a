"""A model cut into three stages, each on its own worker, which work on different micro-batches at the same time.

    telegrad run --workers 4 examples/pipeline/pipeline.py

"driver" cuts each batch into micro-batches and sends them off, "stage1" to "stage3" hand them on to each other, and one
``backward`` goes through all of it.  The same training runs with 1, 2, 4 and 8 micro-batches, in turns.
"""

import argparse
import contextvars
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from timeline import Recorder, Span, draw, overlap
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

WORKERS = ["driver", "stage1", "stage2", "stage3"]
STAGES = [1, 2, 3]
MICRO_BATCHES = [1, 2, 4, 8]
ARMS = 3  # of the spiral
RATE = 0.002
TOLERANCE = 1e-9

# --- the model --------------------------------------------------------------------------------------------------------


def layers(stage: int, width: int) -> nn.Sequential:
    """A third of the model, the same on every worker that makes it."""
    torch.manual_seed(stage)
    first = [nn.Linear(2, width), nn.Tanh()] if stage == 1 else []
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.Tanh())]
    last = [nn.Linear(width, ARMS)] if stage == 3 else []
    return nn.Sequential(*first, *hidden, *last)


class Stage(nn.Module):
    """Lives on a worker of its own."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.layers = layers(number, width)
        self.recorder = Recorder()
        # Calls run in many threads.  Only this one computes, so that micro-batches go one after the other: also in
        # backward, where torch starts with what its thread recorded last.
        self.thread = ThreadPoolExecutor(1)

    def forward(self, inputs: rpc.RRef, number: int, labels: Tensor | None = None) -> Tensor:
        """The outputs; of the last stage, which gets the labels, the loss."""
        context = contextvars.copy_context()  # with it the thread knows the autograd context of this call
        return self.thread.submit(context.run, self.compute, inputs, number, labels).result()

    def compute(self, inputs: rpc.RRef, number: int, labels: Tensor | None) -> Tensor:
        x = inputs.to_here()  # waits for the stage before, and gets it straight from there
        with self.recorder.forward(number):
            first = self.layers[0](x)
            last = self.layers[1:](first)
            if labels is not None:
                last = cross_entropy(last, labels, reduction="sum")
        self.recorder.backward(number, first, last)
        return last

    def spans(self, since: float) -> list[Span]:
        return [span for span in self.recorder.spans if span.start >= since]


class Pipeline:
    """On the driver: all stages as one model, and its optimizer."""

    def __init__(self, micro_batches: int, width: int) -> None:
        self.micro_batches = micro_batches
        self.stages = [RemoteModule(f"stage{stage}", Stage, (stage, width)) for stage in STAGES]
        parameters = [parameter for stage in self.stages for parameter in stage.remote_parameters()]
        self.optimizer = DistributedOptimizer(optim.Adam, parameters, lr=RATE)

    def step(self, points: Tensor, labels: Tensor) -> float:
        first, second, third = (stage.get_module_rref() for stage in self.stages)
        parts = zip(points.chunk(self.micro_batches), labels.chunk(self.micro_batches), strict=True)
        with autograd.context() as context_id:
            losses = []
            for number, (some_points, some_labels) in enumerate(parts):
                # Nothing here waits.  ``hidden`` is a reference to what a stage will have computed.
                hidden = first.remote().forward(rpc.RRef(some_points), number)
                hidden = second.remote().forward(hidden, number)
                losses.append(third.rpc_async().forward(hidden, number, some_labels))
            # First wait for all, then add up: so their gradients leave together, and the last stage takes one by one.
            loss = torch.stack([future.wait() for future in losses]).sum() / len(points)
            autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()

    def spans(self, since: float = 0.0) -> dict[str, list[Span]]:
        """What the stages have done."""
        return {stage.on: stage.get_module_rref().rpc_sync().spans(since) for stage in self.stages}

    def parameters(self) -> list[Tensor]:
        return [value for stage in self.stages for value in stage.state_dict().values()]


class OneProcess:
    """The same model, whole, in plain torch."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(*(layers(stage, width) for stage in STAGES))
        self.optimizer = optim.Adam(self.model.parameters(), lr=RATE)

    def step(self, points: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


# --- training and comparing -------------------------------------------------------------------------------------------


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Points on a spiral of three arms; which arm is to be learnt."""
    chance = torch.Generator().manual_seed(step)
    labels = torch.randint(ARMS, (size,), generator=chance)
    radius = torch.rand(size, generator=chance)
    angle = 3 * radius + 2 * torch.pi / ARMS * labels + 0.1 * torch.randn(size, generator=chance)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


class Run:
    """A learner, and how it went."""

    def __init__(self, learner: Pipeline | OneProcess) -> None:
        self.learner = learner
        self.losses: list[float] = []
        self.starts: list[float] = []
        self.seconds: list[float] = []

    def step(self, points: Tensor, labels: Tensor) -> None:
        self.starts.append(time.monotonic())
        self.losses.append(self.learner.step(points, labels))
        self.seconds.append(time.monotonic() - self.starts[-1])

    def outcome(self) -> list[Tensor]:
        return [torch.tensor(self.losses), *self.learner.parameters()]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return torch.stack([(one - other).abs().max() for one, other in zip(ours, theirs, strict=True)]).max().item()


def train(steps: int, size: int, width: int) -> str | None:
    """On the driver.  Returns what is wrong, if anything is."""
    runs = [Run(Pipeline(count, width)) for count in MICRO_BATCHES]
    alone = Run(OneProcess(width))
    print(f"{steps} steps of {size} samples\n{'step':>14} {'loss':>10}")
    for step in range(steps):
        points, labels = batch(step, size)
        for each in (*runs, alone):  # in turns: what else the machine does meanwhile slows all of them down alike
            each.step(points, labels)
        if step % max(steps // 6, 1) == 0 or step == steps - 1:
            print(f"{step + 1:>14} {runs[0].losses[-1]:>10.4f}")

    print(f"\n{'micro-batches':>14} {'samples/s':>10} {'two stages at work':>20}")
    for each in runs:
        rate, share = size / statistics.median(each.seconds), overlap(each.learner.spans())
        print(f"{each.learner.micro_batches:>14} {rate:>10,.0f} {share:>20.0%}")
    print(f"{'one process':>14} {size / statistics.median(alone.seconds):>10,.0f}")

    print("\nthe last step; 1 is the forward of the first micro-batch, a its backward, and so on")
    for each in (runs[0], runs[2]):
        print(draw(each.learner.spans(each.starts[-1])), end="\n\n")

    expected = alone.outcome()
    difference = torch.tensor([largest_difference(each.outcome(), expected) for each in runs]).max().item()
    print(f"largest difference from one process: {difference:.1e}")
    if not difference <= TOLERANCE:  # and not ">", which is false of NaN
        return f"the stages computed something else than one process does: over {TOLERANCE}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=2048, help="samples in a step")
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # on all workers, so that the comparison is sharp
    rank = int(os.environ["RANK"])
    rpc.init_rpc(WORKERS[rank])  # RANK and WORLD_SIZE are in the environment
    wrong = train(options.steps, options.batch, options.width) if rank == 0 else None
    rpc.shutdown()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
