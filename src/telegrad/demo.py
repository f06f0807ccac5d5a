"""Four workers, and a tour of what one can ask of another: ``python -m telegrad.demo``.

This process is the worker ``paris`` and tells the story; it starts the other three, which only answer.  Each step is a
function whose source is shown as it runs; its result is checked, and a wrong one ends the demo with exit code 1.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from telegrad import rpc
from telegrad.demo_screen import Screen
from telegrad.demo_tasks import Notebook, echo, greet, nothing, relay, serve, sign, square_root
from telegrad.launch import job_environment, worker_environment

WORKERS = ("paris", "oslo", "lima", "tokyo")
PATIENCE = 60  # seconds until a demo that hangs prints its stacks and fails
PARTING = 20  # seconds that the other workers get to leave


# -- the steps: their source is what the screen shows ------------------------------------------------------------------


def call() -> Any:
    return rpc.rpc_sync("oslo", greet, args=("paris",))


def futures() -> float:
    left, right = torch.rand(300, 64), torch.rand(64, 64)
    blocks = zip(("oslo", "lima", "tokyo"), left.chunk(3), strict=True)
    parts = torch.futures.wait_all([rpc.rpc_async(to, torch.mm, args=(rows, right)) for to, rows in blocks])
    difference = torch.cat(parts) - left @ right
    return difference.abs().max().item()


def chain() -> Any:
    # relay runs on oslo, asks lima in turn, and answers when lima has answered
    return rpc.rpc_sync("oslo", relay, args=("lima", torch.tensor([1.0, 2.0, 3.0])))


def reference() -> Any:
    notebook = rpc.remote("lima", Notebook)  # made on lima, and stays there
    notebook.rpc_sync().write("written from paris")  # a method call, run by the owner
    return notebook.to_here()  # a copy of the value


def passing_on() -> Any:
    notebook = rpc.remote("lima", Notebook)
    for worker in ("oslo", "tokyo"):
        rpc.rpc_sync(worker, sign, args=(notebook,))  # they get the reference, and write to lima
    return notebook.rpc_sync().read()


def error() -> Any:
    return rpc.rpc_sync("tokyo", square_root, args=(-1,))


# -- what each must show -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of the tour: what runs, the way that it takes, and what must be true of its result."""

    title: str
    run: Callable[[], object]
    paths: Sequence[Sequence[str]]
    holds: Callable[[Any], bool]
    checked: str
    raises: tuple[type[Exception], ...] = ()


def error_text(error: BaseException) -> str:
    """Message and notes, as Python itself would print them last."""
    return "".join(traceback.format_exception_only(error))


def tells_where_it_failed(result: object) -> bool:
    if not isinstance(result, ValueError):
        return False
    text = error_text(result)
    return all(words in text for words in ("tokyo", "in square_root", "return math.sqrt(number)"))


STEPS = (
    Step(
        "A call: run a function over there, get its result here",
        call,
        [("paris", "oslo")],
        lambda text: text.startswith("Hello paris, this is oslo") and str(os.getpid()) not in text,
        "oslo answered, and it is another process",
    ),
    Step(
        "Futures: three workers at once",
        futures,
        [("paris", "oslo"), ("paris", "lima"), ("paris", "tokyo")],
        lambda difference: difference < 1e-4,
        "the product put together from three parts is the one computed here",
    ),
    Step(
        "A chain: a worker asks another before it answers",
        chain,
        [("paris", "oslo", "lima")],
        lambda tensor: torch.equal(tensor, torch.tensor([20.0, 30.0, 40.0])),
        "lima added 1, then oslo multiplied by 10",
    ),
    Step(
        "A remote reference: a value that lives elsewhere",
        reference,
        [("paris", "lima")],
        lambda copy: (copy.home, copy.lines) == ("lima", ["written from paris"]),
        "made on lima, written there, copied here",
    ),
    Step(
        "Passing a reference on: one value, many hands",
        passing_on,
        [("paris", "oslo", "lima"), ("paris", "tokyo", "lima")],
        lambda lines: lines == ["signed by oslo", "signed by tokyo"],
        "both wrote into the one notebook on lima",
    ),
    Step(
        "An error: it travels back with its type, its worker and its traceback",
        error,
        [("paris", "tokyo")],
        tells_where_it_failed,
        "a ValueError, as if raised here; its text names tokyo and the line that failed",
        raises=(ValueError,),
    ),
)


# -- the tour ----------------------------------------------------------------------------------------------------------


class DemoError(Exception):
    """A step gave another result than it must."""


def take(step: Step, screen: Screen) -> None:
    screen.step(step.title, step.run, step.paths)
    result: object = None
    raised: Exception | None = None
    started = time.perf_counter()
    try:
        result = step.run()
    except step.raises as expected:
        raised = expected
    seconds = time.perf_counter() - started
    if not step.holds(raised or result):
        shown = error_text(raised) if raised else repr(result)
        raise DemoError(f"{step.run.__name__} did not show this: {step.checked}.  It gave:\n{shown}")
    if raised:
        screen.error(raised, error_text(raised), seconds, step.checked)
    else:
        screen.result(vars(result) if isinstance(result, Notebook) else result, seconds, step.checked)


def measure(action: Callable[[], object], limit: int, seconds: float = 0.5) -> list[float]:
    """How long single calls take: up to ``limit`` of them, for about ``seconds``, after a few to warm up."""
    for _ in range(5):
        action()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < limit and (started := time.perf_counter()) < end:
        action()
        taken.append(time.perf_counter() - started)
    return taken


def timings() -> list[tuple[str, list[float]]]:
    small, large = torch.ones(4), torch.ones(1 << 18)
    burst = 50

    def in_flight() -> None:
        torch.futures.wait_all([rpc.rpc_async("oslo", nothing) for _ in range(burst)])

    return [
        ("rpc_sync, empty function", measure(lambda: rpc.rpc_sync("oslo", nothing), 500)),
        ("rpc_sync, torch.add of 4 numbers", measure(lambda: rpc.rpc_sync("oslo", torch.add, args=(small, 1)), 500)),
        ("rpc_sync, 1 MB tensor there and back", measure(lambda: rpc.rpc_sync("oslo", echo, args=(large,)), 100)),
        ("remote, then to_here", measure(lambda: rpc.remote("oslo", torch.add, args=(small, 1)).to_here(), 200)),
        (f"{burst} × rpc_async at once, wait_all", measure(in_flight, 40)),
    ]


@contextmanager
def four_workers() -> Iterator[None]:
    """This process as the first worker, and three more; afterwards all have left in good order, or it raises."""
    job = job_environment(os.environ, len(WORKERS))
    os.environ.update(worker_environment(job, 0))
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(
            target=serve, args=(name, rank, worker_environment(job, rank), os.getpid()), name=name, daemon=True
        )
        for rank, name in enumerate(WORKERS)
        if rank > 0
    ]
    for process in others:
        process.start()
    rpc.init_rpc(WORKERS[0], rank=0, world_size=len(WORKERS))
    yield
    rpc.shutdown()
    for process in others:
        process.join(PARTING)
        if process.exitcode != 0:
            raise DemoError(f"{process.name} did not leave in good order (exit code {process.exitcode})")


def main() -> int:
    screen = Screen()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        with four_workers():
            screen.title(WORKERS, time.perf_counter() - started)
            for step in STEPS:
                take(step, screen)
            screen.timings(timings())
    except Exception as failure:
        unexpected = "" if isinstance(failure, DemoError) else "".join(traceback.format_exception(failure))
        screen.failure(unexpected or str(failure))
        sys.stdout.flush()
        os._exit(1)  # not sys.exit: whatever is broken must not keep the process; the other workers end with it
    screen.end(time.perf_counter() - started)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
