"""Contexts: one forward and its backwards, known by one id on every worker that they touched."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from telegrad._ids import PassId, random_bits
from telegrad._torch import input_metadata
from telegrad.errors import UnknownWorkerError, UsageError

_WORKER_SHIFT = 48  # the top 16 bits are the id of the creating worker
_REMEMBERED = 4096  # number of ended contexts whose late messages are recognised


def creator_of(context_id: int) -> int:
    """The worker that made a context."""
    return context_id >> _WORKER_SHIFT


@dataclass(eq=False, slots=True)  # frozen would cost three times as much to make
class Send:
    """A message that went out with tensors that need a gradient."""

    message_id: int
    to: int
    parts: tuple[Node, ...]  # one node for each such tensor

    def describe(self, part: int) -> str:
        """What was sent, as torch's graph remembers it."""
        node, output = self.parts[part].next_functions[0]
        metadata = input_metadata(node, output) if node is not None else None
        what = f"{str(metadata.dtype).removeprefix('torch.')}{list(metadata.shape)}" if metadata else "a tensor"
        return f"{what} of {type(node).__name__}"


class Context:
    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.creator = context_id >> _WORKER_SHIFT
        self.ended = False
        self.sends: dict[int, Send] = {}
        self.recvs = 0
        self.uses_device = False  # a tensor that was received is not on the CPU
        self.origin: int | None = None  # the worker that told this one first; others tell it of the end
        self.workers: set[int] = set()  # the workers that this one told of the context
        self.passes: dict[PassId, Any] = {}  # that this worker takes part in; None: it has failed
        self.floors: dict[int, int] = {}  # by root: its passes below that number have ended
        self.graph: tuple[set[Node], set[Node]] | None = None  # the tops and all nodes of a big one
        self._leaves: dict[int, Tensor] = {}  # by id: tensors as keys cost 0.2 us for each lookup
        self._gradients: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take_graph(self) -> tuple[set[Node], set[Node]] | None:
        """Returns what was kept, and forgets it."""
        with self._lock:
            taken, self.graph = self.graph, None
            return taken

    def keep_graph(self, tops: Iterable[Node], nodes: Iterable[Node]) -> None:
        """Keeps the nodes of a big graph, which must not be freed all at once (see ``graph``)."""
        with self._lock:
            if self.graph is None:
                self.graph = set(), set()
            self.graph[0].update(tops)
            self.graph[1].update(nodes)

    # --- gradients ----------------------------------------------------------------------------------------------

    def add_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Adds to the gradient of a leaf; not in place, since the user may have the old sum."""
        with self._lock:
            key = id(leaf)
            known = self._gradients.get(key)
            if known is None:
                self._leaves[key], self._gradients[key] = leaf, gradient
            else:
                self._gradients[key] = add_up(known, gradient)

    def set_gradient(self, leaf: Tensor, gradient: Tensor | None) -> None:
        with self._lock:
            if gradient is None:
                self._gradients.pop(id(leaf), None)
            else:
                self._leaves[id(leaf)], self._gradients[id(leaf)] = leaf, gradient

    def gradient(self, leaf: Tensor) -> Tensor | None:
        with self._lock:
            return self._gradients.get(id(leaf))

    def gradients(self) -> dict[Tensor, Tensor]:
        with self._lock:
            return {self._leaves[key]: gradient for key, gradient in self._gradients.items()}

    def gradients_for(self, leaves: Iterable[Tensor]) -> list[Tensor | None]:
        """The same, for these."""
        with self._lock:
            return list(map(self._gradients.get, map(id, leaves)))

    def __repr__(self) -> str:
        state = ", ended" if self.ended else ""
        return (
            f"<Context {self.id} of worker {self.creator}: {len(self.sends)} sends, {self.recvs} recvs, "
            f"{len(self._gradients)} gradients, {len(self.passes)} passes, told {sorted(self.workers)}{state}>"
        )


def add_up(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients: torch adds a sparse tensor to a dense one, but not the other way round."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


context_variable: ContextVar[Context | None] = ContextVar("telegrad_context", default=None)

current_context: Callable[[], Context | None] = context_variable.get


class Scope:
    """``with scope:`` makes a context current.  A scope may be entered again after it was left."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = context_variable.set(self._context)

    def __exit__(self, *_: object) -> None:
        context_variable.reset(self._token)


class Registry:
    """The contexts that one worker knows."""

    def __init__(self, worker: int, guessable: bool = True) -> None:
        """``guessable``: context ids count up.  Otherwise they are random, so that only the workers that a context has
        reached can name it."""
        self._worker = worker
        random_number = functools.partial(random_bits, _WORKER_SHIFT - 1)
        self._numbers: Callable[[], int] = itertools.count().__next__ if guessable else random_number
        self._lock = threading.Lock()
        self._known: dict[int, Context] = {}
        # The last contexts that ended, oldest first, by the worker that said so; under this one's id, if it was the
        # creator or the worker that told of the context.  Each worker has a list of its own, so that none can displace
        # what another said.
        self._ended: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def new(self) -> Context:
        context = Context((self._worker << _WORKER_SHIFT) | self._numbers())
        with self._lock:
            self._known[context.id] = context
        return context

    def _has_ended(self, context_id: int, sender: int | None = None) -> bool:
        """Whether it has ended here, or according to that worker."""
        return context_id in self._ended.get(self._worker, ()) or (
            sender is not None and context_id in self._ended.get(sender, ())
        )

    def join(self, context_id: int, sender: int) -> Context | None:
        """The context of a message that came, made if it is new here; None if it has ended."""
        with self._lock:
            if self._has_ended(context_id, sender) or context_id >> _WORKER_SHIFT == self._worker:
                return None
            if context_id not in self._known:
                self._known[context_id] = Context(context_id)
                self._known[context_id].origin = sender
            return self._known[context_id]

    def find(self, context_id: int) -> Context | None:
        return self._known.get(context_id)

    def get(self, context_id: int, name_of: Callable[[int], str]) -> Context:
        """The context that a user named; raises UsageError if there is none."""
        if not isinstance(context_id, int) or isinstance(context_id, bool):
            raise UsageError(
                f"a context is named by the number that `with context() as number` gives, not {context_id!r}"
            )
        context = self._known.get(context_id)
        if context is not None:
            return context
        creator = context_id >> _WORKER_SHIFT
        if creator == self._worker or self._has_ended(context_id):
            raise UsageError(
                f"no context {context_id}: it has ended, or never was. Work with it inside its `with` block"
            )
        try:
            maker = name_of(creator)
        except UnknownWorkerError:
            raise UsageError(
                f"no context {context_id}: no worker of this job made it; use what `with context() as number` gives"
            ) from None
        raise UsageError(f"no context {context_id} here: worker {maker} made it, and none of its calls has come here")

    def gradients_for(self, context_id: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of these in a context, None if it is not known here.  Raises UsageError if it has ended."""
        self.check(context_id)
        context = self._known.get(context_id)
        return context.gradients_for(leaves) if context is not None else [None] * len(leaves)

    def check(self, context_id: int) -> None:
        """Raises UsageError if a context has ended, as far as is known here."""
        creator = context_id >> _WORKER_SHIFT
        if context_id not in self._known and (creator == self._worker or self._has_ended(context_id)):
            raise UsageError(f"context {context_id} has ended, or never was: work with it inside its `with` block")

    def drop(self, context_id: int, by: int | None = None) -> Context | None:
        """Forgets a context, and returns it; None if it is not known, or if ``by`` may not end it.

        ``by``: the worker that says that it has ended.  Only its creator and the worker that told this one of it may
        end it.  Messages of a worker may still wait for a thread here and must not bring the context back, so what it
        said is remembered in any case.
        """
        creator = context_id >> _WORKER_SHIFT
        with self._lock:
            context = self._known.get(context_id)
            may_end = by is None or by == creator or (context is not None and by == context.origin)
            ended = self._ended[self._worker if by is None or may_end else by]
            ended[context_id] = None
            if len(ended) > _REMEMBERED:
                ended.popitem(last=False)
            if context is None or not may_end:
                return None
            del self._known[context_id]
        context.ended = True
        return context

    def forget(self, context_id: int) -> None:
        """Forgets a context as if no message had named it."""
        with self._lock:
            self._known.pop(context_id, None)

    @property
    def has_own(self) -> bool:
        """Whether a thread of this worker is inside a context that it has made."""
        return bool(self.of_creator(self._worker))

    def of_creator(self, worker: int) -> list[int]:
        with self._lock:
            return [context_id for context_id in self._known if context_id >> _WORKER_SHIFT == worker]

    def __iter__(self) -> Iterator[Context]:
        with self._lock:
            return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)


class Entered:
    """``with Entered(...) as context_id:`` makes a new context and enters it."""

    __slots__ = ("_context", "_drop", "_registry")

    def __init__(self, registry: Registry, drop: Callable[[int], None]) -> None:
        self._registry, self._drop = registry, drop

    def __enter__(self) -> int:
        self._context = enter(self._registry)
        return self._context.id

    def __exit__(self, *_: object) -> None:
        context_variable.set(None)
        self._drop(self._context.id)


def enter(registry: Registry) -> Context:
    """Makes a new context current, and returns it."""
    if (outer := current_context()) is not None:
        raise UsageError(f"this thread is already in context {outer.id}: contexts do not nest")
    context = registry.new()
    context_variable.set(context)
    return context


def leave(context_id: int) -> None:
    """Leaves that context, if it is current."""
    current = current_context()
    if current is not None and current.id == context_id:
        context_variable.set(None)
