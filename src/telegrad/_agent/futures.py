"""The future of a call: a real ``torch.futures.Future`` that can be awaited, and that reads its own answer."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from typing_extensions import TypeVar  # torch needs it too; before Python 3.13, ``typing`` has no ``default``

from telegrad._agent.failures import copy_of, forget_tracebacks

T = TypeVar("T", default=Any)
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """What ``rpc_async`` returns."""

    _help: Callable[[Callable[[], Any]], Any] | None = None

    def wait(self) -> T:
        """Blocks until the answer is here; reads it from the connection itself where no other thread does."""
        help_read = self._help
        if help_read is not None and not self.done():
            value: T = help_read(super().wait)
            return value
        return super().wait()

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """As torch's; the callback belongs to the worker and the autograd context in which ``then`` was called."""
        result = cast(Future[S], type(self)())
        around = contextvars.copy_context()

        def run(_: Any) -> None:
            try:
                value = around.run(callback, self)
            except BaseException as error:  # a SystemExit too: somebody may wait for the result
                result.set_exception(error)
            else:
                result.set_result(value)

        self.add_done_callback(run)
        return result

    def set_exception(self, result: Any) -> None:
        """Each wait raises a copy: the traceback of the exception itself would hold the frames that wait, these the
        future, and the future the exception, in a circle through C++ that the garbage collector cannot see."""
        forget_tracebacks(result)
        self._set_unwrap_func(_raise_copy)
        self.set_result(result)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def done(_: torch.futures.Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        yield from arrived
        return super().wait()


def _raise_copy(error: Exception) -> None:
    raise copy_of(error)
