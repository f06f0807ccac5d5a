"""How child processes come to run on telegrad too.

A child may be forked, spawned by multiprocessing, or any ``python program.py`` that a launcher starts.  All of them
inherit the environment, and every interpreter that starts imports a module ``sitecustomize`` if its path has one.  So
``PYTHONPATH`` begins with a directory that has telegrad's (``site/``), which waits for ``import torch`` and then calls
``install()``.  Nothing is written anywhere, and a process that never imports torch pays for a dictionary lookup.

This module imports nothing but the standard library, since ``sitecustomize`` uses it at the start of every process.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

#: Set in processes whose children are to run on telegrad.
VARIABLE = "TELEGRAD_COMPAT"
SITE = str(Path(__file__).parent / "site")


def adopt_children(environment: MutableMapping[str, str]) -> None:
    """Changes an environment so that Python processes that get it run on telegrad."""
    environment[VARIABLE] = "1"
    before = environment.get("PYTHONPATH", "")
    if SITE not in before.split(os.pathsep):
        environment["PYTHONPATH"] = f"{SITE}{os.pathsep}{before}" if before else SITE
