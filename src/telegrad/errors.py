"""Every exception that telegrad raises.  The type says whose fault it is."""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "HostUnreachableError",
    "MissingGradientError",
    "NotInitializedError",
    "ProtocolError",
    "RemoteError",
    "RendezvousError",
    "RpcTimeoutError",
    "SerializationError",
    "TelegradError",
    "UnknownWorkerError",
    "UsageError",
    "WorkerLostError",
    "WorkersFailedError",
]


class TelegradError(RuntimeError):
    """The root of the tree; a ``RuntimeError``, as ``torch.distributed.rpc`` raises."""


class UsageError(TelegradError, ValueError):
    """The caller asked for something that cannot be: a bad name, option, or argument."""


class NotInitializedError(UsageError):
    """The program used RPC before ``init_rpc`` or after ``shutdown``."""


class UnknownWorkerError(UsageError):
    """The program named a worker that is not in the job."""


class SerializationError(TelegradError, TypeError):
    """A value cannot cross the wire, or the other side cannot rebuild it."""

    #: Where in the value the part is that cannot be sent: ``("[0]", "['key']", ".attribute")``.
    path: tuple[str, ...] = ()


class RemoteError(TelegradError):
    """The callee raised an exception whose own type cannot be rebuilt here."""


class RpcTimeoutError(TelegradError, TimeoutError):
    """A call got no answer within its timeout.  The callee may still be running it."""


class HostUnreachableError(RpcTimeoutError):
    """A worker's host did not answer any attempt to connect within the timeout.  The worker may still be there."""


class WorkerLostError(TelegradError, ConnectionError):
    """A worker died, or the way to it was cut, before it answered."""


class WorkersFailedError(TelegradError):
    """Several workers failed in what all were asked to do; ``errors`` has each worker's own."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        texts = [f"worker {worker!r}: {type(error).__name__}: {error}" for worker, error in errors.items()]
        super().__init__(f"{len(errors)} workers failed.\n" + "\n".join(texts))
        self.errors = errors


class MissingGradientError(TelegradError):
    """A FAST backward found sends that nobody sent a gradient for: a result that is not used, say."""


_PROBLEMS_SHOWN = 50  # the wrong model has thousands of wrong parameters; ``problems`` has them all


class CheckpointError(TelegradError):
    """A checkpoint cannot be made of what was given, is damaged, or does not fit; ``problems`` lists why.

    Nothing was touched: the things are as they were, and so are the checkpoints.
    """

    def __init__(self, what: str, problems: list[str]) -> None:
        more = [f"and {len(problems) - _PROBLEMS_SHOWN} more"] if len(problems) > _PROBLEMS_SHOWN else []
        super().__init__("\n  ".join([f"{what}:", *problems[:_PROBLEMS_SHOWN], *more]))
        self.problems = list(problems)


class RendezvousError(TelegradError):
    """The workers of a job could not find each other, or do not fit together."""


class AuthenticationError(TelegradError):
    """A peer could not prove that it belongs to this job."""


class ProtocolError(TelegradError):
    """A peer sent bytes that are not telegrad's protocol; its connection is closed."""
