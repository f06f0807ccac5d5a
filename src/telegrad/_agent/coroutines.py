"""Coroutines of a worker: ``async def`` functions that others call run on one asyncio event loop.

The loop has a thread of its own, which starts with the first coroutine and ends with the worker.  A coroutine that
awaits occupies no thread of the pool.  One that blocks (``rpc_sync``, ``Future.wait``, ``time.sleep``) blocks all.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import torch

from telegrad._core.interface import DataPlane
from telegrad.errors import NotInitializedError

log = logging.getLogger("telegrad.agent")

Done = Callable[[Any, BaseException | None], None]


class Coroutines:
    def __init__(self, name: str, plane: DataPlane, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._plane = plane
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.running = 0  # those whose outcome is not settled yet

    def run(self, coroutine: Coroutine[Any, Any, Any], done: Done) -> None:
        """Runs it with the caller's context variables: the worker and the autograd context.

        ``done`` gets its value or its exception, on a thread of the pool.
        """
        around = contextvars.copy_context()
        with self._lock:
            if self._closed:
                coroutine.close()
                raise NotInitializedError(f"worker {self._name!r} has shut down and runs no coroutine any more")
            loop = self._loop or self._start()
            self.running += 1
            loop.call_soon_threadsafe(self._begin, loop, coroutine, done, context=around)

    def runs_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def close(self, timeout: float) -> None:
        """Cancels what still runs and ends the thread."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
                self._loop = None
        if thread is not None and not self.runs_here():
            thread.join(timeout)

    def _start(self) -> asyncio.AbstractEventLoop:
        runner = asyncio.Runner()
        self._loop = runner.get_loop()
        self._thread = threading.Thread(
            target=self._main, args=(runner,), name=f"telegrad-{self._name}-asyncio", daemon=True
        )
        self._thread.start()
        return self._loop

    def _main(self, runner: asyncio.Runner) -> None:
        self._on_thread_start()
        with runner:  # at its end it cancels all tasks
            loop = runner.get_loop()
            asyncio.set_event_loop(loop)
            while not self._closed:
                try:
                    loop.run_forever()
                except BaseException:  # a SystemExit from a task that the user started: the others go on
                    log.exception("worker %r: a task of a coroutine raised", self._name)

    def _begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], done: Done) -> None:
        task = loop.create_task(_InOwnGradMode(_outcome(coroutine)))
        task.add_done_callback(lambda task: self._plane.submit(self._finish, task, done))

    def _finish(self, task: asyncio.Task[tuple[Any, BaseException | None]], done: Done) -> None:
        try:
            value, error = task.result()
        except asyncio.CancelledError as cancelled:  # before its first step
            value, error = None, cancelled
        try:
            done(value, error)
        finally:
            with self._lock:
                self.running -= 1


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Its value or its exception: a SystemExit raised from a task would end the loop."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


class _InOwnGradMode(Coroutine[Any, Any, Any]):
    """A coroutine whose gradient mode is its own: torch keeps one per thread, and all coroutines share a thread.

    So do ``torch.autocast`` and ``torch.inference_mode``, which have no such care: they must not span an ``await``.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._enabled = True

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def _step(self, act: Callable[..., Any], *args: Any) -> Any:
        torch.set_grad_enabled(self._enabled)
        try:
            return act(*args)
        finally:
            self._enabled = torch.is_grad_enabled()
            torch.set_grad_enabled(True)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()
