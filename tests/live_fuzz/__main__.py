"""Feeds mutated frames of real traffic to a live worker, and looks for crashes, hangs and growth.

``python -m tests.live_fuzz --count 1000000 --seed 1``.  One input in five goes to a worker that takes pickles; there
the pickles themselves and the names of functions stay as they are.  ``--replay FILE`` sends a saved stream again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import deque
from pathlib import Path

import torch

from telegrad._transport.shared_memory import Proof

from . import functions  # noqa: F401 (what the workers call)
from .attacker import Attacker, Batch, VictimFailed, VictimProcess
from .capture import Corpus, capture
from .growth import growth
from .minimize import Saved, minimize, replay
from .mutate import Mutator

_CANARY_EVERY = 2_500
_PICKLED_SHARE = 0.2


class Failed(Exception):
    """The victim failed after these batches."""

    def __init__(self, reason: str, batches: deque[Batch], allow_pickle: bool) -> None:
        super().__init__(reason)
        self.batches = batches
        self.allow_pickle = allow_pickle


def feed(proof: Proof, corpus: Corpus, seed: int, count: int, measure_every: int, allow_pickle: bool) -> int:
    """Feeds one victim; returns how many inputs it took.  Raises Failed."""
    what = "with pickle" if allow_pickle else "without pickle"
    victim = VictimProcess(proof, allow_pickle)
    mutator = Mutator(corpus if allow_pickle else corpus.without_pickle(), f"{seed} {what}", spare_calls=allow_pickle)
    attacker = Attacker(victim, mutator)
    samples: list[dict[str, int]] = []
    started = time.monotonic()
    taken = 0
    try:
        victim.check()
        while taken < count:
            step = min(_CANARY_EVERY, measure_every, count - taken)
            attacker.run(step)
            victim.check()
            taken = victim.ask("count\n")["inputs"]
            if taken >= (len(samples) + 1) * measure_every or taken >= count:
                victim.check_log()
                samples.append(victim.ask("measure\n"))
                attacker.disconnect()
                taken = samples[-1]["inputs"]
                print(_progress(what, samples[-1], time.monotonic() - started), flush=True)
        if grown := growth(samples):
            raise VictimFailed(f"it grew {what}: {', '.join(grown)}")
    except VictimFailed as error:
        raise Failed(str(error), attacker.recent, allow_pickle) from error
    finally:
        attacker.close()
        victim.close()
    return taken


def _progress(what: str, sample: dict[str, int], seconds: float) -> str:
    figures = ", ".join(
        f"{value} {name}" for name, value in sample.items() if value and name not in ("inputs", "memory")
    )
    return (
        f"{sample['inputs']:,} inputs {what}, {sample['inputs'] / seconds:,.0f}/s; "
        f"{sample['memory'] >> 20} MB, {figures}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.live_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--measure-every", type=int, default=50_000)
    parser.add_argument("--replay", type=Path, help="a stream that an earlier run has saved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("telegrad").setLevel(logging.CRITICAL)  # the programs that are captured fail on purpose
    proof = Proof()
    if options.replay is not None:
        reason = replay(proof, Saved.read(options.replay))
        print(reason or "the victim stands it")
        return 1 if reason else 0
    corpus = capture(proof)
    print(f"{len(corpus.frames):,} frames of {len(corpus.kinds())} kinds captured", flush=True)
    pickled = int(options.count * _PICKLED_SHARE)
    taken = 0
    try:
        for allow_pickle, count in ((False, options.count - pickled), (True, pickled)):
            every = min(options.measure_every, max(count // 8, 1))
            taken += feed(proof, corpus, options.seed, count, every, allow_pickle)
    except Failed as failed:
        print(f"FAILED, with seed {options.seed}: {failed}", flush=True)
        _show_smallest(proof, failed)
        return 1
    print(f"{taken:,} inputs, no crash, no growth")
    return 0


def _show_smallest(proof: Proof, failed: Failed) -> None:
    found = minimize(proof, failed.batches, failed.allow_pickle)
    saved = found or Saved(failed.allow_pickle, [b"".join(i.raw for i in batch.inputs) for batch in failed.batches])
    folder = Path(tempfile.mkdtemp(prefix="live-fuzz-"))
    path = folder / "stream"
    saved.write(path)
    if found is not None:
        print(f"the input: {found.inputs[0][:2000].hex()}{'...' if len(found.inputs[0]) > 2000 else ''}")
    else:
        print("no single connection does it; saved is what went out last")
    print(f"again: python -m tests.live_fuzz --replay {path}")


if __name__ == "__main__":
    sys.exit(main())
