"""Every exception that telegrad raises. The type says whose fault it is.

::

    TelegradError                 RuntimeError
      UsageError                  also a ValueError: the caller can correct it
        NotInitializedError
        UnknownWorkerError
      SerializationError          also a TypeError
      RemoteError
      RpcTimeoutError             also a TimeoutError
        HostUnreachableError
      WorkerLostError             also a ConnectionError
      WorkersFailedError
      MissingGradientError
      CheckpointError
      RendezvousError
      AuthenticationError
      ProtocolError

What a function raises on another worker comes back as its own type, where that can be imported, and is not in this
tree.
"""

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
    """The base class of all of telegrad's exceptions.

    It is a ``RuntimeError``, which is what ``torch.distributed.rpc`` raises.
    """


class UsageError(TelegradError, ValueError):
    """The caller asked for something that cannot be done: a bad name, option or argument.

    The text says what would be right. It is a ``ValueError`` too.
    """


class NotInitializedError(UsageError):
    """The program used RPC before ``init_rpc`` or after ``shutdown``.

    An RRef of a job that has ended raises it too, and so does a thread that belongs to no worker of a
    ``telegrad.testing.cluster``.
    """


class UnknownWorkerError(UsageError):
    """The program named a worker that is not in the job.

    The text lists the names that are known.
    """


class SerializationError(TelegradError, TypeError):
    """A value cannot be sent, the other side cannot rebuild it, or it does not know the function.

    For an argument, it is raised where the call is made, and names the argument. It is a ``TypeError`` too.
    """

    #: Where in the value the part is that cannot be sent: ``("[0]", "['key']", ".attribute")``.
    path: tuple[str, ...] = ()


class RemoteError(TelegradError):
    """The callee raised an exception whose own type cannot be rebuilt here.

    It has the name of the type, the text and the remote traceback in its own text. A ``SystemExit`` or
    ``KeyboardInterrupt`` of the callee becomes one too, so that it does not end the caller.
    """


class RpcTimeoutError(TelegradError, TimeoutError):
    """A call, a backward or a shutdown took longer than its timeout.

    The text says what was asked, of which worker, and for how long. Nothing is cancelled: the callee may still run the
    function. It is a ``TimeoutError`` too.
    """


class HostUnreachableError(RpcTimeoutError):
    """A worker's host did not answer any attempt to connect within the timeout.

    The worker may still be there, so a later call tries again.
    """


class WorkerLostError(TelegradError, ConnectionError):
    """A worker died, or the connection to it was cut, before it answered.

    It does not come back: all later calls to it raise the same. What it was asked for may have been done, in part or
    completely. It is a ``ConnectionError`` too.
    """


class WorkersFailedError(TelegradError):
    """Several workers failed in what all of them were asked to do, such as a step of an optimizer.

    If only one fails, its own exception is raised.

    Args:
        errors (dict): The exceptions, by the names of the workers; also an attribute.
    """

    def __init__(self, errors: dict[str, Exception]) -> None:
        texts = [f"worker {worker!r}: {type(error).__name__}: {error}" for worker, error in errors.items()]
        super().__init__(f"{len(errors)} workers failed.\n" + "\n".join(texts))
        self.errors = errors


class MissingGradientError(TelegradError):
    """A backward with ``mode="fast"`` found tensors that were sent and got no gradient.

    A result that is not used has this effect, for example. The text lists the tensors. ``mode="smart"``, the default,
    has no such limit.
    """


_PROBLEMS_SHOWN = 50  # a wrong model can have thousands of wrong parameters; ``problems`` lists all of them


class CheckpointError(TelegradError):
    """A checkpoint cannot be made of what was given, is damaged, or does not fit.

    Neither the objects nor the existing checkpoints were changed.

    Args:
        what (str): What could not be done.
        problems (list): Everything that is wrong, one text each; also an attribute. The text of the exception has the
            first 50 of them.
    """

    def __init__(self, what: str, problems: list[str]) -> None:
        more = [f"and {len(problems) - _PROBLEMS_SHOWN} more"] if len(problems) > _PROBLEMS_SHOWN else []
        super().__init__("\n  ".join([f"{what}:", *problems[:_PROBLEMS_SHOWN], *more]))
        self.problems = list(problems)


class RendezvousError(TelegradError):
    """The workers of a job could not find each other, or do not fit together.

    ``init_rpc`` raises it. The text names the ranks that are missing, or what differs.
    """


class AuthenticationError(TelegradError):
    """A peer could not prove that it belongs to this job.

    Mostly the workers have different secrets, or only some of them have one.
    """


class ProtocolError(TelegradError):
    """A peer sent bytes that are not telegrad's protocol.

    Its connection is closed. If the peer is a worker of the job, it counts as lost.
    """
