"""One of the two worker processes: ``python -m tests.walk.worker NAME DESCRIPTOR``.

It does what the parent asks over the descriptor, one request at a time; each answer is the result or a traceback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch

from telegrad import rpc

from . import scenes
from .recorder import Recorder, ThreadLog


class Side:
    """The requests, as methods.  The caller gets ``prepare``, ``step``, ``finish``, the callee ``start``, ``stop``."""

    def __init__(self, name: str) -> None:
        assert scenes.__file__ is not None
        self._name = name
        self._recorder = Recorder(scenes.__file__)
        self._recorder.install()
        self._scene = ExitStack()
        self._step: Callable[[], object] = scenes.nothing

    def join(self) -> None:
        rpc.init_rpc(self._name)

    def warm_up(self, scene: str, times: int) -> None:
        for _ in range(times):
            with scenes.SCENES[scene]() as step:
                step()

    def prepare(self, scene: str) -> None:
        self._step = self._scene.enter_context(scenes.SCENES[scene]())

    def step(self) -> None:
        self.start()
        self._step()

    def finish(self) -> list[ThreadLog]:
        logs = self.stop()
        self._scene.close()
        return logs

    def start(self) -> None:
        self._recorder.start()

    def stop(self) -> list[ThreadLog]:
        if missed := self._recorder.missed():
            raise RuntimeError(f"these threads of the {self._name} were not recorded: {', '.join(missed)}")
        return self._recorder.stop()

    def leave(self) -> None:
        rpc.shutdown()


def main(name: str, descriptor: int) -> None:
    torch.set_num_threads(1)
    side = Side(name)
    with Connection(descriptor) as parent:
        while True:
            try:
                method, args = parent.recv()
            except EOFError:
                return
            try:
                parent.send((True, getattr(side, method)(*args)))
            except Exception:
                parent.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
