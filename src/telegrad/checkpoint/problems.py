"""What is wrong with a checkpoint, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence

from telegrad.errors import TelegradError

_SHOWN = 50  # the wrong model has thousands of wrong parameters; ``problems`` has them all


class CheckpointError(TelegradError):
    """A checkpoint cannot be made of what was given, is damaged, or does not fit; ``problems`` lists why.

    Nothing was touched: the things are as they were, and so are the checkpoints.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        super().__init__("\n  ".join([f"{what}:", *problems[:_SHOWN], *more]))
        self.problems = list(problems)
