"""The future of a call: a real ``torch.futures.Future`` that can be awaited, and that reads its own answer."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from typing_extensions import TypeVar  # before Python 3.13, ``typing``'s has no ``default``

from telegrad._agent.failures import copy_of, forget_tracebacks

T = TypeVar("T", default=Any)
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """The future of a call, which ``rpc_async`` returns: a ``torch.futures.Future`` that can also be awaited.

    It has all of torch's methods: ``done()``, ``value()``, ``add_done_callback()``, and works with
    ``torch.futures.wait_all`` and ``collect_all``. ``await future`` in a coroutine waits without blocking its event
    loop; any number of loops and threads may wait for one future. A future cannot be sent to another worker.

    Args:
        devices (list, optional): As in torch, for a future that a program makes by hand. The futures of calls have
            none.

    Example::

        >>> # on worker0, in a job with worker1
        >>> future = rpc.rpc_async("worker1", torch.neg, args=(torch.ones(2),))
        >>> torch.futures.wait_all([future])
        [tensor([-1., -1.])]
        >>> future.done()
        True
    """

    _help: Callable[[Callable[[], Any]], Any] | None = None

    def wait(self) -> T:
        """Blocks until the answer has come, and returns the result.

        The waiting thread reads its own answer from the connection, where no other thread does. There is no timeout
        here: the call has one. Each call of ``wait`` raises an exception of its own, so that tracebacks do not mix.

        Returns:
            What the function returned.

        Raises:
            Exception: What the function raised; see :func:`telegrad.rpc.rpc_sync`.
            RpcTimeoutError: The timeout of the call has passed.
            WorkerLostError: The worker was lost, or this worker has shut down.
        """
        help_read = self._help
        if help_read is not None and not self.done():
            value: T = help_read(super().wait)
            return value
        return super().wait()

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """Returns a future of ``callback(self)``, which is run when this future is done, whether it has failed or not.

        The callback runs on the thread that completes the future, or at once if it is done. It belongs to the worker
        and to the autograd context in which ``then`` was called. It should not block for long.

        Args:
            callback (Callable): A function of one argument, this future. Its ``wait()`` returns at once, or raises.

        Returns:
            A future of what the callback returns. If the callback raises, that future fails with the exception.

        Example::

            >>> # on worker0, in a job with worker1
            >>> rpc.rpc_async("worker1", len, args=("abc",)).then(lambda future: future.wait() + 1).wait()
            4
        """
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
        """Completes the future with an exception, where a program makes a future by hand.

        Each ``wait`` raises a copy: the traceback of the exception itself would hold the frames that wait, these the
        future, and the future the exception, in a circle through C++ that the garbage collector cannot see.

        Args:
            result (Exception): What ``wait()`` is to raise.
        """
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
