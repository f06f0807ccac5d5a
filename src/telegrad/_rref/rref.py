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
    """A reference to a value on some worker.  ``RRef(value)`` makes one to a value of this worker."""

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

    # --- who owns it ------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        return self._references.worker.info(self._owner)

    def owner_name(self) -> str:
        return self._references.agent.peer(self._owner).name

    def is_owner(self) -> bool:
        return self._fork_id is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this handle."""
        return self._fork_id is None or self._references.ledger.is_confirmed(self._fork_id)

    # --- the value --------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """The value; a copy of it unless this worker owns it.  Raises what the call that made it raised."""
        if self._fork_id is None:
            return self._wait_local(timeout)
        self._check_job()
        self._check_broken()
        value: T = self._references.worker.fetch(self._owner, self._rref_id, timeout, repr(self))
        return value

    def local_value(self) -> T:
        """The value itself, on its owner."""
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
        """Each job numbers its references from 0: in a later one, the same number means another value."""
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
        """A proxy: ``rref.rpc_sync().size(0)`` runs ``size(0)`` of the value on its owner and waits for the result."""
        return Proxy(self, self._references.worker.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As ``rpc_sync``; the method returns a future."""
        return Proxy(self, self._references.worker.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As ``rpc_sync``; the method returns an RRef to its result, which stays on the owner."""
        return Proxy(self, self._references.worker.remote, timeout)

    # --- its gradient -----------------------------------------------------------------------------------------

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward from the value, on its owner: in that context, or, without one, as ``value.backward()``."""
        self._check_job()
        self._references.worker.backward_of(self, dist_autograd_ctx_id, retain_graph)

    # --- on its way -------------------------------------------------------------------------------------------

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
    """For what runs on the owner: uses the value now, or, without a thread that waits, when it has been made."""
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
