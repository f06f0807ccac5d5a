"""A parameter server that gathers the gradients of all trainers and answers them together, with one update.

    telegrad run --workers 4 examples/parameter_server/parameter_server.py

"ps" holds the parameters; every further worker is a trainer, "trainer1", "trainer2", …, and computes the gradient of
its part of each batch.  No thread of the server waits while a batch gathers, and a trainer that dies does not delay the
others.
"""

import argparse
import os
import sys
import threading
import time
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from telegrad import rpc
from telegrad.errors import WorkerLostError

FEATURES, HIDDEN, CLASSES = 32, 256, 10
RATE = 0.003
TOLERANCE = 1e-9
NAMES = {False: "one update for each trainer", True: "all trainers together"}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on every trainer: each takes its part of it."""
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)
    return inputs, (inputs @ teacher).argmax(1)


def parts_of(step: int, size: int, trainers: int) -> list[tuple[Tensor, Tensor]]:
    inputs, labels = batch_of(step, size)
    return list(zip(inputs.tensor_split(trainers), labels.tensor_split(trainers), strict=True))


class ParameterServer:
    """Lives on "ps".  It knows nothing of the model: for it the parameters are one long vector."""

    def __init__(self, parameters: Tensor, trainers: int, report_every: int) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.Adam([parameters], lr=RATE)
        self.losses: list[float] = []  # of each update
        self.rounds: list[list[int]] = []  # whose gradients were in it
        self._report_every = report_every
        self._lock = threading.Lock()
        self._expected = set(range(1, trainers + 1))
        self._came: dict[int, tuple[Tensor, float, int]] = {}  # gradient, loss, examples: sums over the trainer's part
        self._answer: Future[Tensor] = Future()  # what all trainers of the open round wait for

    def update_alone(self, trainer: int, gradient: Tensor, loss: float, examples: int) -> Tensor:
        """The plain way: one update for each gradient that comes."""
        with self._lock:
            return self._update({trainer: (gradient, loss, examples)})

    @rpc.functions.async_execution
    def update_together(self, trainer: int, gradient: Tensor, loss: float, examples: int) -> Future[Tensor]:
        """Returns a future immediately; telegrad answers the trainer when it is done, with its value."""
        with self._lock:
            if trainer not in self._expected:
                raise RuntimeError(f"trainer{trainer} has left: the others may be a step ahead of its gradient")
            self._came[trainer] = gradient, loss, examples
            answer = self._answer
        self._finish_round()
        return answer

    def leave(self, trainer: int, _: object = None) -> None:
        """The trainer is done, has failed, or has died: the others no longer wait for it."""
        with self._lock:
            self._expected.discard(trainer)
        self._finish_round()

    def _finish_round(self) -> None:
        with self._lock:
            if not self._came or not self._expected <= self._came.keys():
                return
            came, self._came = self._came, {}
            answer, self._answer = self._answer, Future()
            parameters = self._update(came)
        answer.set_result(parameters)  # outside the lock: this is where the answers leave, all of them

    def _update(self, came: dict[int, tuple[Tensor, float, int]]) -> Tensor:
        trainers = sorted(came)  # not in the order in which they came: sums shall be the same in every run
        gradients, losses, counts = zip(*(came[trainer] for trainer in trainers), strict=True)
        self.parameters.grad = torch.stack(gradients).sum(0) / sum(counts)
        self.optimizer.step()
        if len(self.rounds) % self._report_every == 0:
            print(f"{len(self.rounds):>8} {len(trainers):>10} {sum(losses) / sum(counts):>10.4f}")
        self.rounds.append(trainers)
        self.losses.append(sum(losses) / sum(counts))
        return self.parameters.clone()  # the next update may come before this has left


def train(server: rpc.RRef, together: bool, trainer: int, trainers: int, steps: int, size: int) -> None:
    """Runs on a trainer."""
    model = make_model()
    for step in range(steps):
        inputs, labels = parts_of(step, size, trainers)[trainer - 1]
        model.zero_grad()
        loss = cross_entropy(model(inputs), labels, reduction="sum")
        loss.backward()
        gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
        # A call has a deadline, 60 s unless we say otherwise, and fails at once if the server dies.
        calls = server.rpc_sync()
        update = calls.update_together if together else calls.update_alone
        vector_to_parameters(update(trainer, gradient, loss.item(), len(inputs)), model.parameters())


def run(together: bool, trainers: int, steps: int, size: int) -> tuple[ParameterServer, float, float]:
    """Runs on "ps": the server after training, the seconds that took, and the CPU seconds of this process."""
    print(f"{NAMES[together]}:\n{'update':>8} {'answers':>10} {'loss':>10}")
    updates = steps if together else steps * trainers
    parameters = parameters_to_vector(make_model().parameters()).detach()
    server = ParameterServer(parameters, trainers, report_every=max(1, updates // 5))
    here = rpc.RRef(server)
    began, began_cpu = time.perf_counter(), time.process_time()
    # These calls last as long as the trainers do.  So they also tell when one dies: its call fails at once.
    calls = {
        trainer: rpc.rpc_async(f"trainer{trainer}", train, (here, together, trainer, trainers, steps, size), timeout=0)
        for trainer in range(1, trainers + 1)
    }
    for trainer, call in calls.items():
        call.add_done_callback(partial(server.leave, trainer))
    for call in calls.values():
        try:
            call.wait()
        except WorkerLostError as error:
            print(f"went on without one: {error}")
    return server, time.perf_counter() - began, time.process_time() - began_cpu


def report(runs: dict[bool, tuple[ParameterServer, float, float]]) -> None:
    print(f"{'':>28} {'gradients':>10} {'updates':>8} {'gradients/s':>12} {'CPU of ps':>12} {'last loss':>10}")
    for together, (server, seconds, cpu) in runs.items():
        count, updates = sum(len(present) for present in server.rounds), len(server.rounds)
        speed = f"{count / seconds:>12.0f} {cpu / count * 1e6:>9.0f} µs"
        print(f"{NAMES[together]:>28} {count:>10} {updates:>8} {speed} {server.losses[-1]:>10.4f}")


def in_one_process(rounds: list[list[int]], trainers: int, size: int) -> tuple[Tensor, list[float]]:
    """The same training without telegrad, on whole batches: of the parts of those who took part."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    for step, present in enumerate(rounds):
        parts = parts_of(step, size, trainers)
        inputs, labels = (torch.cat(each) for each in zip(*(parts[trainer - 1] for trainer in present), strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return parameters_to_vector(model.parameters()).detach(), losses


def compare(parameters: Tensor, losses: list[float], expected: Tensor, expected_losses: list[float]) -> None:
    """Ends the program with 1 if they are not the same but for rounding."""
    apart = [abs(one - other) for one, other in zip(losses, expected_losses, strict=True)]
    difference = torch.cat([parameters - expected, torch.tensor(apart, dtype=torch.float64)]).abs().max().item()
    print(f"largest difference from one process: {difference:.1e}")
    if not difference <= TOLERANCE:
        sys.exit(f"the parameters or losses are not those of one process (more than {TOLERANCE:g} apart)")


def main() -> None:
    parser = argparse.ArgumentParser(description="A parameter server that answers all trainers with one update.")
    parser.add_argument("--steps", type=int, default=600, help="gradients that each trainer computes (default: 600)")
    parser.add_argument("--batch", type=int, default=96, help="examples of one step, of all trainers (default: 96)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    rpc.init_rpc(f"trainer{rank}" if rank else "ps", rank=rank, world_size=trainers + 1)
    if rank == 0:
        runs = {together: run(together, trainers, options.steps, options.batch) for together in (False, True)}
    rpc.shutdown()  # waits until the trainers, too, come here; those that died excepted
    if rank == 0:
        report(runs)
        server = runs[True][0]
        compare(server.parameters, server.losses, *in_one_process(server.rounds, trainers, options.batch))


if __name__ == "__main__":
    main()
