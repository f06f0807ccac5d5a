"""What every test needs: no deadline on examples, and one torch thread per process.

Stacks on a crash or a hang need nothing here: pytest starts faulthandler, and pyproject.toml sets the time limits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import hypothesis
import pytest

# A busy machine makes single examples slow; that is no failure.  How many examples run is up to each test.
hypothesis.settings.register_profile("telegrad", deadline=None)
hypothesis.settings.load_profile("telegrad")


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> None:
    """Many small tensors on few cores: torch's own threads would only get in each other's way.

    Only where torch is loaded already, so that tests which do without it stay fast.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_process_left() -> Iterator[None]:
    """Ends the process that forks worker processes, if a test has started it."""
    yield
    if (worker_processes := sys.modules.get("worker_processes")) is not None:
        worker_processes.close_nursery()
