"""What a callee does with a call: find the function, run it, and hand its result on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CoroutineType, FunctionType
from typing import Any

import torch

from telegrad._agent.agent import Agent
from telegrad._core.interface import Link
from telegrad._torch import FutureBase
from telegrad._wire.callables import resolve, shown
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Call
from telegrad.errors import SerializationError, UsageError

#: The mark that ``functions.async_execution`` leaves; torch's own decorator leaves the same.
ASYNC_MARK = "_wrapped_async_rpc_function"

#: The mark of a function of ours that takes an RRef and the name of a method, and calls that method for the user.
METHOD_MARK = "_telegrad_calls_method"

_NO_SCOPE = contextlib.nullcontext()


@dataclass(slots=True)
class Deferred:
    """A result that is a future to wait for, returned by a function that was not marked itself."""

    future: Any


@dataclass(slots=True)
class Later:
    """Returned by a function that needs something that is not here yet: ``run`` goes on, on a thread of the pool, after
    ``when_ready`` has called back.  No thread waits meanwhile."""

    when_ready: Callable[[Callable[[], None]], None]
    run: Callable[[], Any]


def is_async(function: Any) -> bool:
    return getattr(function, ASYNC_MARK, None) is not None


def checked_future(function: Any, result: Any) -> Any:
    if not isinstance(result, FutureBase):  # the base class: ``then`` returns this and not the subclass
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} is decorated with async_execution, so it must return a torch.futures.Future; "
            f"it returned {type(result).__qualname__}"
        )
    return result


def run_call(agent: Agent, link: Link, frame: Frame) -> None:
    """The handler of :class:`Call`."""
    message = frame.message
    assert type(message) is Call
    call_id = message.call_id
    agent.served_calls += 1
    execute(
        agent,
        link,
        frame,
        lambda value: agent.answer(link, call_id, value),
        lambda error: agent.answer_failure(link, call_id, error),
    )


def execute(
    agent: Agent,
    link: Link,
    frame: Frame,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Runs the function of a message; exactly one of the two callbacks gets the outcome, now or later.

    ``succeed`` may raise SerializationError for a result that cannot be sent; then ``fail`` gets an error that says so.
    """
    message: Any = frame.message  # a Call or a RemoteCall
    body = message.body
    scope: AbstractContextManager[None] | None = None
    function: Any = None
    try:
        # First the function: the arguments of one that is unknown, or refused, are not opened.
        if message.function:
            function = resolve(message.function, agent.options.allow_pickle)
        else:
            function = agent.marshal.function(link, message.pickled_function)
    except BaseException as error:
        try:
            agent.marshal.discard(link, body)
        finally:
            fail(error)
        return
    try:
        args: tuple[Any, ...] = (None,)
        if body.tree is not None or body.pickle >= 0 or body.extra is not None:
            value, scope = agent.marshal.open(link, body, frame.buffers)
            args = value or args
        if function is None:
            function, *args = args  # type: ignore[assignment]
    except BaseException as error:
        fail(error)
        return
    _run(agent, function, args, scope, succeed, fail)


def _run(
    agent: Agent,
    function: Any,
    args: Any,
    scope: AbstractContextManager[None] | None,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
    called: Any = None,
) -> None:
    """The last of ``args`` are the keyword arguments, or None.  ``called``: for error texts, if not ``function``."""
    try:
        try:
            with scope or _NO_SCOPE:
                result = function(*args[:-1], **(args[-1] or {}))
                if type(result) is CoroutineType and not is_async(function):
                    _await(agent, result, scope, succeed, fail, _called(function, args) if called is None else called)
                    return
        finally:
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)  # the function turned gradients off for good; the thread has more to do
        if type(result) is Later:
            run = result.run
            called = _called(function, args) if called is None else called

            def go_on(*_: Any) -> None:
                _run(agent, run, (None,), scope, succeed, fail, called)

            result.when_ready(lambda: agent.plane.submit(go_on, call=True))
            return
        if type(result) is Deferred:
            future = result.future
        elif is_async(function):
            future = checked_future(function, result)
        else:
            future = None
    except BaseException as error:
        fail(error)
        return
    if future is not None:
        _when_done(future, scope, succeed, fail, _called(function, args) if called is None else called)
        return
    try:
        with scope or _NO_SCOPE:
            succeed(result)
    except SerializationError as error:
        fail(_unsendable(error, _called(function, args) if called is None else called))


def _called(function: Any, args: Any) -> Any:
    """What was called, as the caller wrote it: a function, or the text for a method.  It keeps no arguments alive."""
    if type(function) is FunctionType and METHOD_MARK in vars(function) and len(args) > 1 and type(args[1]) is str:
        return f"method {args[1]!r}"
    return function


def _succeed(
    value: Any,
    scope: AbstractContextManager[None] | None,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
    called: Any,
) -> None:
    try:
        with scope or _NO_SCOPE:
            succeed(value)
    except SerializationError as error:
        fail(_unsendable(error, called))


def _unsendable(error: SerializationError, called: Any) -> SerializationError:
    """The error of a result, with what was called."""
    try:
        name = shown(called)
    except Exception:  # of the __repr__ of a callable object
        name = type(called).__qualname__
    return SerializationError(f"the result{''.join(error.path)} of {name} cannot be sent back: {error}")


def _await(
    agent: Agent,
    coroutine: CoroutineType[Any, Any, Any],
    scope: AbstractContextManager[None] | None,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
    called: Any,
) -> None:
    """Runs the coroutine of an ``async def`` function; the calling thread does not wait for it."""

    def done(value: Any, error: BaseException | None) -> None:
        if error is not None:
            fail(error)
        else:
            _succeed(value, scope, succeed, fail, called)

    agent.coroutines.run(coroutine, done)


def _when_done(
    future: Any,
    scope: AbstractContextManager[None] | None,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
    called: Any,
) -> None:
    def done(future: torch.futures.Future[Any]) -> None:
        try:
            value = future.wait()
        except BaseException as error:
            fail(error)
        else:
            _succeed(value, scope, succeed, fail, called)

    future.add_done_callback(done)
