"""The bounded log of refusals, with a clock that the test moves."""

from __future__ import annotations

import logging

import pytest

from telegrad._transport.refusals import LINES, WINDOW, RefusalLog

ONLY_COUNTED = "more refused connections are only counted for the rest of this minute"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Refusals:
    """A log of refused connections, and the lines that it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = Clock()
        self._caplog = caplog
        self._log = RefusalLog(logging.getLogger("telegrad.transport"), "refused connections", self.clock)

    def add(self, count: int) -> list[str]:
        """What that many refusals write."""
        self._caplog.clear()
        for number in range(count):
            self._log.add(f"a connection from port {number}", "a reason")
        assert {record.levelno for record in self._caplog.records} <= {logging.WARNING}
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Refusals:
    return Refusals(caplog)


def test_each_refusal_is_a_line_at_first(refusals: Refusals) -> None:
    lines = refusals.add(LINES)
    assert lines == [f"refused a connection from port {number}: a reason" for number in range(LINES)]


def test_further_ones_are_only_counted_and_that_is_said_once(refusals: Refusals) -> None:
    lines = refusals.add(1000)
    assert len(lines) == LINES + 1
    assert lines[-1] == ONLY_COUNTED
    refusals.clock.now += WINDOW - 1
    assert refusals.add(1000) == []


def test_the_next_window_begins_with_their_number(refusals: Refusals) -> None:
    refusals.add(LINES + 7)
    refusals.clock.now += WINDOW
    assert refusals.add(1) == [
        "7 more refused connections were not logged one by one",
        "refused a connection from port 0: a reason",
    ]
    assert len(refusals.add(LINES)) == LINES, "19 lines of this window, and that the last is only counted"
    refusals.clock.now += WINDOW
    assert refusals.add(1)[0] == "1 more refused connections were not logged one by one"


def test_a_window_without_uncounted_ones_says_nothing_of_them(refusals: Refusals) -> None:
    refusals.add(LINES)
    refusals.clock.now += WINDOW
    assert len(refusals.add(LINES)) == LINES


def test_a_window_begins_with_its_first_refusal(refusals: Refusals) -> None:
    refusals.add(1)
    refusals.clock.now += 100 * WINDOW
    refusals.add(LINES)
    refusals.clock.now += WINDOW - 1
    assert refusals.add(2) == [ONLY_COUNTED]
    refusals.clock.now += 1
    assert len(refusals.add(1)) == 2


def test_a_clock_that_begins_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    """``time.monotonic`` may count from the start of the machine."""
    refusals = Refusals(caplog)
    refusals.clock.now = 0.0
    assert len(refusals.add(2)) == 2
