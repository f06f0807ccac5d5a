"""How many functions of telegrad each scene may enter, on the caller and on the callee.

``make walk`` prints the counts of today.  Lower a bound when the code has become shorter; the little that it lies above
the count is for ways that depend on which thread of a worker reads first.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    caller: int
    callee: int


BOUNDS = {
    "empty call": Bound(caller=60, callee=55),
    "tensor call": Bound(caller=92, callee=106),
    "backward": Bound(caller=200, callee=130),
}
