"""A recommender in three places: sharded tables on parameter servers, a dense net under DDP, a top net elsewhere.

    .venv/bin/telegrad run --workers 5 examples/hybrid/hybrid.py

Trainer 0 leads: it makes the remote parts, trains with trainer 1, and compares with one process in the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import one_process
import picture
import torch
import torch.distributed as dist
from clicks import Clicks
from comparison import compare, merged
from model import SHARDS, TRAINERS, Shard, Top
from screen import Screen
from torch import optim
from training import NET_RATE, TABLE_RATE, Job, Outcome, train
from watchdog import at_rest, still_alive

from telegrad import rpc
from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

WORKERS = ("trainer0", "trainer1", "ps0", "ps1", "top")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=512, help="samples in a step, over both trainers")
    parser.add_argument("--picture", type=Path, default=Path("build/hybrid.svg"), help="where to draw the loss")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < TRAINERS or options.batch % TRAINERS:
        parser.error("at least one step is needed, and a batch that can be divided among two trainers")
    return options


def work(rank: int, options: argparse.Namespace, screen: Screen) -> bool:
    """The whole life of one worker; False: it is trainer 0, and the training was not that of one process."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows what a worker is doing
    settings = rpc.RpcBackendOptions(init_timeout=60)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=settings)
    equal = lead(options, screen) if rank == 0 else True  # the others only answer
    rpc.shutdown()
    at_rest()
    return equal


def lead(options: argparse.Namespace, screen: Screen) -> bool:
    """Trainer 0: whether the training was that of one process."""
    still_alive()
    job, _store = prepare(options)
    still_alive()
    other = rpc.rpc_async("trainer1", train, (1, job), timeout=0)
    with screen.training("5 workers  ", options.steps, options.batch) as report:
        try:
            mine = train(0, job, report)
        except RuntimeError as failure:
            if not isinstance(failure, TelegradError):  # it is the trainers' group that failed
                raise_reason(other)
            raise
    distributed = merged([mine, other.wait()])
    with screen.training("one process", options.steps, options.batch) as report:
        alone = one_process.train(options.steps, options.batch, report)
    comparison = compare(distributed, alone)
    screen.table(comparison)
    screen.verdict(comparison)
    least = Clicks().least_loss(options.steps, options.batch)
    picture.draw(options.picture, distributed.losses, alone.losses, least)
    screen.say(f"loss over steps, drawn: {options.picture}")
    return comparison.equal


def prepare(options: argparse.Namespace) -> tuple[Job, dist.TCPStore]:
    """Makes the remote parts and what the trainers share; the store is to be kept until they are done."""
    shards = [RemoteModule(f"ps{number}", Shard, (number,)) for number in range(SHARDS)]
    top = RemoteModule("top", Top)
    groups = [
        {"params": [each for shard in shards for each in shard.remote_parameters()], "lr": TABLE_RATE},
        {"params": top.remote_parameters(), "lr": NET_RATE},
    ]
    optimizer = DistributedOptimizer(optim.Adagrad, groups)
    host = os.environ["MASTER_ADDR"]  # that of trainer 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # at any free port
    return Job(shards, top, rpc.RRef(optimizer), (host, store.port), options.steps, options.batch), store


def raise_reason(other: torch.futures.Future[Outcome], patience: float = 5.0) -> None:
    """Raises what went wrong on the other trainer, if it fails soon, too."""
    deadline = time.monotonic() + patience
    while not other.done() and time.monotonic() < deadline:
        time.sleep(0.05)
    if other.done():
        other.wait()


if __name__ == "__main__":
    try:
        ended_well = work(int(os.environ["RANK"]), parsed(), Screen())
    except Exception:
        traceback.print_exc()
        ended_well = False
    sys.stdout.flush()
    os._exit(0 if ended_well else 1)  # not sys.exit: whatever is broken must not keep the process
