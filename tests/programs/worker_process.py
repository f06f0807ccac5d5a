"""Runs what a test tells it, in a process of its own.

To import torch costs more than a second of CPU, so one process, the nursery, does it once and then forks a process for
each message that comes on its standard input, a socket.  A process is an ordinary process: nothing of telegrad runs in
the nursery, and each process calls ``init_rpc`` itself.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy  # noqa: F401 (so that no process has to)
import torch
import torch.distributed

import telegrad.rpc  # noqa: F401
from programs import exported  # noqa: F401
from programs.process_tools import enter_namespace
from programs.remote_functions import EndOfChild
from telegrad.launch.process import end_with


def play(conn: Connection, setting: dict[str, Any]) -> None:
    """The life of a process: takes orders until the test hangs up."""
    log = os.open(setting["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(setting["env"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    if setting["netns"]:
        enter_namespace(setting["netns"])
    while True:
        try:
            order = conn.recv_bytes()
        except (EOFError, ConnectionError):
            return
        conn.send_bytes(obey(order))


def obey(order: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(order)
        return pickle.dumps((True, function(*args, **kwargs)))
    except EndOfChild:
        raise
    except BaseException as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        try:
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((False, RuntimeError(text)))
        return answer


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the worker_processes
    control = socket.socket(fileno=0)
    control.send(b"ready")
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            control.send(str(pid).encode())
            continue
        end_with(parent)()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        control.detach()
        with Connection(descriptors[0]) as conn:
            play(conn, pickle.loads(data))
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
