"""RRefs with what torch's have beside the public methods."""

from __future__ import annotations

import secrets
import time
from typing import Any, TypeVar, cast

from telegrad._current import current_worker
from telegrad._rref.rref import UNSET_TIMEOUT, Proxy, with_value
from telegrad._rref.rref import RRef as TelegradRRef
from telegrad._wire.callables import export
from telegrad._wire.messages import RRefFork
from telegrad.compat.error_texts import in_torchs_words, speaks_as_torch, spoken
from telegrad.compat.futures import Future
from telegrad.compat.profiling import profiled
from telegrad.errors import NotInitializedError, RpcTimeoutError, SerializationError, UsageError

T = TypeVar("T")


class RRef(TelegradRRef[T]):
    _type: Future | None = None  # the type of the value, after the first request for it

    def __init__(self, value: T, type_hint: Any = None) -> None:
        try:
            super().__init__(value, type_hint)
        except NotInitializedError as error:
            raise spoken(
                error,
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?",
            ) from None

    # --- the value ----------------------------------------------------------------------------------------------

    @speaks_as_torch
    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        if self._references.worker.closed:
            raise NotInitializedError(
                f"Cannot call to_here() on it after deletion. This worker has shut down, and {self} went with it"
            )
        return super().to_here(timeout)

    @speaks_as_torch
    def local_value(self) -> T:
        if not self.is_owner():
            here, there = self._references.worker.info(), self.owner()
            raise UsageError(
                f"For UserRRef(rref_id={self._torch_rref_id()}, fork_id={self._torch_fork_id()}), can't call "
                f"localValue() on user {here}. Call it on owner {there}, or call to_here() for a copy"
            )
        return super().local_value()

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this handle.

        torch runs a function after the owners have confirmed all references among its arguments; telegrad does not wait
        for that.  So this waits for a handle that came in a call, where a program could see the difference.
        """
        deadline = time.monotonic() + (self._references.worker.default_timeout or float("inf"))
        while not super().confirmed_by_owner():
            if self._creation is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _check_broken(self) -> None:
        try:
            super()._check_broken()
        except RpcTimeoutError as error:
            raise spoken(
                error, "RRef creation via rpc.remote() timed out, and it is possible that the RRef does not exist."
            ) from None

    def _wait_local(self, timeout: float) -> T:
        try:
            return super()._wait_local(timeout)
        except RpcTimeoutError as error:
            if self._creation is not None and self._creation.done():  # the call of remote() timed out, not this one
                raise spoken(error, "RRef creation via rpc.remote() timed out.") from None
            raise

    @speaks_as_torch
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        if dist_autograd_ctx_id == -1 and not self.is_owner():
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        super().backward(dist_autograd_ctx_id, retain_graph)

    # --- what it is ---------------------------------------------------------------------------------------------

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, asked for once; a future of it unless ``blocking``."""
        if self._type is None:
            if self.is_owner():
                with in_torchs_words():
                    self._type = Future()
                    self._type.set_result(type(self.local_value()))
            else:
                worker = self._references.worker
                with profiled(worker, "async", self._owner, _rref_typeof_on_owner):
                    self._type = cast(
                        "Future", worker.rpc_async(self._owner, _rref_typeof_on_owner, (self,), timeout=timeout)
                    )
        asked = self._type
        assert asked is not None
        if not blocking:
            return asked
        try:
            return asked.wait()
        except Exception:
            self._type = None  # the next call requests it again
            raise

    def _get_future(self) -> Any:
        """Done when the owner has noted this reference; for one that was made by ``remote``."""
        if self._creation is None:
            raise UsageError(f"{self} was not made by remote() here, so there is no call to wait for")
        return self._creation

    # --- methods of the value ------------------------------------------------------------------------------------
    # As in torch, one that the value's type does not have is an AttributeError at once.

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        return _Proxy(self, self._references.worker.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        return _Proxy(self, self._references.worker.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        return _Proxy(self, self._references.worker.remote, timeout)

    # --- sending it ---------------------------------------------------------------------------------------------

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork:
        try:
            self._check_alive()
            return super().__telegrad_share__(to, answered)
        except RpcTimeoutError as error:
            raise UsageError(str(error)) from None  # the call that would take it along fails, and does not time out

    def _serialize(self) -> tuple[int, int, int, int, int, int, str]:
        """A tuple of numbers from which ``_deserialize`` makes another handle, once, on any worker of the job.

        The fields are torch's: owner, id of the reference (two numbers), id of the fork (two numbers), the worker that
        made the fork, and a type.  That worker holds the reference until the tuple is claimed, or the job ends.
        """
        self._check_alive()
        if not self.is_owner():
            self._check_broken()
        worker = self._references.worker
        ticket = secrets.randbits(63)
        worker.serialized[ticket] = self  # type: ignore[attr-defined]
        return (self._owner, *self._rref_id, worker.id, ticket, worker.id, "PyObject")

    @staticmethod
    @speaks_as_torch
    def _deserialize(fork: tuple[int, int, int, int, int, int, str]) -> RRef[Any]:
        """The handle of a tuple from ``_serialize``.  Asks the worker that made it, so that both sides count it."""
        *_, ticket, parent, _ = fork
        worker = current_worker()
        found = _claim(ticket) if parent == worker.id else worker.rpc_sync(parent, _claim, (ticket,))
        return cast("RRef[Any]", found)

    def _check_alive(self) -> None:
        if self._references.worker.closed:
            raise NotInitializedError(f"Cannot call fork an UserRRef after deletion: {self} ended with this worker")
        if self.is_owner() and self._creation is not None and self._creation.done():
            self._wait_local(UNSET_TIMEOUT)  # a call to oneself that timed out has nothing to share

    def __reduce__(self) -> Any:
        raise SerializationError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: send it inside a call"
        )

    def _torch_fork_id(self) -> str:
        """telegrad gives the fork of a reference's creator the same number as the reference, torch the next one."""
        assert self._fork_id is not None
        is_creator = self._fork_id == self._rref_id
        return _id(self._fork_id.created_on, self._fork_id.number + is_creator)

    def _torch_rref_id(self) -> str:
        return _id(self._rref_id.created_on, self._rref_id.number)

    def __repr__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({self._torch_rref_id()})"
        return f"UserRRef(RRefId = {self._torch_rref_id()}, ForkId = {self._torch_fork_id()})"

    __str__ = __repr__


def _id(created_on: int, local_id: int) -> str:
    return f"GloballyUniqueId(created_on={created_on}, local_id={local_id})"


@export
def _rref_typeof_on_owner(rref: TelegradRRef[Any]) -> Any:
    """Runs on the owner."""
    return with_value(rref, lambda: type(rref.local_value()))


@export
def _claim(ticket: int) -> TelegradRRef[Any]:
    """Runs on the worker that serialized a reference."""
    worker = current_worker()
    found: TelegradRRef[Any] | None = worker.serialized.pop(ticket, None)  # type: ignore[attr-defined]
    if found is None:
        raise UsageError(
            f"worker {worker.name!r} holds no serialized RRef {ticket}: one can be deserialized once, within its job"
        )
    return found


class _Proxy(Proxy):
    """As telegrad's, but a method that the value's type does not have is an AttributeError at once."""

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rref = cast("RRef[Any]", self._rref)
        getattr(rref._get_type(self._timeout), name)  # raises what the value itself would
        return super()._call_method(name, args, kwargs)
