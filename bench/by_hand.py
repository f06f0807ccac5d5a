"""The passes of the context rows written by hand: Python, sockets and torch, and no library.

Each process knows beforehand what comes next, from whom, and of what shape.  There are no names, ids, futures, errors
or contexts; whatever a library adds to that costs more.  A scale, and not a bound: the system places the processes as
it likes, as it does for the libraries, and with all of them on one core the chain takes little more than half the time.

Started as ``python -m bench.by_hand``, this is a callee.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.row import Case, WrongReplyError
from bench.rows.context_threads import EACH, THREADS
from bench.rows.passes import inputs
from bench.rows.weights import new_weight

__all__ = ["HandMadeChain", "HandMadeThreads"]

_ROOT = Path(__file__).resolve().parent.parent
_FORWARD, _BACKWARD = b"f", b"b"
_BYTES = 4 * 8  # of a 2x2 tensor in double precision
_LOOK = 500e-6  # seconds in which an answer is looked for, where there is a core for each process
_END = 60.0  # seconds that a callee has to leave


class _Received(torch.autograd.Function):
    """Makes a received tensor part of the local graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


_anchor = torch.zeros((), requires_grad=True)


def _send(link: socket.socket, kind: bytes, tensor: Tensor) -> None:
    link.sendall(kind + tensor.detach().numpy().tobytes())


def _receive(link: socket.socket, look: bool = False) -> tuple[bytes, Tensor]:
    end = time.perf_counter() + _LOOK if look else 0.0
    while True:
        try:
            message = link.recv(1 + _BYTES, socket.MSG_DONTWAIT if look else socket.MSG_WAITALL)
        except BlockingIOError:
            look = time.perf_counter() < end
            os.sched_yield()
            continue
        if not message:
            raise EOFError
        return message[:1], torch.frombuffer(bytearray(message[1:]), dtype=torch.float64).view(2, 2)


def _arrive(tensor: Tensor) -> Tensor:
    return _Received.apply(_anchor, tensor)  # type: ignore[no-any-return, no-untyped-call]


def _serve(weight: Tensor, callers: Sequence[socket.socket], further: socket.socket | None, look: bool) -> None:
    """A callee: multiplies, has the next one go on if there is one, and does the same backward."""
    begun: dict[int, tuple[Tensor, Tensor]] = {}
    links = {link.fileno(): link for link in callers}
    ready = select.epoll()
    for descriptor in links:
        ready.register(descriptor, select.EPOLLIN)
    while True:
        for descriptor in links if len(links) == 1 else [found for found, _ in ready.poll()]:
            link = links[descriptor]
            kind, tensor = _receive(link, look)
            if kind == _FORWARD:
                received = _arrive(tensor)
                product = received * weight
                begun[descriptor] = received, product
                _send(link, _FORWARD, _ask(further, _FORWARD, product))
            else:
                received, product = begun.pop(descriptor)
                gradient = _ask(further, _BACKWARD, tensor)
                _, gradient = torch.autograd.grad([product], [weight, received], [gradient])
                _send(link, _BACKWARD, gradient)


def _ask(further: socket.socket | None, kind: bytes, tensor: Tensor) -> Tensor:
    if further is None:
        return tensor
    _send(further, kind, tensor)
    return _receive(further)[1]


class _Callee:
    """Another process, with a parameter of its own."""

    def __init__(self, weight: float, callers: int, further: _Callee | None = None, look: bool = False) -> None:
        pairs = [socket.socketpair() for _ in range(callers)]
        self.links = [ours for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        command = [sys.executable, "-m", "bench.by_hand", "--weight", str(weight)]
        command += ["--callers", ",".join(str(end.fileno()) for end in theirs)]
        handed_on = [end.fileno() for end in theirs]
        if further is not None:
            command += ["--further", str(further.links[0].fileno())]
            handed_on.append(further.links[0].fileno())
        if look:
            command.append("--look")
        self._process = subprocess.Popen(command, cwd=_ROOT, pass_fds=handed_on)
        for end in (*theirs, *(further.links if further is not None else ())):
            end.close()

    def leave(self) -> None:
        for link in self.links:
            link.close()
        self._process.wait(_END)


class _Pass:
    """What the caller does."""

    def __init__(self, weights: Sequence[float], mine: Tensor | None) -> None:
        self._mine = mine
        self._inputs = inputs()
        self._factor = torch.tensor(weights, dtype=torch.float64).prod()

    def run(self, index: int, link: socket.socket, look: bool = False) -> Tensor:
        tensor = self._inputs[index % len(self._inputs)]
        product = tensor if self._mine is None else tensor * self._mine
        _send(link, _FORWARD, product)
        result = _arrive(_receive(link, look)[1])
        (gradient,) = torch.autograd.grad(result.square().sum(), [result])
        _send(link, _BACKWARD, gradient)
        _, gradient = _receive(link, look)
        if self._mine is None:
            return gradient
        return torch.autograd.grad([product], [tensor, self._mine], [gradient])[0]

    def check(self, index: int, reply: Tensor) -> None:
        right = 2 * self._inputs[index % len(self._inputs)].detach() * self._factor.square()
        if not torch.equal(reply, right):
            raise WrongReplyError(f"pass {index} gave {reply}, not {right}")


class HandMadeChain(Case[Tensor]):
    """Through so many callees, one within the other."""

    def __init__(self, callees: int) -> None:
        # As in the rows: one call leaves a core for each process, and a chain begins with a parameter of the caller's.
        self._look = callees == 1
        weights = [place + 2.0 for place in range(callees + (not self._look))]
        self._pass = _Pass(weights, None if self._look else new_weight(weights[0]))
        self._callees: list[_Callee] = []
        further = None
        for weight in reversed(weights[-callees:]):
            further = _Callee(weight, 1, further, self._look)
            self._callees.append(further)
        self._link = self._callees[-1].links[0]

    def run(self, index: int) -> Tensor:
        return self._pass.run(index, self._link, self._look)

    def check(self, index: int, reply: Tensor) -> None:
        self._pass.check(index, reply)

    def finish(self, calls: int) -> None:
        for callee in reversed(self._callees):
            callee.leave()


class HandMadeThreads(Case[list[Tensor]]):
    """One small call in a thread, again and again, in eight threads that have a connection each."""

    def __init__(self) -> None:
        self._pass = _Pass([2.0], None)
        self._callee = _Callee(2.0, THREADS)
        self._pool = ThreadPoolExecutor(THREADS)

    def run(self, index: int) -> list[Tensor]:
        return [reply for replies in self._pool.map(self._several, range(THREADS)) for reply in replies]

    def _several(self, thread: int) -> list[Tensor]:
        return [self._pass.run(thread * EACH + turn, self._callee.links[thread]) for turn in range(EACH)]

    def check(self, index: int, reply: list[Tensor]) -> None:
        for place, gradient in enumerate(reply):
            self._pass.check(place, gradient)

    def finish(self, calls: int) -> None:
        self._pool.shutdown()
        self._callee.leave()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.by_hand")
    parser.add_argument("--weight", type=float, required=True)
    parser.add_argument("--callers", required=True, help="file descriptors of the sockets to them")
    parser.add_argument("--further", type=int, help="file descriptor of the socket to the next callee")
    parser.add_argument("--look", action="store_true", help="look for the next request a while before sleeping")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    callers = [socket.socket(fileno=int(each)) for each in arguments.callers.split(",")]
    further = socket.socket(fileno=arguments.further) if arguments.further is not None else None
    try:
        _serve(new_weight(arguments.weight), callers, further, arguments.look)
    except (EOFError, ConnectionError):
        pass  # the caller has hung up


if __name__ == "__main__":
    _main()
