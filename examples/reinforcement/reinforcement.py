"""Actors play CartPole, a learner learns from them: one backward runs through all actors.

    telegrad run --workers 4 examples/reinforcement/reinforcement.py

"learner" owns the policy; every further worker is an actor, "actor1", "actor2", …, with an environment of its own.  In
each round the learner sends its parameters to all actors.  They play, and return a loss that depends on these
parameters; its gradient is computed on the actors, all at the same time, when the learner calls ``backward``.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field

import gymnasium
import torch
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

HIDDEN = 64
RATE = 0.02
DISCOUNT = 0.99
TOLERANCE = 1e-9


def make_policy() -> nn.Module:
    """From the four numbers that the environment shows: a score for each of two actions, and the return to expect."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)).double()


def copies_of(policy: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """The parameters, once for each actor: rows of one tensor.

    The gradients of the actors come back in any order.  But each comes into a row of its own, and then one operation
    adds up the rows.  So the sum is the same in every run, to the last bit, and the same as in one process.
    """
    rows = {name: parameter.expand(count, *parameter.shape).unbind() for name, parameter in policy.named_parameters()}
    return [{name: row[index] for name, row in rows.items()} for index in range(count)]


class Actor:
    """Plays in an environment of its own.  It lives on an actor; in one process it is an object like any other."""

    def __init__(self, number: int, episodes: int) -> None:
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.reset(seed=number)
        self.chance = torch.Generator().manual_seed(number)
        self.policy = make_policy()
        self.episodes = episodes

    def play(self, parameters: dict[str, Tensor]) -> tuple[Tensor, list[int]]:
        """The loss of the episodes of one round, as a function of the parameters, and the episodes' lengths."""
        self.policy.load_state_dict(parameters)
        played = [self._episode() for _ in range(self.episodes)]
        seen, actions, returns = (torch.cat(each) for each in zip(*played, strict=True))
        # With the parameters that came, not with the copy that played: these have a history, back to the learner.
        outputs = functional_call(self.policy, parameters, (seen,))
        log_probabilities = outputs[:, :2].log_softmax(1).gather(1, actions[:, None])[:, 0]
        values = outputs[:, 2]  # the baseline: actions count by how much better it went than expected
        advantages = returns - values.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        loss = ((values - returns).square() - log_probabilities * advantages).mean()
        return loss, [len(actions) for _, actions, _ in played]

    @torch.no_grad()
    def _episode(self) -> tuple[Tensor, Tensor, Tensor]:
        """What was seen at each step, what was done (0: left, 1: right), and what came of it."""
        seen, actions, over = [], [], False
        observation, _ = self.environment.reset()
        while not over:
            seen.append(torch.tensor(observation, dtype=torch.float64))
            to_the_right = self.policy(seen[-1])[:2].softmax(0)[1]
            actions.append(int(torch.rand((), generator=self.chance, dtype=torch.float64) < to_the_right))
            observation, _, fell, stood_to_the_end, _ = self.environment.step(actions[-1])
            over = fell or stood_to_the_end
        returns = [0.0]  # from the last step to the first; a step is worth so little that the sum stays below 1
        for _ in actions:
            returns.append(1 - DISCOUNT + DISCOUNT * returns[-1])
        return torch.stack(seen), torch.tensor(actions), torch.tensor(returns[:0:-1], dtype=torch.float64)


@dataclass
class Result:
    policy: nn.Module = field(default_factory=make_policy)
    losses: list[float] = field(default_factory=list)  # of each round
    lengths: list[list[int]] = field(default_factory=list)  # of the episodes of each round
    seconds: float = 0.0

    def note(self, loss: Tensor, lengths: tuple[list[int], ...]) -> None:
        self.losses.append(loss.item())
        self.lengths.append([length for each in lengths for length in each])


def learn(actors: int, episodes: int, rounds: int) -> Result:
    """Runs on the learner."""
    result = Result()
    players = [rpc.remote(f"actor{number}", Actor, (number, episodes)) for number in range(1, actors + 1)]
    parameters = [rpc.RRef(parameter) for parameter in result.policy.parameters()]
    optimizer = DistributedOptimizer(optim.Adam, parameters, lr=RATE)
    print(f"{'round':>6} {'episodes':>9} {'mean length':>12} {'longest':>8}")
    began = time.perf_counter()
    for number in range(1, rounds + 1):
        with autograd.context() as context_id:
            copies = copies_of(result.policy, actors)
            calls = [player.rpc_async().play(copy) for player, copy in zip(players, copies, strict=True)]
            losses, lengths = zip(*(call.wait() for call in calls), strict=True)
            loss = torch.stack(losses).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        result.note(loss, lengths)
        if number == 1 or number % max(1, rounds // 6) == 0:
            latest = result.lengths[-1]
            print(f"{number:>6} {number * len(latest):>9} {sum(latest) / len(latest):>12.1f} {max(latest):>8}")
    result.seconds = time.perf_counter() - began
    return result


def learn_in_one_process(actors: int, episodes: int, rounds: int) -> Result:
    """The same without telegrad."""
    result = Result()
    players = [Actor(number, episodes) for number in range(1, actors + 1)]
    optimizer = optim.Adam(result.policy.parameters(), lr=RATE)
    began = time.perf_counter()
    for _ in range(rounds):
        copies = copies_of(result.policy, actors)
        losses, lengths = zip(*(player.play(copy) for player, copy in zip(players, copies, strict=True)), strict=True)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.note(loss, lengths)
    result.seconds = time.perf_counter() - began
    return result


def compare(found: Result, expected: Result) -> None:
    """Ends the program with 1 unless the episodes are the same, and parameters and losses are but for rounding."""
    one, other = (
        torch.cat([parameters_to_vector(result.policy.parameters()), torch.tensor(result.losses, dtype=torch.float64)])
        for result in (found, expected)
    )
    difference = (one - other).abs().max().item()
    print(f"largest difference from one process: {difference:.1e}")
    if found.lengths != expected.lengths:
        first = [one == other for one, other in zip(found.lengths, expected.lengths, strict=True)].index(False)
        sys.exit(f"the episodes are not those of one process, from round {first + 1} on")
    if not difference <= TOLERANCE:
        sys.exit(f"the parameters or losses are not those of one process (more than {TOLERANCE:g} apart)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Actors play CartPole, a learner learns from them.")
    parser.add_argument("--rounds", type=int, default=30, help="steps of the optimizer (default: 30)")
    parser.add_argument("--episodes", type=int, default=4, help="of each actor in each round (default: 4)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, actors = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    rpc.init_rpc(f"actor{rank}" if rank else "learner", rank=rank, world_size=actors + 1)
    if rank == 0:
        found = learn(actors, options.episodes, options.rounds)
    rpc.shutdown()
    if rank == 0:
        expected = learn_in_one_process(actors, options.episodes, options.rounds)
        steps = sum(map(sum, found.lengths))
        print(f"{steps:,} steps: {found.seconds:.1f} s on all actors, {expected.seconds:.1f} s in one process")
        compare(found, expected)


if __name__ == "__main__":
    main()
