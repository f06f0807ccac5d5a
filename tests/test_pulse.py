"""The watch over silent peers, with links that only remember what is asked of them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from telegrad.agent.pulse import Pulse

from telegrad.agent.peers import Peer, WorkerRecord
from telegrad.wire.messages import Ping
from telegrad.wire.values import Route

HEARTBEAT = 8.0


class FakeLink:
    def __init__(self, dialled: bool = True, posted: bool = False) -> None:
        self.peer_id = 1
        self.dialled = dialled
        self.last_heard = START
        self.pinged = 0.0
        self.happened: list[str] = []
        self._posted = posted

    def send(self, message: Any) -> None:
        assert isinstance(message, Ping)
        self.happened.append("pinged")

    def has_posted(self) -> bool:
        return self._posted

    def flush(self) -> None:
        self.happened.append("flushed")


START = time.monotonic()


class Watch:
    """A pulse over one link, whose pool runs everything at once."""

    def __init__(self, link: FakeLink, theirs: float = 0.0) -> None:
        self.link = link
        self.peer = Peer(WorkerRecord(1, "b", heartbeat=theirs), Route(1))
        self.peer.accepted.add(link)  # type: ignore[arg-type]
        pool: Any = SimpleNamespace(submit=lambda work: work[0](*work[1:]))
        self.pulse = Pulse(HEARTBEAT, pool, lambda link, reason: self.link.happened.append(reason))
        self.pulse._last_look = START

    def look(self, *after: float) -> list[str]:
        """What happened when it was looked at after these seconds of silence."""
        for seconds in after:
            self.pulse.look(START + seconds, [self.peer])
        return self.link.happened


def test_a_link_that_was_heard_of_lately_is_left_in_peace() -> None:
    assert Watch(FakeLink()).look(1.0, 1.9) == []


def test_after_a_quarter_of_the_heartbeat_the_dialler_asks_and_then_not_at_each_look() -> None:
    assert Watch(FakeLink()).look(2.1, 2.5, 3.9) == ["pinged"]
    assert Watch(FakeLink()).look(2.1, 4.2) == ["pinged", "pinged"]
    assert Watch(FakeLink(dialled=False)).look(2.1, 4.2) == []


def test_after_all_of_it_the_peer_is_lost() -> None:
    assert Watch(FakeLink(dialled=False)).look(3.0, 6.0, 8.1) == ["it was silent for 8 s"]


def test_the_less_patient_of_the_two_sets_the_pace() -> None:
    assert Watch(FakeLink(), theirs=0.4).look(0.15) == ["pinged"]
    assert Watch(FakeLink(), theirs=80.0).look(2.1) == ["pinged"]


def test_a_process_that_was_away_itself_starts_anew() -> None:
    watch = Watch(FakeLink())
    assert watch.look(100.0) == []
    assert watch.look(102.5) == ["pinged"]


@pytest.mark.parametrize("posted", [True, False])
def test_what_is_posted_goes_out(posted: bool) -> None:
    assert Watch(FakeLink(posted=posted)).look(0.1) == ["flushed"] * posted
