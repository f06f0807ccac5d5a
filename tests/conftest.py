"""What every test needs: no deadline on examples, and one torch thread per process; and workers for those that ask.

Stacks on a crash or a hang need nothing here: pytest starts faulthandler, and pyproject.toml sets the time limits.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from telegrad.testing import Cluster

# A busy machine makes single examples slow; that is no failure.  How many examples run is up to each test.
hypothesis.settings.register_profile("telegrad", deadline=None)
hypothesis.settings.load_profile("telegrad")


@pytest.fixture(autouse=True, scope="module")
def _fast_torch() -> None:
    """Only where torch is loaded already, so that tests which do without it stay fast."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # many small tensors on few cores: more threads would only get in each other's way
        if not gc.get_freeze_count():
            # Tests that look for leaks collect garbage, and the objects of torch's modules would make that 0.3 s each.
            gc.collect()
            gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_process_left() -> Iterator[None]:
    """Ends the process that forks worker processes, if a test has started it."""
    yield
    if (worker_processes := sys.modules.get("worker_processes")) is not None:
        worker_processes.close_nursery()


@pytest.fixture
def trio() -> Iterator[Cluster]:
    """Three workers, which the test may kill; it acts for a, and must leave nothing behind."""
    from support import tidy_cluster  # here, so that tests without workers do not load torch

    with tidy_cluster("a", "b", "c") as workers:
        yield workers


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """The same with two workers."""
    from support import tidy_cluster

    with tidy_cluster("a", "b") as workers:
        yield workers


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """A test may start threads, but must end them."""
    from support import no_new_threads

    with no_new_threads():
        yield
