"""Ends as told: ``ending.py RANK=HOW …``, HOW being an exit code or ``SIGNAME``.  Ranks not named wait to be ended."""

import os
import signal
import sys
import time

how = dict(argument.split("=") for argument in sys.argv[1:]).get(os.environ["RANK"])
if how is None:
    print("waiting")
    time.sleep(60)
elif how.startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[how])
else:
    print("the reason", file=sys.stderr)
    sys.exit(int(how))
