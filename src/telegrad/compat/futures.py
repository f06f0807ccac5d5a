"""The futures of torch's RPC: how ``then`` fails, and how ``wait_all`` leaves early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from telegrad._agent.futures import Future as TelegradFuture
from telegrad.compat.error_texts import as_torch_rebuilds, translated


class Future(TelegradFuture):
    """What ``rpc_async`` returns."""

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """As torch's: whatever the callback raises becomes a RuntimeError."""
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. It takes a function, not {callback!r}")

        def run(future: Any) -> Any:
            try:
                return callback(future)
            except RuntimeError:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"Got the following error when running the callback: {type(error).__name__}: {error}"
                ) from error

        return cast("Future", super().then(run))

    def set_exception(self, result: Any) -> None:
        super().set_exception(as_torch_rebuilds(translated(result)) if isinstance(result, Exception) else result)


# --- wait_all and collect_all ---------------------------------------------------------------------------------------
#
# torch's own functions read the state of the C++ future, and only C++ can set an error there that keeps its Python
# type.  For them a future whose error was set from Python has succeeded, so they would wait for all futures.

_torch_wait_all = torch.futures.wait_all
_torch_collect_all = torch.futures.collect_all


def wait_all(futures: list[Any]) -> list[Any]:
    """As ``torch.futures.wait_all``, which leaves with the first error; for futures of calls too."""
    if any(isinstance(future, TelegradFuture) for future in futures):
        collect_all(futures).wait()
    return _torch_wait_all(futures)


def collect_all(futures: list[Any]) -> Any:
    """As ``torch.futures.collect_all``, which is done at the first error; for futures of calls too."""
    if not any(isinstance(future, TelegradFuture) for future in futures):
        return _torch_collect_all(futures)
    result = Future()
    lock, waiting, finished = threading.Lock(), len(futures), False

    def done(future: Any) -> None:
        nonlocal waiting, finished
        error = _error_of(future)
        with lock:
            waiting -= 1
            if finished or (error is None and waiting):
                return
            finished = True
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(list(futures))

    for future in futures:
        future.add_done_callback(done)
    return result


def _error_of(future: Any) -> Exception | None:
    try:
        future.wait()
    except Exception as error:
        return error
    return None


def offer_early_exit() -> None:
    """Puts these two in the place of torch's."""
    torch.futures.wait_all = wait_all
    torch.futures.collect_all = collect_all
