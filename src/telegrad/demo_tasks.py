"""What the workers of the demo run: importable by all of them, as everything that is called remotely must be."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from telegrad import rpc
from telegrad.process import end_with


def serve(name: str, rank: int, environment: Mapping[str, str], parent: int) -> None:
    """The whole life of a worker that only answers: join, serve until all are done, leave."""
    end_with(parent)()
    os.environ.update(environment)
    torch.set_num_threads(1)
    rpc.init_rpc(name, rank=rank, world_size=int(environment["WORLD_SIZE"]))
    rpc.shutdown()


def greet(caller: str) -> str:
    return f"Hello {caller}, this is {rpc.get_worker_info().name}, process {os.getpid()}."


def nothing() -> None:
    pass


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def square_root(number: float) -> float:
    return math.sqrt(number)


class Notebook:
    """A value that stays where it was made, and is written by others."""

    def __init__(self) -> None:
        self.home = rpc.get_worker_info().name
        self.lines: list[str] = []

    def write(self, line: str) -> str:
        self.lines.append(line)
        return rpc.get_worker_info().name

    def read(self) -> list[str]:
        return self.lines


def sign(notebook: rpc.RRef[Notebook]) -> str:
    """Write into a notebook that lives elsewhere; answer where the writing took place."""
    return str(notebook.rpc_sync().write(f"signed by {rpc.get_worker_info().name}"))


@rpc.functions.async_execution
def relay(to: str, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Ask a third worker and answer when it does; no thread waits here in the meantime."""
    return rpc.rpc_async(to, torch.add, args=(tensor, 1)).then(lambda future: future.wait() * 10)
