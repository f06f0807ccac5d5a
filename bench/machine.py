"""Where it was measured: without it a figure is only a number."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Machine", "this_machine"]


@dataclass(frozen=True)
class Machine:
    """``load`` is the one-minute load average before the run: well above 0, others were at work too."""

    cpu: str
    cores: int
    memory_gb: float
    kernel: str
    python: str
    torch: str
    date: str
    load: float

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:.0f} GB, {self.kernel}, "
            f"Python {self.python}, torch {self.torch}, {self.date[:10]}"
        )


def this_machine() -> Machine:
    """As seen from this process: only the cores that it may run on count."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        load=round(os.getloadavg()[0], 2),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown CPU"
