"""``make demo``: the hybrid model with nothing to set up: starts the other four workers, and is trainer 0 itself.

So the bar has the terminal to itself: ``telegrad run`` would put the worker's name before each line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from hybrid import WORKERS, parsed, work
from screen import Screen

from telegrad.launch import job_environment, worker_environment
from telegrad.launch.process import end_with

PROGRAM = Path(__file__).with_name("hybrid.py")
PARTING = 20  # seconds that the other workers get to leave


def start(rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """It ends with this process, and has a process group of its own: Ctrl-C comes here only."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *sys.argv[1:]],
        env=worker_environment(environment, rank),
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=end_with(os.getpid()),
    )


def see_off(others: list[subprocess.Popen[bytes]]) -> None:
    for name, process in zip(WORKERS[1:], others, strict=True):
        if code := process.wait(PARTING):
            raise RuntimeError(f"{name} did not leave in good order (exit code {code})")


def main() -> int:
    options = parsed()
    screen = Screen()
    screen.title(WORKERS)
    job = job_environment(os.environ, len(WORKERS))
    os.environ.update(worker_environment(job, 0))
    others = [start(rank, job) for rank in range(1, len(WORKERS))]
    try:
        equal = work(0, options, screen)
        see_off(others)
        return 0 if equal else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as failure:
        if isinstance(failure, TimeoutError | subprocess.TimeoutExpired):
            for process in others:
                process.send_signal(signal.SIGUSR1)  # show your stacks
            time.sleep(1)
        traceback.print_exc()
        screen.failure(str(failure).strip().splitlines()[-1])  # an error of another worker ends with the reason
        return 1
    finally:
        for process in others:
            process.kill()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not sys.exit: whatever is broken must not keep the process
