"""The hospital: it has measurements of its patients, and a model that turns them into a few numbers each.

It answers the lab, and lets it do three things: ask for the activations of patients, have the hospital take a step with
the gradients that came back, and end the training.  Its records and its weights stay here.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python hospital.py --records hospital.csv --save hospital.pt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim

from telegrad import autograd, rpc

RATE = 0.003
CUT = 4  # numbers per patient that the lab gets to see


class Encoder(nn.Sequential):
    def __init__(self, measurements: int) -> None:
        torch.manual_seed(31)
        super().__init__(nn.Linear(measurements, 16), nn.Tanh(), nn.Linear(16, CUT))


def read(path: str) -> dict[int, Tensor]:
    """The measurements of each patient, by number."""
    records = {}
    with open(path) as file:
        for line in file:
            number, *measured = line.split(",")
            records[int(number)] = torch.tensor([float(value) for value in measured])
    return records


class Hospital:
    def __init__(self, records: dict[int, Tensor], save: str) -> None:
        self._records, self._save = records, save
        self._encoder = Encoder(len(next(iter(records.values()))))
        self._optimizer = optim.Adam(self._encoder.parameters(), lr=RATE)

    def activations(self, patients: Sequence[int]) -> Tensor:
        unknown = [number for number in patients if number not in self._records]
        if unknown:
            raise LookupError(f"the hospital does not know the patients {unknown}")
        return self._encoder(torch.stack([self._records[number] for number in patients]))

    def step(self, context_id: int) -> None:
        """The gradients are here, in the context: only this worker can see those of its own parameters."""
        gradients = autograd.get_gradients(context_id)
        for parameter in self._encoder.parameters():
            parameter.grad = gradients.get(parameter)
        self._optimizer.step()

    def finish(self) -> None:
        torch.save(self._encoder.state_dict(), self._save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", required=True, help="a line for each patient: number, measurements")
    parser.add_argument("--save", required=True, help="where the encoder goes in the end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    hospital = Hospital(read(options.records), options.save)
    for offered in (hospital.activations, hospital.step, hospital.finish):
        rpc.export(offered, name=offered.__name__)  # all that others can call
    rpc.init_rpc("hospital", rpc_backend_options=rpc.RpcBackendOptions(allow_pickle=False))
    rpc.shutdown()  # answers until the lab has called it, too


if __name__ == "__main__":
    main()
