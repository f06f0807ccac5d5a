"""``python -m tests.walk``: goes through all scenes, and prints the way through the code or writes it into the docs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import show
from .pair import WalkError, running_pair
from .scenes import SCENES
from .way import Walk, typical

ROUNDS = 15
WARM_UP = 10


def walk_all(rounds: int = ROUNDS, scenes: Sequence[str] = tuple(SCENES)) -> list[Walk]:
    walks = []
    with running_pair() as pair:
        for scene in scenes:
            pair.warm_up(scene, WARM_UP)
            walks.append(typical(scene, [pair.run(scene) for _ in range(rounds)]))
    return walks


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description="The way of a call through the code.")
    parser.add_argument("--scene", choices=list(SCENES), help="only this one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often each is recorded ({ROUNDS})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help=f"print the form that docs/{show.DOCUMENT.name} shows")
    form.add_argument("--write", action="store_true", help=f"put that into docs/{show.DOCUMENT.name}")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    if arguments.write and arguments.scene:
        parser.error("--write needs all scenes")
    try:
        walks = walk_all(arguments.rounds, [arguments.scene] if arguments.scene else list(SCENES))
    except WalkError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.write:
        show.DOCUMENT.write_text(show.rewritten(show.DOCUMENT.read_text(), walks))
    else:
        print(show.markdown(walks) if arguments.markdown else show.terminal(walks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
