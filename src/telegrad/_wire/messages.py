"""Every message that crosses the wire.

A message is a frozen record.  The codec writes it as a header that cannot execute code.  Tensors and pickles follow the
header as buffers, which the message's :class:`Body` describes.

No message is sent twice.  A link is an ordered stream, and a worker whose link breaks is lost, so a message needs
no number, acknowledgement or repetition of its own.

On a link, the side that dialled sends requests and internal messages (``FROM_DIALLER``), and the other side answers
(``FROM_DIALLED``): a worker that dials out cannot be made to run anything by the worker that it reaches.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec

from telegrad._ids import GlobalId, PassId


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of all records: positional on the wire, and checked field by field when read.

    Records are never part of a reference cycle, so the garbage collector does not track them.  With many waiting calls
    it would otherwise run full collections (0.1 s, with torch) more often.
    """


#: An int that a malformed message cannot make negative.
Size = Annotated[int, msgspec.Meta(ge=0)]


# --- the body: a value and what it is made of -------------------------------------------------------------------


class TensorMeta(_Record, frozen=True):
    """How to rebuild one tensor.  ``parts`` are its components where one buffer is not enough (sparse, quantised)."""

    dtype: int
    shape: tuple[Size, ...]
    buffer: int = -1
    stride: tuple[Size, ...] | None = None  # None: contiguous
    offset: Size = 0  # in elements
    flags: int = 0
    layout: int = 0
    parts: tuple[TensorMeta, ...] = ()
    scalars: tuple[float, ...] = ()
    device: str | None = None  # where the receiver should put it; None: the CPU


class InSegment(_Record, frozen=True):
    """A buffer in a segment of shared memory that the sender owns, for a receiver on the same host."""

    segment: Size
    fd: Size  # the sender's descriptor of the segment
    size: Size


class RRefFork(_Record, frozen=True):
    """A reference on its way from ``parent`` to the receiver of the message.

    ``lent``: the receiver is the owner, and the parent keeps ``fork_id``, its own, until the message is answered.
    """

    rref_id: GlobalId
    fork_id: GlobalId
    owner: int
    parent: int
    type_name: str = ""
    lent: bool = False


class Node(_Record, frozen=True):
    """Plain data that the header codec has no type for: what it is, and its parts (see ``tree``).

    The codec must never build a dict itself: a peer could choose keys that collide.
    """

    tag: int
    parts: list[Tree]


#: ``Ext`` holds bytes: the codec does not tell them from text in a union.
Tree = None | bool | int | float | str | msgspec.msgpack.Ext | Node


#: A buffer inside the header, the length of one that follows it, or one in shared memory.
Buffer = bytearray | Size | InSegment


class Body(_Record, frozen=True):
    """A Python value on the wire: a plain ``tree``, or a pickle in ``buffers[pickle]``, and the tables that both use.

    The sender's ``tree`` is a ``msgspec.Raw``, encoded when the value was packed: encoding the message only copies it.
    The receiver's is decoded and checked together with the rest of the message.
    """

    tree: Tree = None
    pickle: int = -1
    pickle_buffers: tuple[int, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()
    rrefs: tuple[RRefFork, ...] = ()
    extra: list[int | list[int]] | None = None  # from the outgoing interceptor to the incoming one


EMPTY_BODY = Body()


# --- calls ----------------------------------------------------------------------------------------------------


class Call(_Record, frozen=True, tag=1):
    """Run a callable.  ``function`` is its name; empty when the callable itself comes along: as a pickle that is the
    same in every call (see ``by_value``), or first in the body."""

    call_id: int
    function: str
    body: Body = EMPTY_BODY
    pickled_function: bytes = b""


class RemoteCall(_Record, frozen=True, tag=2):
    """Run a callable and keep its result under ``rref_id``.  Answered when the owner counts the reference."""

    call_id: int
    function: str
    rref_id: GlobalId
    fork_id: GlobalId
    body: Body = EMPTY_BODY
    pickled_function: bytes = b""


class Fetch(_Record, frozen=True, tag=3):
    """Send the value of a reference, once there is one.  The body is empty but for its ``extra``."""

    call_id: int
    rref_id: GlobalId
    body: Body = EMPTY_BODY


class Reply(_Record, frozen=True, tag=4):
    call_id: int
    body: Body = EMPTY_BODY


class Failure(_Record, frozen=True, tag=5):
    """The callee raised.  ``body`` holds the exception where it could be pickled."""

    call_id: int
    worker: str
    type_name: str
    text: str
    traceback: str = ""
    body: Body = EMPTY_BODY


class SegmentReleased(_Record, frozen=True, tag=6):
    """The receiver no longer uses a segment; ``kept``: it keeps the memory, so the sender must not reuse it."""

    segment: int
    kept: bool = False


# --- the connection -------------------------------------------------------------------------------------------


class Goodbye(_Record, frozen=True, tag=9):
    """The sender shuts down on purpose; what follows is not a loss."""


class MemoryReadable(_Record, frozen=True, tag=11):
    """The sender can read the receiver's segments, so big buffers may go to it through them."""


class Barrier(_Record, frozen=True, tag=10):
    """Answered when every worker that is alive has sent one for this round, with whether another round is needed."""

    call_id: int
    round: int
    active: bool


# --- references (``_rref.ledger``) ----------------------------------------------------------------------------


class ForkRequest(_Record, frozen=True, tag=20):
    """To the owner: the sender now holds a fork."""

    rref_id: GlobalId
    fork_id: GlobalId


class ForkAccepted(_Record, frozen=True, tag=21):
    """The owner counts that fork."""

    fork_id: GlobalId


class ForkRefused(_Record, frozen=True, tag=22):
    """The owner has no such value any more (only after a worker was lost)."""

    fork_id: GlobalId


class ChildConfirmed(_Record, frozen=True, tag=23):
    """To the parent of a fork: the owner counts the child, so the parent may be deleted."""

    fork_id: GlobalId


class UserDelete(_Record, frozen=True, tag=24):
    """A user's fork is gone."""

    rref_id: GlobalId
    fork_id: GlobalId


# --- contexts and backward passes (``autograd.engine``) ---------------------------------------------------------


class DropContext(_Record, frozen=True, tag=40):
    """The context has ended: remove it, and forward this to the workers that were sent messages of the context."""

    context_id: int


class TellMe(_Record, frozen=True, tag=49):
    """To the creator of a context: send DropContext to the sender, since the worker that would have sent it is lost."""

    context_id: int


class PassHead(_Record, frozen=True):
    """What a worker needs to take part in a backward pass.  ``floor``: the lowest number of a pass of that root that
    still runs."""

    pass_id: PassId
    context_id: int
    retain_graph: bool
    create_graph: bool
    fast: bool
    floor: int


class Report(_Record, frozen=True):
    """The work that is left on a worker; the record with the highest version is used."""

    worker: int
    version: int
    missing: int  # gradients that it waits for
    reduces: bool = False  # it holds gradients back until the end of the pass


class Finished(_Record, frozen=True, tag=42):
    """All that ``count`` Gradients caused is done, but for ``owed`` Gradients that went back to their sender."""

    pass_id: PassId
    count: int
    owed: int
    reports: tuple[Report, ...]


class Gradients(_Record, frozen=True, tag=41):
    """The gradients of recvs, for the sends at their other ends; the tensors are in the body, in order.

    ``counted``: the sender waits for a Finished.  It does not if the receiver already waits for the sender's Finished,
    which may be part of the same message.
    """

    head: PassHead
    # Message id, which of its tensors these are, and which of them got an undefined gradient.
    messages: tuple[tuple[int, tuple[Size, ...], tuple[Size, ...]], ...]
    counted: bool
    finished: Finished | None = None
    body: Body = EMPTY_BODY


class Discover(_Record, frozen=True, tag=43):
    """These sends, and these of their tensors, will get a gradient in this pass."""

    head: PassHead
    sends: tuple[tuple[int, tuple[Size, ...]], ...]
    counted: bool  # as in Gradients


class Explored(_Record, frozen=True, tag=44):
    """All that ``count`` Discovers led to is explored, but for ``owed`` Discovers that went back to their sender.

    ``needs_plan``: the workers that cannot go on before they know which of their sends are live.
    """

    pass_id: PassId
    count: int
    owed: int
    needs_plan: tuple[int, ...]


class PlanWanted(_Record, frozen=True, tag=45):
    """Asks the root to find out which sends are live."""

    pass_id: PassId


class PlanKnown(_Record, frozen=True, tag=46):
    """Discovery has ended: a send for which no Discover came is not live."""

    pass_id: PassId


class PassFailed(_Record, frozen=True, tag=47):
    """To the root: the reason why a pass has failed; the exception is in the body."""

    pass_id: PassId
    worker: str
    type_name: str
    text: str
    traceback: str
    body: Body = EMPTY_BODY


class EndPass(_Record, frozen=True, tag=48):
    """The pass has failed: remove its state, and forward this to the workers that this one involved in the pass."""

    pass_id: PassId
    context_id: int
    reason: str


#: Messages about references, contexts and passes, which are not answered.
InternalMessage = (
    ForkRequest
    | ForkAccepted
    | ForkRefused
    | ChildConfirmed
    | UserDelete
    | DropContext
    | TellMe
    | Gradients
    | Finished
    | Discover
    | Explored
    | PlanWanted
    | PlanKnown
    | PassFailed
    | EndPass
)

Message = (
    Call | RemoteCall | Fetch | Reply | Failure | SegmentReleased | Goodbye | MemoryReadable | Barrier | InternalMessage
)

_FROM_BOTH = frozenset((SegmentReleased, Goodbye, MemoryReadable))
FROM_DIALLER = _FROM_BOTH | {Call, RemoteCall, Fetch, Barrier, *get_args(InternalMessage)}
FROM_DIALLED = _FROM_BOTH | {Reply, Failure}
