"""One process of a side, started as ``python -m bench.worker``: a fresh interpreter, nothing inherited from the parent.

Both libraries get the same treatment here: one thread for tensor arithmetic, the same number of RPC threads, an
``env://`` rendezvous, default transports.  Between orders a worker blocks in ``recv``; what its library does meanwhile,
see ``side``.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.ablations import ABLATIONS, apply
from bench.library import LIBRARIES, Library
from bench.limits import LIMITS, answer_round_trips
from bench.measure import measure
from bench.protocol import Done, Failed, Measure, Ready, Stop
from bench.row import CALLEES, CALLER, Case
from bench.rows import ROWS

__all__: list[str] = []

_RPC_THREADS = 16
_PR_SET_PDEATHSIG = 1
_GRACE = 15.0
"""The parent kills a worker that is late.  If the parent itself is gone, the worker ends itself this much later."""

MakeCase = Callable[[Measure], Case[Any]]


def _serve(orders: Connection, make_case: MakeCase) -> Stop:
    """Run orders until ``Stop``.  The death of the parent is the end of the file."""
    orders.send(Ready())
    while True:
        order = orders.recv()
        if isinstance(order, Stop):
            return order
        assert isinstance(order, Measure), order
        faulthandler.dump_traceback_later(order.timeout + _GRACE, exit=True)
        try:
            orders.send(Done(measure(make_case(order), order.plan)))
        except Exception:
            orders.send(Failed(traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


def _work_for_library(orders: Connection, role: str, library: Library, workers: int, rpc_timeout: float) -> None:
    rpc = library.rpc
    rpc.init_rpc(
        role,
        rank=(CALLER, *CALLEES).index(role),
        world_size=workers,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=_RPC_THREADS, rpc_timeout=rpc_timeout),
    )
    stop = _serve(orders, lambda order: ROWS[order.name].case(replace(library, fast=order.fast), CALLEES[0]))
    faulthandler.dump_traceback_later(stop.timeout + _GRACE, exit=True)
    rpc.shutdown()


def _work_for_raw(orders: Connection, role: str, peer: socket.socket) -> None:
    if role == CALLER:
        _serve(orders, lambda order: LIMITS[order.name].case(peer))
    else:
        orders.send(Ready())
        answer_round_trips(peer)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.worker")
    parser.add_argument("--side", choices=[*LIBRARIES, "raw"], required=True)
    parser.add_argument("--role", choices=[CALLER, *CALLEES], required=True)
    parser.add_argument("--workers", type=int, required=True, help="how many workers this side has")
    parser.add_argument("--orders", type=int, required=True, help="file descriptor of the connection to the parent")
    parser.add_argument("--peer", type=int, help="file descriptor of the socket to the other process (raw only)")
    parser.add_argument("--timeout", type=float, required=True, help="seconds for the start, and for any one call")
    parser.add_argument("--without", choices=list(ABLATIONS), help="a part of telegrad's data plane to switch off")
    arguments = parser.parse_args()

    # A stopped process would not notice that its parent has died (see ``side``).
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if arguments.without is not None:
        apply(arguments.without)
    orders = Connection(arguments.orders)
    try:
        if arguments.side == "raw":
            _work_for_raw(orders, arguments.role, socket.socket(fileno=arguments.peer))
        else:
            library = LIBRARIES[arguments.side]
            _work_for_library(orders, arguments.role, library, arguments.workers, arguments.timeout)
    except EOFError:  # the parent has died: leave without a graceful shutdown
        os._exit(1)
    except Exception:
        orders.send(Failed(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    _main()
