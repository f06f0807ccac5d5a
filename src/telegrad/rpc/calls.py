"""The three ways to call a function on another worker, and the types of what they return."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from telegrad._agent.futures import Future
from telegrad._current import current_worker
from telegrad._rref.rref import UNSET_TIMEOUT, RRef
from telegrad._worker import To

T = TypeVar("T")

Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None
AsyncDef = Callable[..., Coroutine[Any, Any, T]]  # the callee awaits what it returns
AsyncExecution = Callable[..., torch.futures.Future[T]]  # marked with rpc.functions.async_execution


@overload
def rpc_sync(to: To, func: AsyncDef[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> T: ...
@overload
def rpc_sync(to: To, func: AsyncExecution[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> T: ...
@overload
def rpc_sync(to: To, func: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> T: ...
@overload
def rpc_sync(to: To, func: str, args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> Any: ...
def rpc_sync(
    to: To,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Runs ``func(*args, **kwargs)`` on worker ``to``, waits for it and returns its result.

    Any thread may call it, at the same time as others, and so may a function that itself runs for another worker.
    A function runs at most once: a call is never repeated.

    *What is copied.* The callee gets copies of the arguments and the caller gets a copy of the result, also when a
    worker calls itself. :class:`RRef` objects are not copied: both sides then refer to the same value. Plain data and
    tensors need no pickle, anything else is pickled. A function is sent by its module and name; lambdas, local
    functions, and functions of a main program that the callee does not run are sent by value. Scripted functions
    (``torch.jit``) cannot be sent.

    *Gradients.* Inside :func:`telegrad.autograd.context`, :func:`telegrad.autograd.backward` runs through the call.
    Outside of one, a tensor that requires a gradient arrives as a leaf, without its history.

    *Devices.* A tensor of an accelerator goes by way of host memory to the device that ``device_maps`` of
    :class:`RpcBackendOptions` names. Tensors of the CPU need no device map.

    Args:
        to (str, int or WorkerInfo): The worker that runs the function: its name, its rank, or its ``WorkerInfo``.
        func (Callable or str): A function, a class, an operator such as ``torch.add``, or any other callable. The
            result of an ``async def`` function is awaited on the callee, on one event loop for all such functions, so
            they should await :func:`rpc_async` and not block. For a function with
            :func:`functions.async_execution`, the result is the value of the future that it returns. A str is a name
            that the callee knows: ``"module:function"``, or the name given to :func:`export`.
        args (tuple, optional): The positional arguments.
        kwargs (dict, optional): The keyword arguments.
        timeout (float, optional): Seconds to wait for the result; 0 means no limit. The default is ``rpc_timeout`` of
            the options, 60 unless it was set. The time to connect is part of it, but the first call to a worker tries
            to connect for at least 2 seconds.

    Returns:
        The result of the function.

    Raises:
        Exception: What the function raised, with its type and attributes where the type can be imported here, and
            with the remote traceback in its text. Otherwise a ``RemoteError``.
        RpcTimeoutError: There was no answer in time. The function may still run on the callee: a timeout does not
            cancel it.
        WorkerLostError: The worker died, or the connection to it was cut. Calls that wait for it fail within
            milliseconds of its death; a host that does not respond counts as lost after ``heartbeat`` seconds. The
            function may have run, in part or completely.
        SerializationError: An argument or the result cannot be sent, or the function was not found on the callee.
        UnknownWorkerError: The job has no such worker.
        UsageError: An argument of ``rpc_sync`` is not valid, or a tensor is on a device without a device map.
        NotInitializedError: ``init_rpc`` was not called, or ``shutdown`` was.

    Example::

        >>> # on worker0, in a job with worker1
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])
        >>> rpc.rpc_sync("worker1", sorted, args=([1, 3, 2],), kwargs={"reverse": True}, timeout=5)
        [3, 2, 1]
        >>> try:
        ...     rpc.rpc_sync("worker1", int, args=("seven",))
        ... except ValueError as error:
        ...     print(str(error).splitlines()[0])
        invalid literal for int() with base 10: 'seven'
    """
    return current_worker().rpc_sync(to, func, args, kwargs, timeout)


@overload
def rpc_async(to: To, func: AsyncDef[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: AsyncExecution[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> Future[T]: ...
@overload
def rpc_async(to: To, func: str, args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> Future[Any]: ...
def rpc_async(
    to: To,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]:
    """Starts ``func(*args, **kwargs)`` on worker ``to`` and returns a future of its result.

    It does not wait for the function, but the first call to a worker waits until it is connected. When it returns, the
    arguments have been sent or copied, and the caller may change its tensors. What the documentation of
    :func:`rpc_sync` says of arguments, gradients and devices holds here too.

    Args:
        to (str, int or WorkerInfo): The worker that runs the function: its name, its rank, or its ``WorkerInfo``.
        func (Callable or str): What to run, as for :func:`rpc_sync`.
        args (tuple, optional): The positional arguments.
        kwargs (dict, optional): The keyword arguments.
        timeout (float, optional): Seconds after which the future fails with ``RpcTimeoutError``, whether or not any
            thread waits for it; 0 means no limit. The default is ``rpc_timeout`` of the options.

    Returns:
        A ``torch.futures.Future``, which can also be awaited in ``asyncio``. Its ``wait()`` returns the result or
        raises what :func:`rpc_sync` would raise: the function's exception, ``RpcTimeoutError``, ``WorkerLostError``. A
        future that is not done when this worker shuts down fails with ``WorkerLostError``. To stop waiting, drop the
        future; the function is not cancelled.

    Raises:
        SerializationError: An argument cannot be sent. This and the following are raised here, not by the future.
        UnknownWorkerError: The job has no such worker.
        UsageError: An argument of ``rpc_async`` is not valid, or a tensor is on a device without a device map.
        NotInitializedError: ``init_rpc`` was not called, or ``shutdown`` was.

    Example::

        >>> # on worker0, in a job with worker1
        >>> futures = [rpc.rpc_async("worker1", torch.mul, args=(torch.ones(2), i)) for i in range(3)]
        >>> sum(future.wait() for future in futures)
        tensor([3., 3.])
        >>> rpc.rpc_async("worker1", max, args=(1, 2)).then(lambda future: future.wait() * 10).wait()
        20
        >>> import asyncio
        >>> async def ask():
        ...     return await asyncio.gather(*(rpc.rpc_async("worker1", abs, args=(i,)) for i in (-1, -2)))
        >>> asyncio.run(ask())
        [1, 2]
    """
    return current_worker().rpc_async(to, func, args, kwargs, timeout)


@overload
def remote(to: To, func: AsyncDef[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> RRef[T]: ...
@overload
def remote(
    to: To, func: AsyncExecution[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> RRef[T]: ...
@overload
def remote(to: To, func: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> RRef[T]: ...
@overload
def remote(to: To, func: str, args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...) -> RRef[Any]: ...
def remote(
    to: To,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Starts ``func(*args, **kwargs)`` on worker ``to``, where its result stays, and returns a reference to the result.

    It does not wait for the function, but the first call to a worker waits until it is connected. The result need not
    be anything that can be sent: it is copied only by :meth:`RRef.to_here`. It lives on ``to`` until the last reference
    to it, on any worker, is gone.

    The arguments are treated as :func:`rpc_sync` says. On the worker itself, ``remote`` copies the arguments, but the
    reference refers to the result itself.

    Args:
        to (str, int or WorkerInfo): The worker that runs the function and becomes the owner of its result.
        func (Callable or str): What to run, as for :func:`rpc_sync`. A class makes an object on ``to``.
        args (tuple, optional): The positional arguments.
        kwargs (dict, optional): The keyword arguments.
        timeout (float, optional): Seconds that the function may take; 0 means no limit. After that, uses of the
            reference raise ``RpcTimeoutError``. The default is ``rpc_timeout`` of the options.

    Returns:
        An :class:`RRef` to the result. If the function raises, ``to_here()`` raises the same, each time.

    Raises:
        WorkerLostError: The worker is known to be lost. If it is lost later, ``to_here()`` raises this.
        RpcTimeoutError: No connection to the worker was made in time.
        SerializationError: An argument cannot be sent.
        UnknownWorkerError: The job has no such worker.
        UsageError: An argument of ``remote`` is not valid, or a tensor is on a device without a device map.
        NotInitializedError: ``init_rpc`` was not called, or ``shutdown`` was.

    Example::

        >>> # on worker0, in a job with worker1
        >>> counts = rpc.remote("worker1", dict, kwargs={"a": 1})
        >>> counts.rpc_sync().update(b=2)
        >>> counts.to_here()
        {'a': 1, 'b': 2}
        >>> counts.owner_name()
        'worker1'
        >>> rpc.rpc_sync("worker1", lambda rref: len(rref.local_value()), args=(counts,))
        2
    """
    return current_worker().remote(to, func, args, kwargs, timeout)
