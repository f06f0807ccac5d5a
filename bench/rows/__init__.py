"""The rows, in the table's order.

A new row is one file here and one name in ``ROWS``.  The file holds the functions that run on the callee (at module
level, so that both processes can name them), a ``Case`` whose constructor takes the library and the callee's name, and
the ``Row`` with its counts, floor and goal.  ``empty_call`` is the pattern.  Use only the library that is passed in
(``library.rpc``, ``library.autograd``, ``library.optim``, ``library.nn``), so that the row runs unchanged on both.
"""

from __future__ import annotations

from bench.row import Row
from bench.rows.builtin_operator import BUILTIN_OPERATOR
from bench.rows.echo import ECHOES
from bench.rows.empty_call import EMPTY_CALL
from bench.rows.in_flight import IN_FLIGHT
from bench.rows.small_tensor import SMALL_TENSOR

__all__ = ["ROWS"]

ROWS: dict[str, Row] = {row.name: row for row in (EMPTY_CALL, SMALL_TENSOR, BUILTIN_OPERATOR, IN_FLIGHT, *ECHOES)}
