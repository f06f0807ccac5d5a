"""The life of one fork: the states that a user knows of it, the events that change them, and one table of both."""

from __future__ import annotations

import enum
from typing import Final


class _Named(enum.Enum):
    """Hashed in C, as any object: an Enum's own hash is a function in Python, called several times in each step."""

    __hash__ = object.__hash__


class ForkState(_Named):
    """What a user knows of one of its forks."""

    PENDING = enum.auto()  # the owner has not answered yet
    CONFIRMED = enum.auto()  # the owner counts it
    UNSURE = enum.auto()  # the RemoteCall timed out: the owner may count it, or will, or never
    BROKEN = enum.auto()  # the owner is lost or refused; the handle is still there
    LEAVING = enum.auto()  # PENDING, and the handle is gone
    CLOSING = enum.auto()  # the handle is gone, but children are pending (G2)
    GONE = enum.auto()  # forgotten; never stored


class ForkEvent(_Named):
    """What can happen to it."""

    SHARE = enum.auto()
    DROP = enum.auto()
    CONFIRM = enum.auto()
    FAIL = enum.auto()  # refused, or the RemoteCall never left
    TIME_OUT = enum.auto()
    LOSE_OWNER = enum.auto()
    SETTLE = enum.auto()  # no child is pending any more


_S, _E = ForkState, ForkEvent
# fmt: off
TRANSITIONS: Final[dict[ForkState, dict[ForkEvent, ForkState]]] = {
    _S.PENDING: {_E.SHARE: _S.PENDING, _E.DROP: _S.LEAVING, _E.CONFIRM: _S.CONFIRMED,
                 _E.FAIL: _S.BROKEN, _E.TIME_OUT: _S.UNSURE, _E.LOSE_OWNER: _S.BROKEN},
    _S.CONFIRMED: {_E.SHARE: _S.CONFIRMED, _E.DROP: _S.CLOSING, _E.LOSE_OWNER: _S.BROKEN},
    _S.UNSURE: {_E.SHARE: _S.UNSURE, _E.DROP: _S.CLOSING, _E.CONFIRM: _S.CONFIRMED, _E.LOSE_OWNER: _S.BROKEN},
    _S.BROKEN: {_E.DROP: _S.GONE},
    _S.LEAVING: {_E.CONFIRM: _S.CLOSING, _E.FAIL: _S.GONE, _E.TIME_OUT: _S.CLOSING, _E.LOSE_OWNER: _S.GONE},
    _S.CLOSING: {_E.SETTLE: _S.GONE, _E.LOSE_OWNER: _S.GONE},
    _S.GONE: {},
}
# fmt: on
UNANSWERED: Final = frozenset({_S.PENDING, _S.LEAVING})
OWN_EVENTS: Final = frozenset({_E.SHARE, _E.DROP})  # ours to get right; all others may come late, and are ignored
