"""What one worker is for.  It goes by the environment, as the children of a test have nothing else to go by."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from .library import Library
from .suites import Suite

VARIABLE = "TELEGRAD_CONFORMANCE"


class Plan(NamedTuple):
    library: Library
    suites: dict[str, Suite]
    start: str = "fork"
    """How the children of a test start: ``fork``, or ``spawn`` as torch does it."""

    def in_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(self)}


def plan() -> Plan:
    """Of this process."""
    library, suites, start = json.loads(os.environ[VARIABLE])
    return Plan(library, {name: Suite(*suite) for name, suite in suites.items()}, start)
