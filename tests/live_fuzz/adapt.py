"""Makes a captured frame speak of what the victim knows.

A frame names workers, contexts, passes and references of the job that it was captured in; sent as it is, most of it is
refused at once.  With ids of the victim's own job in their places it reaches what lies behind the first checks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, get_args

from telegrad._wire.messages import (
    Body,
    Failure,
    Fetch,
    ForkRequest,
    Gradients,
    InternalMessage,
    Message,
    PassHead,
    RemoteCall,
    Reply,
    RRefFork,
    UserDelete,
)

from .victim import HONEST, VICTIM

CREATOR_SHIFT = 48  # a context id begins with the worker that made it


def _tag(kind: Any) -> Any:
    return kind.__struct_config__.tag


def _positions(kind: Any, first: int) -> dict[str, int]:
    return {name: at for at, name in enumerate(kind.__struct_fields__, first)}


#: Where the fields of each message stand, by its tag; untagged records have no tag in front.
FIELDS = {_tag(kind): _positions(kind, 1) for kind in get_args(Message)}
BODY = _positions(Body, 0)
_FORK = _positions(RRefFork, 0)
_HEAD = _positions(PassHead, 0)
_FETCH, _REMOTE = _tag(Fetch), _tag(RemoteCall)
_ANSWERS = (_tag(Reply), _tag(Failure))
_OF_REFERENCES = (_tag(ForkRequest), _tag(UserDelete))
_GRADIENTS = _tag(Gradients)
_INTERNAL = frozenset(_tag(kind) for kind in get_args(InternalMessage))


@dataclass
class Live:
    """What one hostile worker may speak of: ids of its own making, and those that the victim told it."""

    peer: int
    contexts: list[int] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)  # context and message, of tensors that came from there
    passes: list[list[int]] = field(default_factory=list)
    references: list[list[int]] = field(default_factory=list)

    def learn(self, ids: list[Any], new: Any) -> None:
        if new not in ids:
            ids.append(new)
        if len(ids) > 16:
            del ids[:8]

    def context(self, rng: random.Random) -> int:
        if self.contexts and rng.random() < 0.3:
            return rng.choice(self.contexts)
        return self.peer << CREATOR_SHIFT | rng.randrange(6)

    def pass_id(self, rng: random.Random) -> list[int]:
        if self.passes and rng.random() < 0.6:
            return rng.choice(self.passes)
        return [self.peer, rng.randrange(1, 4), 7]

    def reference(self, rng: random.Random) -> list[int]:
        if self.references and rng.random() < 0.7:
            return rng.choice(self.references)
        return [rng.choice((self.peer, self.peer, self.peer, VICTIM, HONEST)), rng.randrange(1 << 40)]


def adapt(rng: random.Random, tree: list[Any], live: Live, call_id: int | None, context_id: int | None) -> list[Any]:
    """``call_id``: of the call that it answers, made in that context."""
    tree = list(tree)
    tag = tree[0]
    fields = FIELDS[tag]
    if tag in _ANSWERS and call_id is not None:
        tree[1] = call_id
    if "body" in fields and rng.random() < 0.9:
        tree[fields["body"]] = _adapt_body(rng, tree[fields["body"]], live, context_id)
    if tag == _FETCH:
        tree[fields["rref_id"]] = live.reference(rng)
    elif tag == _REMOTE and rng.random() < 0.9:
        new = [live.peer, rng.randrange(1 << 40)]
        live.learn(live.references, new)
        tree[fields["rref_id"]] = tree[fields["fork_id"]] = new
    elif tag in _INTERNAL:
        _adapt_internal(rng, tree, live)
    return tree


def _adapt_body(rng: random.Random, body: list[Any], live: Live, context_id: int | None) -> list[Any]:
    body = list(body)
    extra = body[BODY["extra"]]
    if extra is not None:
        body[BODY["extra"]] = [context_id or live.context(rng), *extra[1:]]
    if body[BODY["rrefs"]]:
        body[BODY["rrefs"]] = [_adapt_fork(rng, fork, live) for fork in body[BODY["rrefs"]]]
    return body


def _adapt_fork(rng: random.Random, fork: list[Any], live: Live) -> list[Any]:
    fork = list(fork)
    fork[_FORK["rref_id"]] = live.reference(rng)
    fork[_FORK["fork_id"]] = [live.peer, rng.randrange(1 << 40)]
    fork[_FORK["owner"]] = rng.choice((VICTIM, VICTIM, live.peer, HONEST))
    fork[_FORK["parent"]] = live.peer
    return fork


def _adapt_internal(rng: random.Random, tree: list[Any], live: Live) -> None:
    tag = tree[0]
    fields = FIELDS[tag]
    if "pass_id" in fields:
        tree[fields["pass_id"]] = live.pass_id(rng)
    if "head" in fields:
        head = tree[fields["head"]] = list(tree[fields["head"]])
        head[_HEAD["pass_id"]] = live.pass_id(rng)
        head[_HEAD["context_id"]] = live.context(rng)
        if live.sends:
            head[_HEAD["context_id"]], message_id = rng.choice(live.sends)
            name = "messages" if tag == _GRADIENTS else "sends"
            tree[fields[name]] = [[message_id, *each[1:]] for each in tree[fields[name]][:1]]
        if rng.random() < 0.8:
            head[_HEAD["floor"]] = 0
    elif "context_id" in fields:
        tree[fields["context_id"]] = live.context(rng)
    if tag in _OF_REFERENCES:
        tree[fields["rref_id"]] = live.reference(rng)
        tree[fields["fork_id"]] = live.reference(rng)
