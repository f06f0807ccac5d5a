"""The model: a stem, a gate and a head around experts that may be anywhere, and three ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

INPUTS, WIDTH, HIDDEN = 6, 16, 32


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))


class Model(nn.Module):
    """The experts may be here or on other workers: the model, and its state dict, look the same."""

    def __init__(self, experts: Iterable[nn.Module], top_k: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.top_k = top_k
        self.stem = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh())
        self.gate = nn.Linear(WIDTH, len(self.experts))
        self.head = nn.Linear(WIDTH, 1)

    def choose(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row's choice: their weights, and their numbers."""
        weights, chosen = self.gate(h).softmax(dim=1).topk(self.top_k, dim=1)
        return weights, chosen

    def places(self, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where each expert was chosen: the rows, and the columns of ``weights``."""
        return [(chosen == number).nonzero(as_tuple=True) for number in range(len(self.experts))]


# --- three ways to run the same model; each returns its output, and how many rows chose each expert -------------------

Forward = Callable[[Model, Tensor], tuple[Tensor, list[int]]]


def ask_the_chosen(model: Model, x: Tensor) -> tuple[Tensor, list[int]]:
    """Each expert gets the rows that chose it, all at the same time; an expert that no row chose is not called."""
    h = model.stem(x)
    weights, chosen = model.choose(h)
    places = model.places(chosen)
    calls = {i: model.experts[i].forward_async(h[row]) for i, (row, _) in enumerate(places) if len(row)}
    y = h
    for i, call in calls.items():
        row, column = places[i]
        y = y.index_add(0, row, weights[row, column, None] * call.wait())
    return model.head(y), [len(row) for row, _ in places]


def ask_everyone(model: Model, x: Tensor) -> tuple[Tensor, list[int]]:
    """All rows go to all experts before the gate has decided; of the answers only the chosen ones are used."""
    h = model.stem(x)
    calls = [expert.forward_async(h) for expert in model.experts]
    weights, chosen = model.choose(h)
    places = model.places(chosen)
    y = h
    for call, (row, column) in zip(calls, places, strict=True):
        answer = call.wait()
        if len(row):  # if not, the answer is not used, and no gradient for it will ever come
            y = y.index_add(0, row, weights[row, column, None] * answer[row])
    return model.head(y), [len(row) for row, _ in places]


def in_one_process(model: Model, x: Tensor) -> tuple[Tensor, list[int]]:
    """What these are compared with, put in another way: each row has a weight for each expert, and some are 0."""
    h = model.stem(x)
    weights, chosen = model.choose(h)
    dense = weights.new_zeros(len(x), len(model.experts)).scatter(1, chosen, weights)
    rows = chosen.flatten().bincount(minlength=len(model.experts)).tolist()
    y = h
    for i, expert in enumerate(model.experts):
        if rows[i]:  # if not, its gradients are None and not 0, and the optimizer leaves it as it is
            y = y + dense[:, i, None] * expert(h)
    return model.head(y), rows
