"""The rows, in the table's order.

A new row is one file here and one name in ``ROWS``.  The file holds the functions that run on the callee (at module
level, so that both processes can name them), a ``Case`` whose constructor takes the library and the callee's name, and
the ``Row`` with its counts, floor and goal.  ``empty_call`` is the pattern.  Use only the library that is passed in
(``library.rpc``, ``library.autograd``, ``library.optim``, ``library.nn``), so that the row runs unchanged on both.
A row about autograd is a ``Task`` of ``passes`` and calls ``library.backward``, so that it runs in both modes too.
"""

from __future__ import annotations

from bench.row import Row
from bench.rows.builtin_operator import BUILTIN_OPERATOR
from bench.rows.context_chain import CONTEXT_CHAIN
from bench.rows.context_fan_out import CONTEXT_FAN_OUT
from bench.rows.context_small import CONTEXT_SMALL
from bench.rows.context_threads import CONTEXT_THREADS
from bench.rows.echo import ECHOES
from bench.rows.empty_call import EMPTY_CALL
from bench.rows.growth import POINTS
from bench.rows.hybrid_step import HYBRID_STEP
from bench.rows.in_flight import IN_FLIGHT
from bench.rows.local_backward import LOCAL_BACKWARD
from bench.rows.optimizer_step import OPTIMIZER_STEPS
from bench.rows.pipeline_step import PIPELINE_STEP
from bench.rows.remote_module import REMOTE_MODULE
from bench.rows.small_tensor import SMALL_TENSOR

__all__ = ["ROWS"]

_RPC = (EMPTY_CALL, SMALL_TENSOR, BUILTIN_OPERATOR, IN_FLIGHT, *ECHOES)
_AUTOGRAD = (CONTEXT_SMALL, CONTEXT_CHAIN, CONTEXT_FAN_OUT, CONTEXT_THREADS, LOCAL_BACKWARD)
_TRAINING = (*OPTIMIZER_STEPS, REMOTE_MODULE, HYBRID_STEP, PIPELINE_STEP)

ROWS: dict[str, Row] = {row.name: row for row in (*_RPC, *_AUTOGRAD, *_TRAINING, *POINTS)}
