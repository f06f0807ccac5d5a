"""Prints what the launcher gave this worker, as JSON."""

import json
import os
import sys

PREFIXES = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_", "TELEGRAD_", "OMP_")
shown = {key: value for key, value in os.environ.items() if key.startswith(PREFIXES)}
print(json.dumps({**shown, "argv": sys.argv[1:]}))
