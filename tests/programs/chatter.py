"""Prints many numbered lines of varying length on both streams as fast as it can: ``chatter.py COUNT``."""

import os
import sys

rank = os.environ["RANK"]
for number in range(int(sys.argv[1])):
    stream = (sys.stdout, sys.stderr)[number % 2]
    filler = rank * (number * 37 % 2000)
    stream.write(f"<{rank} {number} {filler}>\n")
