"""A worker that behaves as torch's where programs can tell: its futures and references, and the texts of errors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from telegrad._agent.dispatch import execute
from telegrad._agent.failures import story_of
from telegrad._core.interface import How, Link
from telegrad._ids import GlobalId
from telegrad._wire.callables import export
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Call, RemoteCall
from telegrad._worker import To, Worker
from telegrad._worker import WorkerInfo as TelegradWorkerInfo
from telegrad.autograd.context import Context
from telegrad.compat import node_hooks
from telegrad.compat.error_texts import as_torch_rebuilds, speaks_as_torch
from telegrad.compat.futures import Future
from telegrad.compat.graph_view import is_recv
from telegrad.compat.rref import RRef
from telegrad.errors import TelegradError, UsageError
from telegrad.rpc.options import check_name

_LATE_DROPS = 10.0  # seconds
BUILTIN = "torch:"  # how the names of torch's operators begin


class NoSuchOverloadError(TelegradError, TypeError):
    """An operator of torch was called with arguments that it does not take."""


class WorkerInfo(TelegradWorkerInfo):
    """The name and id of a worker; as in torch, an invalid name raises here."""

    def __init__(self, name: str, id: int) -> None:
        try:
            check_name(name)
        except UsageError as error:
            words = (
                "Worker name must be non-empty."
                if not name
                else "Worker name must match ^[A-Za-z0-9-_:]*$, and be shorter than 128 characters."
            )
            raise UsageError(f"{words} {error}") from None
        super().__init__(name, id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class CompatWorker(Worker):
    future_type = Future
    rref_type = RRef
    leaks_are_errors = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Calls of other workers that were not answered yet, and those of them whose function has not returned.
        self.unanswered: set[object] = set()
        self.executing: set[object] = set()
        self.agent.on_request(Call, self._run_call, How.CALL)
        before = self.agent.on_request(RemoteCall, self._run_remote_call, How.CALL)
        assert before is not None
        self._run_remote = before
        node_hooks.watch(self.autograd.leaves)
        #: The nodes of what was received, by message; torch keeps them in the context.
        self.recvs: WeakKeyDictionary[Context, dict[int, list[Any]]] = WeakKeyDictionary()
        self._incoming = self.autograd.interceptors.incoming
        self.agent.marshal.incoming = self._note_recvs
        #: References that ``RRef._serialize`` made tuples of, until ``RRef._deserialize`` claims them.
        self.serialized: dict[int, RRef[Any]] = {}
        self.on_close(self.serialized.clear)
        self._create_remote = self.references.create_remote
        self.references.create_remote = self._numbered_as_in_torch  # type: ignore[method-assign]

    def creation_future(self) -> Future:
        return Future()

    def info(self, of: To | None = None) -> WorkerInfo:
        found = super().info(of)
        return WorkerInfo(found.name, found.id)

    def _note_recvs(self, sender: int, extra: Any, tensors: list[Tensor]) -> Any:
        scope = self._incoming(sender, extra, tensors)
        nodes = [tensor.grad_fn for tensor in tensors if is_recv(tensor.grad_fn)]
        context = self.autograd.registry.find(extra[0]) if nodes else None
        if context is not None:
            self.recvs.setdefault(context, {})[sender << 48 | extra[1]] = nodes
        return scope

    def _numbered_as_in_torch(self, owner: int) -> tuple[GlobalId, GlobalId]:
        """torch gives the creator's fork a number of its own, the next one, and ``RRef`` shows it: leave it out."""
        made = self._create_remote(owner)
        self.references.ledger.leave_out_id()
        return made

    # --- calls --------------------------------------------------------------------------------------------------

    @speaks_as_torch
    def rpc_sync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().rpc_sync(*args, **kwargs)
        except Exception as error:
            rebuilt = as_torch_rebuilds(error)
            if rebuilt is error:
                raise
            raise rebuilt from None

    rpc_async = speaks_as_torch(Worker.rpc_async)
    remote = speaks_as_torch(Worker.remote)
    fetch = speaks_as_torch(Worker.fetch)

    # --- what others call here ----------------------------------------------------------------------------------

    def _run_call(self, link: Link, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Call)
        self.agent.served_calls += 1
        agent, call_id, function = self.agent, message.call_id, message.function
        call = object()

        def succeed(value: Any) -> None:
            self.unanswered.discard(call)
            agent.answer(link, call_id, value)

        def fail(error: BaseException) -> None:
            self.unanswered.discard(call)
            agent.answer_failure(link, call_id, self._told(error, function))

        with self._counted(call):
            execute(agent, link, frame, succeed, fail)

    def _run_remote_call(self, link: Link, frame: Frame) -> None:
        call = object()
        with self._counted(call):
            self._run_remote(link, frame)
        self.unanswered.discard(call)

    @contextlib.contextmanager
    def _counted(self, call: object) -> Iterator[None]:
        """While the function of a call runs; ``unanswered`` keeps the call until its answer is sent."""
        self.unanswered.add(call)
        self.executing.add(call)
        try:
            yield
        finally:
            self.executing.discard(call)

    def _told(self, error: BaseException, function: str) -> BaseException:
        """Prints the error of a function that runs for another worker, as torch does, and adds torch's text."""
        if function.startswith(BUILTIN) and isinstance(error, TypeError) and not isinstance(error, TelegradError):
            return NoSuchOverloadError(
                f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
            ).with_traceback(error.__traceback__)
        if not function.startswith(BUILTIN):
            print(f"On {self.info()}:\n{error!r}\n{story_of(error)}", file=sys.stderr)
        return error

    # --- shutdown -----------------------------------------------------------------------------------------------

    def drop_all_handles(self, timeout: float) -> None:
        """Deletes all references to values of other workers, and waits until their owners have processed that."""
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        self._wait_for_owners(deadline, "pending_forks")
        self.serialized.clear()
        self.references.give_up_handles()
        self._wait_for_owners(deadline, "user_forks")

    def _wait_for_owners(self, deadline: float, of_forks: str) -> None:
        while self.references.counts()[of_forks]:
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        # Messages on one link are handled in order, so the answer says that those before it were.
        for peer in self.agent.peers:
            if peer.link is not None and peer.id != self.id:
                with contextlib.suppress(TelegradError):
                    self.agent.wait(self.start_call(peer.id, handled_all_before, (), timeout=_LATE_DROPS))

    def _wait_for_all(self, deadline: float, timeout: float) -> None:
        super()._wait_for_all(deadline, timeout)
        if not self.leaks_are_errors:
            return
        # References in the last calls are deleted when these end: first all workers report that, then all check.
        self.references.let_go()
        self._wait_for_owners(min(deadline, time.monotonic() + _LATE_DROPS), "leaving_forks")
        super()._wait_for_all(deadline, timeout)
        held = self.references.counts()["values_with_forks"]
        super()._wait_for_all(deadline, timeout)  # no worker leaves before all have checked
        if held:
            raise TelegradError(f"Leaking RRefs: other workers still hold references to {held} values of {self.info()}")


@export
def handled_all_before() -> None:
    """Runs on the owner of references, after what was sent to it before."""
