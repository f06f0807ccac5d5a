"""What the ledger asks to be done."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad._ids import GlobalId, WorkerId
from telegrad._wire.messages import InternalMessage


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message."""

    to: WorkerId
    message: InternalMessage


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody holds this value any more: forget it, or whatever waits for it to come."""

    rref_id: GlobalId


@dataclass(frozen=True, slots=True)
class Broken:
    """A local handle that is of no use: its owner is lost, or refused it.

    On the owner the id is a value's, whose creator died before its RemoteCall came: the value never will.
    """

    fork_id: GlobalId


Instruction = Send | Free | Broken
