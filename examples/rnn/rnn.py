"""A recurrent language model over three workers, trained window by window, with its gradients clipped as one.

    telegrad run --workers 3 examples/rnn/rnn.py

"encoder" has the table of embeddings, "decoder" the output layer, and "trainer" the LSTM between them.  The text comes
from a small grammar.  Each window of it is one context: the state of the LSTM goes on into the next window, its history
does not.
"""

import argparse
import os
import random
import sys
from collections.abc import Iterator
from math import log, log2

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_

WORKERS = ["trainer", "encoder", "decoder"]
EMBEDDING, HIDDEN = 16, 64
STREAMS = 16  # stretches of text that are read side by side
RATE = 0.01
CLIP = 0.25
TOLERANCE = 1e-9

# --- the text ---------------------------------------------------------------------------------------------------------

SUBJECT = [["the", "a"], ["young", "hungry", "clever", "shy"], ["dog", "cat", "fox", "bird"]]
OBJECT = [["the", "a"], ["white", "broken", "round", "tiny"], ["house", "bottle", "lamp", "garden"]]
SENTENCE = [*SUBJECT, ["sees", "follows", "likes", "hides"], *OBJECT]
ALPHABET = sorted({letter for words in SENTENCE for word in words for letter in word} | {" ", "."})


def bits_of_the_grammar() -> float:
    """Bits per character that no model can predict: every word is drawn at random, and its letters identify it."""
    length = sum(sum(map(len, words)) / len(words) + 1 for words in SENTENCE) + 1  # a space or a stop after each word
    return sum(log2(len(words)) for words in SENTENCE) / length


def windows(count: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Characters and those that follow them, [length, STREAMS] each; every window goes on where the last one ended."""
    chance = random.Random(1)
    needed = STREAMS * (count * length + 1)
    text = ""
    while len(text) < needed:
        text += " ".join(chance.choice(words) for words in SENTENCE) + ". "
    numbers = torch.tensor([ALPHABET.index(letter) for letter in text[:needed]]).view(STREAMS, -1).T
    for start in range(0, count * length, length):
        yield numbers[start : start + length], numbers[start + 1 : start + length + 1]


# --- the model --------------------------------------------------------------------------------------------------------

State = tuple[Tensor, Tensor] | None


class Model(nn.Module):
    """The parts may be here or on other workers: the model, and its state dict, look the same."""

    def __init__(self, embedding: nn.Module, lstm: nn.LSTM, decoder: nn.Module) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = embedding, lstm, decoder

    def forward(self, characters: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embedding(characters), state)
        return self.decoder(hidden), state

    def loss(self, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        scores, state = self(inputs, state)
        # The next window starts from this state, but no gradient comes back from there: that is the truncation.
        return cross_entropy(scores.flatten(0, 1), targets.flatten()), tuple(each.detach() for each in state)


def model_here() -> Model:
    torch.manual_seed(1)
    letters = len(ALPHABET)
    return Model(nn.Embedding(letters, EMBEDDING), nn.LSTM(EMBEDDING, HIDDEN), nn.Linear(HIDDEN, letters))


def model_on_workers() -> Model:
    letters = len(ALPHABET)
    model = Model(
        RemoteModule("encoder", nn.Embedding, (letters, EMBEDDING)),
        nn.LSTM(EMBEDDING, HIDDEN),
        RemoteModule("decoder", nn.Linear, (HIDDEN, letters)),
    )
    model.load_state_dict(model_here().state_dict())  # to all three: they begin with the same values as in one process
    return model


# --- training ---------------------------------------------------------------------------------------------------------

History = list[tuple[float, float]]  # of each window: the loss, and the norm of all gradients before they were clipped


def train_on_workers(model: Model, count: int, length: int) -> History:
    parameters = [rpc.RRef(parameter) for parameter in model.parameters()]  # those that are here: the LSTM's
    parameters += model.embedding.remote_parameters() + model.decoder.remote_parameters()
    optimizer = DistributedOptimizer(optim.Adam, parameters, lr=RATE)
    history: History = []
    state: State = None
    for inputs, targets in windows(count, length):
        with autograd.context() as context_id:
            loss, state = model.loss(inputs, targets, state)
            autograd.backward(context_id, [loss])
            norm = clip_grad_norm_(context_id, parameters, CLIP)  # one norm, over the gradients of all three workers
            optimizer.step(context_id)
        history.append((loss.item(), norm.item()))
    return history


def train_here(model: Model, count: int, length: int) -> History:
    """The same in one process: plain torch."""
    optimizer = optim.Adam(model.parameters(), lr=RATE)
    history: History = []
    state: State = None
    for inputs, targets in windows(count, length):
        optimizer.zero_grad()
        loss, state = model.loss(inputs, targets, state)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


@torch.no_grad()
def write(model: Model, length: int) -> str:
    """Lets the model write: each character is drawn as it predicts, and read again as the next input."""
    chance = torch.Generator().manual_seed(2)
    text, state = " ", None
    while len(text) <= length:
        scores, state = model(torch.tensor([[ALPHABET.index(text[-1])]]), state)
        text += ALPHABET[torch.multinomial(scores[0, 0].softmax(0), 1, generator=chance)]
    return text.strip()


# --- the comparison ---------------------------------------------------------------------------------------------------


def outcome(model: Model, history: History) -> dict[str, Tensor]:
    """All that training gave: every parameter, and the loss and norm of every window."""
    losses, norms = torch.tensor(history).T
    return {**model.state_dict(), "losses": losses, "norms": norms}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return torch.stack([(ours[name] - theirs[name]).abs().max() for name in ours]).max().item()


def show(history: History) -> None:
    print(f"{'window':>8} {'bits per character':>20} {'norm of gradients':>19}")
    every = max(len(history) // 10, 1)
    for number in range(0, len(history), every):
        part = history[number : number + every]
        loss, norm = (sum(column) / len(part) for column in zip(*part, strict=True))
        print(f"{number + len(part):>8} {loss / log(2):>20.3f} {norm:>19.3f}")


def run(count: int, length: int) -> str | None:
    """On "trainer".  Returns what is wrong, if anything is."""
    model, reference = model_on_workers(), model_here()
    print(f"{count} windows of {length} characters, {STREAMS} side by side; means since the row before")
    history = train_on_workers(model, count, length)
    show(history)
    print(f"the grammar itself: {bits_of_the_grammar():.3f} bits per character")
    print(f"clipped to {CLIP}: {sum(norm > CLIP for _, norm in history)} of {count} windows")
    print(f"it writes: {write(model, 90)}")
    expected = train_here(reference, count, length)
    difference = largest_difference(outcome(model, history), outcome(reference, expected))
    print(f"largest difference from one process: {difference:.1e}")
    if not difference <= TOLERANCE:  # and not ">", which is false of NaN
        return f"the workers computed something else than one process does: over {TOLERANCE}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=300, help="how many windows to train on")
    parser.add_argument(
        "--length", type=int, default=25, help="the characters of a window, through which gradients flow"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # on all workers, so that the comparison is sharp
    rank = int(os.environ["RANK"])
    rpc.init_rpc(WORKERS[rank])  # RANK and WORLD_SIZE are in the environment
    wrong = run(options.windows, options.length) if rank == 0 else None
    rpc.shutdown()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
