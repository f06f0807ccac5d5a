"""Counts the signals that it gets for a while, then exits with ``signals.py CODE``; ``stubborn`` ignores them all."""

import signal
import sys
import time

got: list[str] = []
stubborn = sys.argv[1] == "stubborn"
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, lambda number, frame: got.append(signal.Signals(number).name))
print("ready")
deadline = time.monotonic() + 60
while time.monotonic() < deadline and (stubborn or not got):
    time.sleep(0.02)
time.sleep(0.2)  # time for a second copy to arrive, if one was sent
print("got", *got)
sys.exit(int(sys.argv[1]))
