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
    "empty call": Bound(caller=44, callee=46),
    "tensor call": Bound(caller=76, callee=98),
    "backward": Bound(caller=165, callee=112),
}
