"""Jobs of several torchrun agents, whose workers are restarted: all workers of an attempt find each other."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from telegrad.launch import free_port
from worker_processes import PROGRAMS, clean_environment

PATIENCE = 90.0


class Agent:
    """One torchrun process, with one worker."""

    def __init__(self, folder: Path, launcher: list[str], program: list[str], **env: str) -> None:
        self._log = folder / f"agent-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *launcher, str(PROGRAMS / "elastic.py"), str(folder), *program],
                env=clean_environment(**env),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self._log.read_text()

    def wait(self) -> str:
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun does not end:\n{self.output()}") from None
        assert code == 0, self.output()
        return self.output()

    def end(self) -> None:
        self.process.terminate()  # ends its worker too
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def agents(*starting: Agent) -> Iterator[list[Agent]]:
    running = list(starting)
    try:
        yield running
    finally:
        for agent in running:
            agent.end()


def launcher(backend: str, port: int, node: int, nodes: str = "2") -> list[str]:
    if backend == "static":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", str(node)]
    else:
        where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=1", "--rdzv-id", "job"]
    return ["--rdzv-backend", backend, "--nnodes", nodes, *where]


def restarts(output: str) -> int:
    found = re.search(r"worker\d of 2 after (\d) restarts: all well", output)
    assert found is not None, output
    return int(found[1])


@pytest.mark.parametrize(
    ("backend", "rank", "when"),
    [
        ("static", 0, "before"),
        ("static", 1, "before"),
        ("static", 1, "after"),
        ("c10d", 1, "before"),
        ("c10d", 0, "after"),
    ],
)
def test_a_worker_fails_once(tmp_path: Path, backend: str, rank: int, when: str) -> None:
    """The agents' counts of restarts differ, where only one of the workers failed."""
    port = free_port()
    program = [str(rank), when]
    with agents(*(Agent(tmp_path, launcher(backend, port, node), program) for node in range(2))) as running:
        counts = [restarts(agent.wait()) for agent in running]
    assert sum(counts) == 1 if when == "before" else sum(counts) >= 1


def test_an_agent_joins_late(tmp_path: Path) -> None:
    """The first agent has restarted its worker by then, the second has not.

    The variable makes rank 0 serve the store.  Without it, torch 2.13 itself cannot let an agent join late: the agents
    wait for each other until they time out.
    """
    options = launcher("c10d", free_port(), 0, "1:2")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with agents(Agent(tmp_path, options, ["alone"], **env)) as running:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "alone").exists():
            assert time.monotonic() < deadline, running[0].output()
            assert running[0].process.poll() is None, running[0].output()
            time.sleep(0.05)
        running.append(Agent(tmp_path, options, ["alone"], **env))
        assert [restarts(agent.wait()) for agent in running] == [1, 0]
