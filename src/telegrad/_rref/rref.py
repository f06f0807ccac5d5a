"""The handle: a counted reference to a value that lives on its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from telegrad._agent.dispatch import METHOD_MARK, Deferred, Later, checked_future, is_async
from telegrad._current import current_worker
from telegrad._ids import GlobalId
from telegrad._rref.references import Owned, References
from telegrad._wire.callables import export, exported_method
from telegrad._wire.messages import RRefFork
from telegrad.errors import NotInitializedError, RpcTimeoutError, SerializationError, UsageError, WorkerLostError

if TYPE_CHECKING:
    import torch

    from telegrad._worker import WorkerInfo

T = TypeVar("T")

UNSET_TIMEOUT = -1.0


class RRef(Generic[T]):
    """A reference to a value that lives on one worker, its owner.

    ``rpc.remote`` makes one to a value on another worker, ``RRef(value)`` one to a value of this worker. A reference
    can be sent in calls, as an argument, in a result, or inside containers and objects: it is the value that stays
    where it is. It cannot be pickled outside of a call. The owner counts the references on all workers and frees the
    value when the last one is gone. References that a lost worker held are no longer counted.

    If the owner is lost, the value is lost: references to it raise ``WorkerLostError``. After ``shutdown``, references
    to values of other workers raise ``NotInitializedError``, also if the process has joined another job. Any thread may
    use a reference.

    Args:
        value (object): A value of this worker. It is not copied.
        type_hint (type, optional): Accepted as in torch, and not used.

    Raises:
        NotInitializedError: This process has no worker.

    Example::

        >>> # on worker0, in a job with worker1
        >>> table = rpc.remote("worker1", torch.zeros, args=(2, 3))
        >>> table.rpc_sync().size()
        torch.Size([2, 3])
        >>> table.rpc_sync().add_(1).sum()
        tensor(6.)
        >>> mine = rpc.RRef([1, 2])
        >>> rpc.rpc_sync("worker1", lambda rref: rref.owner_name(), args=(mine,))
        'worker0'
    """

    _references: References
    _rref_id: GlobalId
    _fork_id: GlobalId | None  # None on the owner
    _owner: int
    _creation: torch.futures.Future[Any] | None = None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        owned = Owned()
        owned.set(value)
        self._become_owner(current_worker().references, owned)

    def _become_owner(self, references: References, owned: Owned) -> None:
        self._owner = references.agent.me.worker_id
        self._fork_id = None
        self._rref_id = references.create_local(owned)
        self._references = references

    # --- the owner --------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Returns the worker that has the value.

        Returns:
            Its :class:`WorkerInfo`.
        """
        return self._references.worker.info(self._owner)

    def owner_name(self) -> str:
        """Returns the name of the worker that has the value.

        Returns:
            The name, as a str.
        """
        return self._references.agent.peer(self._owner).name

    def is_owner(self) -> bool:
        """Tells whether this worker has the value, so that :meth:`local_value` works.

        Returns:
            A bool.
        """
        return self._fork_id is None

    def confirmed_by_owner(self) -> bool:
        """Tells whether the owner is known to count this reference.

        A program need not wait for it: the owner keeps the value while a reference to it is on its way.

        Returns:
            True on the owner; elsewhere, True once the owner has confirmed.
        """
        return self._fork_id is None or self._references.ledger.is_confirmed(self._fork_id)

    # --- the value --------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Returns the value: itself on its owner, a copy anywhere else.

        If the function that makes the value still runs, this waits for it. Inside an autograd context, gradients flow
        back to the value.

        Args:
            timeout (float, optional): Seconds to wait; 0 means no limit. The default is ``rpc_timeout`` of the options.
                After a timeout it can be called again.

        Returns:
            The value.

        Raises:
            Exception: What the function that was to make the value raised, each time.
            RpcTimeoutError: The value did not come in time, or the call that makes it has timed out.
            WorkerLostError: The owner is lost.
            SerializationError: The value cannot be sent.
            NotInitializedError: The job has ended.

        Example::

            >>> # on worker0, in a job with worker1
            >>> rpc.remote("worker1", torch.add, args=(torch.ones(2), 1)).to_here(timeout=5)
            tensor([2., 2.])
        """
        if self._fork_id is None:
            return self._wait_local(timeout)
        self._check_job()
        self._check_broken()
        value: T = self._references.worker.fetch(self._owner, self._rref_id, timeout, repr(self))
        return value

    def local_value(self) -> T:
        """Returns the value itself, on its owner.

        It is for functions that are given a reference to a value of the worker on which they run.

        If the function that makes the value still runs, this waits for it.

        Returns:
            The value. It is not copied: a change is seen through all references.

        Raises:
            UsageError: The value lives on another worker.
            Exception: What the function that was to make the value raised.
            RpcTimeoutError: The value was not made within ``rpc_timeout``.

        Example::

            >>> # on worker0, in a job with worker1
            >>> def grow(rref):
            ...     rref.local_value().append("more")
            >>> words = rpc.remote("worker1", list, args=(("some",),))
            >>> rpc.rpc_sync(words.owner(), grow, args=(words,))
            >>> words.to_here()
            ['some', 'more']
        """
        if self._fork_id is not None:
            raise UsageError(
                f"local_value: {self!r} lives on worker {self.owner_name()!r}, not here; call to_here() for a copy"
            )
        return self._wait_local(UNSET_TIMEOUT)

    def _wait_local(self, timeout: float) -> T:
        owned = self._references.owned(self._rref_id)
        if not owned.done:
            worker = self._references.worker
            seconds = worker.seconds(timeout)
            if not worker.wait_locally(lambda: owned.wait(seconds or None)):
                raise RpcTimeoutError(f"{self!r} had no value within {seconds:g} s: the call that makes it still runs")
        value: T = owned.get()
        return value

    def _check_job(self) -> None:
        """Each job numbers its references from 0: in a later job, the same number is that of another value."""
        if self._references.worker.closed:
            name = self._references.agent.me.name
            raise NotInitializedError(
                f"reference {self._rref_id} belongs to a job that has ended: worker {name!r} has shut down; "
                "after init_rpc, make a new one"
            )

    def _check_broken(self) -> None:
        if self._fork_id in self._references.broken and not self._references.worker.closed:
            reason = self._references.broken[self._fork_id]
            if reason is not None:
                raise type(reason)(*reason.args)
            raise WorkerLostError(f"{self!r} has no value any more: its owner, worker {self.owner_name()!r}, is lost")

    # --- methods of the value ---------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Returns a proxy whose methods call those of the value, on its owner, and wait for the result.

        Arguments and results are copied as in :func:`telegrad.rpc.rpc_sync`, and the same exceptions are raised.
        Methods only: there is no access to attributes. A method with ``functions.async_execution``, or an ``async def``
        one, is awaited.

        Args:
            timeout (float, optional): Seconds that each call of the proxy may take; 0 means no limit. The default is
                ``rpc_timeout`` of the options.

        Returns:
            The proxy.

        Example::

            >>> # on worker0, in a job with worker1
            >>> words = rpc.remote("worker1", list, args=(("a", "b", "a"),))
            >>> words.rpc_sync().count("a")
            2
        """
        return Proxy(self, self._references.worker.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`, but a method of the proxy returns a future at once.

        Args:
            timeout (float, optional): Seconds that each call of the proxy may take; 0 means no limit.

        Returns:
            The proxy.

        Example::

            >>> # on worker0, in a job with worker1
            >>> rpc.remote("worker1", list, args=(("a", "b", "a"),)).rpc_async().index("b").wait()
            1
        """
        return Proxy(self, self._references.worker.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`, but a method of the proxy returns an RRef to its result, which stays on the owner.

        Args:
            timeout (float, optional): Seconds that each call of the proxy may take; 0 means no limit.

        Returns:
            The proxy.

        Example::

            >>> # on worker0, in a job with worker1
            >>> total = rpc.remote("worker1", torch.ones, args=(2, 3)).remote().sum()
            >>> total.to_here()
            tensor(6.)
        """
        return Proxy(self, self._references.worker.remote, timeout)

    # --- its gradient -----------------------------------------------------------------------------------------

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id (int, optional): The context, as :func:`telegrad.autograd.context` gives it. The
                gradients go there, as with :func:`telegrad.autograd.backward`. By default there is none:
                ``value.backward()`` runs on the owner, and its gradients go into ``.grad`` there.
            retain_graph (bool, optional): If True, the graph stays, for another backward.

        Raises:
            UsageError: The value is no tensor, or the context is not known on the owner.
            Exception: What a backward raises; see :func:`telegrad.autograd.backward`.

        Example::

            >>> # on worker0, in a job with worker1
            >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
            >>> with autograd.context() as context_id:
            ...     loss = rpc.remote("worker1", torch.sum, args=(x * x,))
            ...     loss.backward(context_id)
            ...     print(autograd.get_gradients(context_id)[x])
            tensor([2., 4.])
        """
        self._check_job()
        self._references.worker.backward_of(self, dist_autograd_ctx_id, retain_graph)

    # --- sending it -------------------------------------------------------------------------------------------

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork:
        self._check_job()
        if self._fork_id is not None:
            self._check_broken()
        return self._references.share(self._rref_id, self._fork_id, to, answered)

    def __telegrad_unshare__(self, fork: RRefFork) -> None:
        self._references.unshare(fork)

    def __reduce__(self) -> Any:
        raise SerializationError("an RRef is sent inside a call, where both sides count it; it cannot be pickled")

    def __del__(self) -> None:
        references = getattr(self, "_references", None)
        if references is not None:
            references.drop(self._rref_id, self._fork_id)

    def __repr__(self) -> str:
        if self._fork_id is None:
            return f"RRef({self._rref_id}, owned here)"
        state = "confirmed" if self.confirmed_by_owner() else "unconfirmed"
        return f"RRef({self._rref_id}, owned by {self.owner_name()!r}, {state})"


class Proxy:
    """Turns attribute access into calls of the value's methods."""

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return ProxyMethod(self, name)

    def __reduce__(self) -> Any:
        raise SerializationError("a proxy cannot be sent: send the RRef itself, or one of the proxy's methods")

    def __repr__(self) -> str:
        return f"<{self._call.__name__} proxy of {self._rref!r}>"

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._rref._check_job()
        return self._call(self._rref._owner, call_method, (self._rref, name, args, kwargs), None, self._timeout)


class ProxyMethod:
    """A method of a proxy.  It can be sent as the function of a call: the callee then calls the RRef's owner."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        self._proxy = proxy
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy._call_method(self.__name__, args, kwargs)

    def __reduce__(self) -> Any:
        proxy = self._proxy
        return _proxy_method, (proxy._rref, proxy._call.__name__, proxy._timeout, self.__name__)

    def __repr__(self) -> str:
        return f"<{self._proxy._call.__name__} of method {self.__name__!r} of {self._proxy._rref!r}>"


def _proxy_method(rref: RRef[Any], call: str, timeout: float, name: str) -> Any:
    return getattr(getattr(rref, call)(timeout), name)


@export
def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls one method of the value of a reference that is owned here."""

    def call() -> Any:
        value = rref.local_value()
        allow_any = rref._references.agent.options.allow_pickle
        method = getattr(value, name) if allow_any else exported_method(value, name)
        result = method(*args, **kwargs)
        return Deferred(checked_future(method, result)) if is_async(method) else result

    return with_value(rref, call)


setattr(call_method, METHOD_MARK, True)


def with_value(rref: RRef[Any], use: Callable[[], T]) -> T | Later:
    """On the owner: uses the value now or, if it has yet to be made, then; no thread waits for it."""
    when_ready = rref._references.until_made(rref._rref_id) if rref.is_owner() else None
    return use() if when_ready is None else Later(when_ready, use)


def receive_handle(references: References, fork: RRefFork, fork_id: GlobalId | None) -> RRef[Any]:
    return handle(references, fork.rref_id, fork_id, fork.owner)


def handle(references: References, rref_id: GlobalId, fork_id: GlobalId | None, owner: int) -> RRef[Any]:
    """A handle for a reference that is already counted."""
    kind = references.worker.rref_type
    rref = kind.__new__(kind)
    rref._rref_id, rref._fork_id, rref._owner = rref_id, fork_id, owner
    rref._references = references
    return rref
