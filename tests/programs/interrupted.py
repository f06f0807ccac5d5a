"""Waits for a Ctrl-C, and ends as ``interrupted.py HOW`` says: "quietly", "loudly" (an error), or as any program."""

import logging
import sys
import time


def wait(depth):
    if depth:
        wait(depth - 1)
    print("ready")
    time.sleep(60)


try:
    wait(10)
except KeyboardInterrupt:
    print("saving", file=sys.stderr)
    if sys.argv[1] == "quietly":
        logging.getLogger("training").exception("stopped")
        sys.exit(0)
    if sys.argv[1] == "loudly":
        raise ValueError("could not save") from None
    raise
