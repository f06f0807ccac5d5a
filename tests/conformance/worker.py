"""Runs the tests that the driver names, one after the other; a line of JSON for each.

``python -m tests.conformance.worker``.  Each line of stdin is ``suite test``.  It begins by telling which tests there
are.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import unittest
from typing import Any, TextIO


def main() -> None:
    answers = _own_stdout()
    from .cases import BROKEN, CLASSES

    load = unittest.TestLoader()
    _say(
        answers,
        tests={name: list(load.getTestCaseNames(kind)) for name, kind in CLASSES.items()},
        broken={name: "".join(traceback.format_exception(error)) for name, error in BROKEN.items()},
    )
    for line in sys.stdin:
        suite, name = line.split()
        outcome = Outcome()
        began = time.monotonic()
        unittest.TestSuite([CLASSES[suite](name)]).run(outcome)
        _say(answers, status=outcome.status, text=outcome.text, seconds=round(time.monotonic() - began, 3))
    os._exit(0)  # what a half-broken library has left running must not keep us


class Outcome(unittest.TestResult):
    """Of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.text = "passed", ""

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note("failed", self.errors[-1][1])

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note("failed", self.failures[-1][1])

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._note("skipped", reason)

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._note("failed", "was expected to fail, and did not")

    def _note(self, status: str, text: str) -> None:
        self.status, self.text = status, "\n".join(filter(None, (self.text, text)))


def _own_stdout() -> TextIO:
    """stdout for the answers alone: what tests print goes to stderr, which the driver keeps in a file."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # A child that outlives us must not make the driver believe that we live.
    os.register_at_fork(after_in_child=answers.close)
    return answers


def _say(answers: TextIO, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
