"""Tests that pass, fail, hang or crash, for the tests of the runner.  They need no torch."""

from __future__ import annotations

import os
import threading
import unittest


class Fake(unittest.TestCase):
    def test_passes(self) -> None:
        print("this goes to the log")

    def test_fails(self) -> None:
        print("said before it failed")
        self.assertEqual(1 + 1, 3)  # noqa: PT009

    def test_errs(self) -> None:
        raise LookupError("nothing there")

    def test_skips(self) -> None:
        self.skipTest("not today")

    def test_hangs(self) -> None:
        self.wait_for_ever()

    def test_crashes(self) -> None:
        os._exit(7)

    def test_leaves_a_child(self) -> None:
        """It would keep the worker's pipes open after its death."""
        if os.fork() == 0:
            self.wait_for_ever()
        os._exit(8)

    @unittest.expectedFailure
    def test_passes_unexpectedly(self) -> None:
        pass

    def wait_for_ever(self) -> None:
        threading.Event().wait()
