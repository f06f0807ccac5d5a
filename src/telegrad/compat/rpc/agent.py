"""torch's agent object: what programs ask it for, answered by the worker."""

from __future__ import annotations

from typing import Any

from telegrad.compat.worker import CompatWorker, WorkerInfo
from telegrad.rpc.options import RpcBackendOptions

_measures_gil = [False]


class RpcAgent:
    """The base class of all agents, as in torch."""


class TensorPipeAgent(RpcAgent):
    """Stands for this process's worker."""

    def __init__(self, worker: CompatWorker, options: RpcBackendOptions, world_size: int | None) -> None:
        self._worker = worker
        self._options = options
        self.is_static_group = bool(world_size)

    @property
    def name(self) -> str:
        return self._worker.name

    def get_worker_info(self, worker: str | int | None = None) -> Any:
        return self._worker.info(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo(peer.name, peer.id) for peer in self._worker.agent.peers]

    def _get_backend_options(self) -> RpcBackendOptions:
        return self._options

    def _get_device_map(self, worker: WorkerInfo) -> Any:
        return self._options.device_maps.get(worker.name, {})

    def get_metrics(self) -> dict[str, str]:
        """Counts under torch's names.

        A thread that waits for another worker does not count against ``num_worker_threads``, so it counts as idle.
        """
        worker, agent, threads = self._worker, self._worker.agent, self._options.num_worker_threads
        metrics = {
            "agent.thread_pool_size": threads,
            "agent.num_idle_threads": max(threads - agent.plane.calls_running, 0),
            "agent.client_active_calls": len(agent.calls),
            "agent.server_active_calls": len(worker.unanswered),
            "agent.server_active_async_calls": len(worker.unanswered - worker.executing),
        }
        if _measures_gil[0]:
            metrics["agent.gil_average_wait_time_us"] = 0  # in telegrad, all of a call's time is spent in Python
        return {key: str(value) for key, value in metrics.items()}

    def get_debug_info(self) -> dict[str, str]:
        agent = self._worker.agent
        return {
            **self.get_metrics(),
            "agent.num_busy_threads": str(agent.plane.unfinished),
            "agent.started_calls": str(agent.calls.started),
        }


def enable_gil_profiling(flag: bool) -> None:
    """Whether an agent's debug info has a line on waiting for the GIL."""
    _measures_gil[0] = flag
