"""A run that hangs prints its stacks and ends with exit code 1."""

from __future__ import annotations

import faulthandler

PATIENCE = 90.0  # seconds; more than a call, or init_rpc, may take: they can tell better what they wait for


def still_alive() -> None:
    """To be called now and then: from now on there are so many seconds until the next time."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def at_rest() -> None:
    faulthandler.cancel_dump_traceback_later()
