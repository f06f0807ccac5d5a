"""Starts a child that outlives it, says both process ids, then waits or leaves: ``family.py wait|leave``."""

import os
import subprocess
import sys
import time

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pids", os.getpid(), child.pid)
if sys.argv[1] == "wait":
    time.sleep(60)
