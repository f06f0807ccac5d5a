"""The referee: it has both parties' programs and files, trains the whole model in one process, and compares.

It also measures what each party could have found out about the other's data from what it was sent.

    python referee.py FOLDER     (which has hospital.csv, hospital.pt, lab.csv and lab.pt)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import hospital
import lab
import torch
from torch import Tensor, optim
from torch.nn.functional import binary_cross_entropy_with_logits

TOLERANCE = 1e-9


@dataclass
class Outcome:
    encoder: dict[str, Tensor]
    head: dict[str, Tensor]
    losses: list[float]


@dataclass
class Crossing:
    """What crossed in one step, and what it was made of."""

    measurements: Tensor
    activations: Tensor  # to the lab
    gradients: Tensor  # to the hospital
    results: Tensor


def found_by_the_parties(folder: Path) -> Outcome:
    head = torch.load(folder / "lab.pt", weights_only=True)
    return Outcome(torch.load(folder / "hospital.pt", weights_only=True), head["head"], head["losses"])


def train_in_one_process(folder: Path, steps: int) -> tuple[Outcome, list[Crossing]]:
    """The same with plain torch, on the data of both."""
    records, results = hospital.read(str(folder / "hospital.csv")), lab.read(str(folder / "lab.csv"))
    encoder, head = hospital.Encoder(len(next(iter(records.values())))), lab.Head(hospital.CUT)
    optimizer = optim.Adam(
        [
            {"params": encoder.parameters(), "lr": hospital.RATE},
            {"params": head.parameters(), "lr": lab.RATE},
        ]
    )
    training, _ = lab.split(results)
    losses: list[float] = []
    crossings: list[Crossing] = []
    epoch = 0
    while len(losses) < steps:
        epoch += 1
        crossings.clear()  # of the last epoch only
        for patients in lab.batches(training, epoch):
            measurements = torch.stack([records[number] for number in patients])
            wanted = torch.tensor([[results[number]] for number in patients])
            activations = encoder(measurements)
            activations.retain_grad()
            loss = binary_cross_entropy_with_logits(head(activations), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            assert activations.grad is not None
            crossings.append(Crossing(measurements, activations.detach(), activations.grad, wanted))
    return Outcome(encoder.state_dict(), head.state_dict(), losses), crossings


def difference(found: Outcome, expected: Outcome) -> float:
    """The largest, of any loss and any parameter of either party."""
    pairs = [(torch.tensor(found.losses), torch.tensor(expected.losses))]
    pairs += [(found.encoder[name], value) for name, value in expected.encoder.items()]
    pairs += [(found.head[name], value) for name, value in expected.head.items()]
    return torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()


# --- what leaks -------------------------------------------------------------------------------------------------------


def results_from_gradients(crossings: list[Crossing]) -> tuple[float, float]:
    """How many results the hospital guesses by the sign of the gradients along their main direction.

    And how many it would by always saying what is more frequent.
    """
    gradients = torch.cat([crossing.gradients for crossing in crossings])
    results = torch.cat([crossing.results for crossing in crossings]).flatten() > 0
    main = torch.linalg.svd(gradients, full_matrices=False).Vh[0]
    right = ((gradients @ main > 0) == results).double().mean().item()
    frequent = results.double().mean().item()
    return max(right, 1 - right), max(frequent, 1 - frequent)


def measurements_from_activations(crossings: list[Crossing]) -> float:
    """Of the variance of the measurements, how much a lab explains that knows those of half of the patients."""
    activations = torch.cat([crossing.activations for crossing in crossings])
    measurements = torch.cat([crossing.measurements for crossing in crossings])
    inputs = torch.cat([activations, torch.ones(len(activations), 1)], dim=1)
    half = len(inputs) // 2
    fitted = torch.linalg.lstsq(inputs[:half], measurements[:half]).solution
    left = (measurements[half:] - inputs[half:] @ fitted).square().sum()
    return 1 - (left / (measurements[half:] - measurements[half:].mean(dim=0)).square().sum()).item()


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    folder = Path(sys.argv[1])
    found = found_by_the_parties(folder)
    expected, crossings = train_in_one_process(folder, len(found.losses))
    guessed, frequent = results_from_gradients(crossings)
    print(f"what the hospital could guess of the lab's results: {guessed:.1%} ({frequent:.1%} without the gradients)")
    explained = measurements_from_activations(crossings)
    print(f"what the lab could guess of the hospital's measurements: {explained:.1%} of their variance")
    largest = difference(found, expected)
    print(f"largest difference from one process: {largest:.1e}")
    if not largest <= TOLERANCE:  # also if it is not a number
        sys.exit(f"more than {TOLERANCE:g}: the parties did not train what one process trains")


if __name__ == "__main__":
    main()
