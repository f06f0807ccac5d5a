"""What the machine itself can do, measured in the same rounds: the scale on which a library's figures are read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.by_hand import HandMadeChain, HandMadeThreads
from bench.row import Case, Plan, WrongReplyError
from bench.rows import hybrid_parts, pipeline_parts
from bench.rows.graphs import NODES, Graph, expected, make_graph

__all__ = ["LIMITS", "Limit", "answer_round_trips"]

_MESSAGE_BYTES = 64
_MEMCPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Limit:
    """A raw limit; its case gets the socket to the other process instead of a library."""

    name: str
    title: str
    case: Callable[[socket.socket], Case[Any]]
    plan: Plan
    quick: Plan
    payload: int = 0
    """Bytes that one sample moves; more than none makes the limit a bandwidth."""


class _RoundTrip(Case[bytes]):
    """64 bytes to another process and back: blocking Unix sockets, one thread on each end, Python."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def run(self, index: int) -> bytes:
        self._peer.sendall(index.to_bytes(_MESSAGE_BYTES, "little"))
        return self._peer.recv(_MESSAGE_BYTES, socket.MSG_WAITALL)

    def check(self, index: int, reply: bytes) -> None:
        if reply != index.to_bytes(_MESSAGE_BYTES, "little"):
            raise WrongReplyError(f"round trip {index} came back changed")


def answer_round_trips(peer: socket.socket) -> None:
    """The other process's part: send back whatever comes, until the caller hangs up."""
    while message := peer.recv(_MESSAGE_BYTES, socket.MSG_WAITALL):
        peer.sendall(message)


class _Memcpy(Case[torch.Tensor]):
    """One thread copies 64 MB into memory that has been written before: no page faults, no allocation."""

    held = 1

    def __init__(self, peer: socket.socket) -> None:
        self._source = torch.arange(_MEMCPY_BYTES // 4, dtype=torch.float32)
        self._target = torch.zeros_like(self._source)

    def prepare(self, index: int) -> None:
        self._source[::1024] = -1.0 - index

    def run(self, index: int) -> torch.Tensor:
        return self._target.copy_(self._source)

    def check(self, index: int, reply: torch.Tensor) -> None:
        if not torch.equal(reply, self._source):
            raise WrongReplyError(f"copy {index} differs from its source")


class _PlainBackward(Case[tuple[torch.Tensor, ...]]):
    """What ``backward`` of a context without any call does, by torch's own engine alone."""

    held = 1

    def __init__(self, peer: socket.socket) -> None:
        self._graph: Graph | None = None

    def prepare(self, index: int) -> None:
        self._graph = make_graph(NODES, index)

    def run(self, index: int) -> tuple[torch.Tensor, ...]:
        assert self._graph is not None
        return torch.autograd.grad(self._graph.loss, self._graph.leaves)

    def check(self, index: int, reply: tuple[torch.Tensor, ...]) -> None:
        for gradient, right in zip(reply, expected(NODES, index), strict=True):
            if not torch.equal(gradient, right):
                raise WrongReplyError(f"backward {index} gave {gradient}, not {right}")


class _PlainHybrid(Case[None]):
    """The same steps by plain torch in one process, one trainer's part after the other."""

    def __init__(self, peer: socket.socket) -> None:
        self._model = hybrid_parts.OneProcess()

    def run(self, index: int) -> None:
        self._model.step(index)

    def check(self, index: int, reply: None) -> None:
        """It is itself what others are compared with."""


class _PlainPipeline(Case[torch.Tensor]):
    """The same steps by plain torch in one process, one stage after the other."""

    def __init__(self, peer: socket.socket) -> None:
        self._model = pipeline_parts.OneProcess()

    def run(self, index: int) -> torch.Tensor:
        return self._model.step(index)

    def check(self, index: int, reply: torch.Tensor) -> None:
        """It is itself what others are compared with."""


LIMITS = {
    limit.name: limit
    for limit in (
        Limit("round_trip", "raw Unix-socket round trip", _RoundTrip, Plan(warmup=100, samples=400), Plan(5, 20)),
        Limit("memcpy", "memcpy into reused memory", _Memcpy, Plan(2, 8), Plan(1, 2), payload=_MEMCPY_BYTES),
        Limit("hand_made_call", "by hand", lambda _: HandMadeChain(1), Plan(warmup=50, samples=250), Plan(2, 10)),
        Limit("hand_made_chain", "by hand", lambda _: HandMadeChain(3), Plan(warmup=20, samples=100), Plan(2, 5)),
        Limit("hand_made_threads", "by hand", lambda _: HandMadeThreads(), Plan(warmup=2, samples=8), Plan(1, 1)),
        Limit("plain_backward", "plain torch.autograd.grad", _PlainBackward, Plan(warmup=3, samples=20), Plan(1, 3)),
        Limit("plain_hybrid", "the same in one process", _PlainHybrid, Plan(warmup=5, samples=40), Plan(1, 3)),
        Limit("plain_pipeline", "the same in one process", _PlainPipeline, Plan(warmup=5, samples=40), Plan(1, 3)),
    )
}
