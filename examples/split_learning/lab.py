"""The lab: it has the results of a test, and wants to predict them from what the hospital measures.

It leads the training.  What it gets of the hospital is a few numbers for each patient; what the hospital gets of it are
the gradients of these.  The results and the lab's weights stay here.

    RANK=1 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python lab.py --results lab.csv --save lab.pt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits

from telegrad import autograd, rpc
from telegrad.errors import TelegradError

RATE = 0.005
BATCH = 40


class Head(nn.Sequential):
    def __init__(self, inputs: int) -> None:
        torch.manual_seed(47)
        super().__init__(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 1))


def read(path: str) -> dict[int, float]:
    """The result of each patient, by number."""
    with open(path) as file:
        lines = [line.split(",") for line in file]
    return {int(number): float(result) for number, result in lines}


def split(results: dict[int, float]) -> tuple[list[int], list[int]]:
    """The patients to train with, and the others."""
    known = sorted(results)
    return known[len(known) // 5 :], known[: len(known) // 5]


def batches(patients: list[int], epoch: int) -> Iterator[list[int]]:
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(epoch)).tolist()
    for start in range(0, len(order), BATCH):
        yield [patients[place] for place in order[start : start + BATCH]]


class Lab:
    def __init__(self, results: dict[int, float]) -> None:
        self.results = results
        self.training, self.others = split(results)
        inputs = rpc.rpc_sync("hospital", "activations", (self.training[:1],)).shape[1]
        self.head = Head(inputs)
        self.optimizer = optim.Adam(self.head.parameters(), lr=RATE)
        self.losses: list[float] = []

    def targets(self, patients: list[int]) -> Tensor:
        return torch.tensor([[self.results[number]] for number in patients])

    def step(self, patients: list[int]) -> None:
        """One forward, backward and step, on both sides."""
        with autograd.context() as context_id:
            activations = rpc.rpc_sync("hospital", "activations", (patients,))
            loss = binary_cross_entropy_with_logits(self.head(activations), self.targets(patients))
            autograd.backward(context_id, [loss])
            rpc.rpc_sync("hospital", "step", (context_id,))
            gradients = autograd.get_gradients(context_id)
        for parameter in self.head.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()
        self.losses.append(loss.item())

    def accuracy(self) -> float:
        """On the patients that were not trained with."""
        with torch.no_grad():
            logits = self.head(rpc.rpc_sync("hospital", "activations", (self.others,)))
        return ((logits > 0) == (self.targets(self.others) > 0)).double().mean().item()

    def train(self, epochs: int) -> None:
        print(" epoch     loss  accuracy on others")
        for epoch in range(1, epochs + 1):
            first = len(self.losses)
            for patients in batches(self.training, epoch):
                self.step(patients)
            if epoch % max(epochs // 6, 1) == 0:
                epoch_losses = self.losses[first:]
                print(f"{epoch:6} {sum(epoch_losses) / len(epoch_losses):8.4f} {self.accuracy():19.1%}")


def overstep() -> None:
    """Calls with which a lab could try to get the hospital's data: all of them are refused."""
    for what, function, argument in (
        ("a function of the hospital's program", "__main__:read", "hospital.csv"),
        ("any function of Python", "os:system", "cat hospital.csv"),
        ("an object, which needs pickle", "activations", Head(1)),
    ):
        try:
            rpc.rpc_sync("hospital", function, (argument,))
        except TelegradError as error:
            print(f"refused: {what}: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            raise SystemExit(f"not refused: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", required=True, help="a line for each patient: number, 0 or 1")
    parser.add_argument("--save", required=True, help="where the head and the losses go in the end")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rpc.init_rpc("lab", rpc_backend_options=rpc.RpcBackendOptions(allow_pickle=False))
    overstep()
    lab = Lab(read(options.results))
    lab.train(options.epochs)
    torch.save({"head": lab.head.state_dict(), "losses": lab.losses}, options.save)
    rpc.rpc_sync("hospital", "finish")
    rpc.shutdown()


if __name__ == "__main__":
    main()
