"""torch's suites as test classes: the suite itself, a fixture of torch's, and how its processes start.

Imported by the worker and by the children of its tests, which find the class of their test here by its name.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import unittest
from typing import Any

from .library import put_in_place
from .plan import plan
from .suites import Suite

PLAN = plan()

#: Suites that could not be imported, and why.
BROKEN: dict[str, BaseException] = {}

#: Suites by name.  They are globals of this module too, so that pickle finds them in the children.
CLASSES: dict[str, type[unittest.TestCase]] = {}


class _Forked:
    """Forks the children of a test from the worker, which has imported torch and the suites and has one thread only.

    Started anew, as torch does it, each child would import torch for longer than most tests take.
    """

    def _spawn_processes(self) -> None:
        import torch.multiprocessing

        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]


def _build(name: str, suite: Suite) -> type[unittest.TestCase]:
    tests: type[unittest.TestCase] = getattr(importlib.import_module(suite.module), suite.class_name)
    if suite.fixture == "none":
        return tests
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    class Started(MultiProcessTestCase):  # what torch's own runner mixes in
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    start = (_Forked,) if PLAN.start == "fork" else ()
    return type(name, (*start, tests, _fixture(suite), Started), {"__module__": __name__})


def _fixture(suite: Suite) -> Any:
    # Only one of them: in torch, the faulty back end replaces the enumeration of back ends when it is imported.
    where = "torch.testing._internal.distributed.rpc"
    if suite.fixture == "faulty":
        return importlib.import_module(f"{where}.faulty_rpc_agent_test_fixture").FaultyRpcAgentTestFixture
    return importlib.import_module(f"{where}.tensorpipe_rpc_agent_test_fixture").TensorPipeRpcAgentTestFixture


def _prepare() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the driver asks so for stacks; children inherit it
    put_in_place(PLAN.library)
    for name, suite in PLAN.suites.items():
        try:
            CLASSES[name] = globals()[name] = _build(name, suite)
        except Exception as error:
            BROKEN[name] = error
    gc.collect()
    gc.freeze()  # else the first collection in each child would touch, and so copy, all that torch has made


_prepare()
