"""Changes frames: with an eye for their structure, and blindly.

Everything is drawn from one random generator, so a seed names the whole run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from telegrad._wire import codec
from telegrad._wire.frames import MAGIC, MAX_HEADER, PREFIX
from telegrad._wire.messages import FROM_DIALLED, FROM_DIALLER, Goodbye
from telegrad.errors import ProtocolError

from .adapt import BODY, FIELDS, Live, adapt
from .capture import Captured, Corpus

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

_MOST_STREAMED = 128 << 10  # more announced bytes are not sent


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [0, value]
    return value


_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1),
    *(-(1 << 31), -(1 << 63), 0.0, -1.5, 1e308, float("nan"), float("inf"), None, True, False, "", "x", "\0", "é" * 50),
    *("x" * 3000, b"", b"\xff" * 8, b"\0" * 64, [], [[]], {}, {"a": 1}, {1: [2]}, [0] * 300, [-1], [1 << 40] * 3),
    *(_nested(20), _nested(900), "fuzz.scale", "fuzz.hold", "torch:neg", "torch:sum", "os:getpid", "builtins:KeyError"),
)


_BY_TYPE: dict[type, tuple[Any, ...]] = {
    kind: tuple(value for value in _VALUES if type(value) is kind) for kind in (int, float, str, bytes, list)
}
#: Those that lead furthest into the worker are drawn more often.
_WEIGHTS = {"Call": 6, "RemoteCall": 2, "Fetch": 2, "Gradients": 4, "Discover": 2, "Reply": 4, "Failure": 2}


@dataclass(frozen=True)
class Input:
    """``ends``: the victim must close the connection on this; or, "hang up", waits for more until we close it."""

    raw: bytes
    ends: str = ""  # "", "refused", "hang up"


class Mutator:
    """``spare_calls``: leaves the names of functions and all pickles alone, for a victim that would run anything."""

    def __init__(self, corpus: Corpus, seed: int | str, spare_calls: bool = False) -> None:
        self.random = random.Random(seed)
        self._spare_calls = spare_calls
        self._frames: dict[bool, list[Captured]] = {True: [], False: []}  # by direction
        for frame in corpus.frames:
            self._frames[frame.from_dialler].append(frame)
        self._by_kind = {side: _by_kind(frames) for side, frames in self._frames.items()}
        self._kinds = {
            side: [kind for kind in kinds for _ in range(_WEIGHTS.get(kind, 1))]
            for side, kinds in self._by_kind.items()
        }
        self._trees: dict[bytes, Any] = {}
        self._donors = [_decode(self.random.choice(corpus.frames).header) for _ in range(200)]

    def request(self, live: Live, may_end: bool = True) -> Input:
        """A changed frame, as the side that dialled sends it; ``may_end``: one that ends the connection will do."""
        return self._make(live, True, may_end)

    def answer(self, live: Live, call_id: int, context_id: int | None) -> Input:
        """A changed answer to a call that the victim made, in that context."""
        kind = self.random.choice(("Reply", "Reply", "Reply", "Failure", ""))
        return self._make(live, False, self.random.random() < 0.02, kind, call_id, context_id)

    def _make(
        self,
        live: Live,
        from_dialler: bool,
        may_end: bool,
        kind: str = "",
        call_id: int | None = None,
        context_id: int | None = None,
    ) -> Input:
        rng = self.random
        while True:
            side = from_dialler if not may_end or rng.random() > 0.02 else not from_dialler  # in the wrong direction
            kinds = self._by_kind[side]
            frame = rng.choice(kinds.get(kind) or kinds[rng.choice(self._kinds[side])])
            if may_end and not self._spare_calls and rng.random() < 0.5:
                raw = rng.choice(_BLIND)(rng, frame, rng.choice(self._frames[side]))
            else:
                raw = self._mutate_tree(frame, live, call_id, context_id)
            ends = classify(raw, from_dialler)
            if may_end or not ends:
                return Input(raw, ends)

    # --- with an eye for the structure ----------------------------------------------------------------------------

    def _mutate_tree(self, frame: Captured, live: Live, call_id: int | None, context_id: int | None) -> bytes:
        rng = self.random
        tree = self._trees.get(frame.header)
        if tree is None:
            tree = self._trees[frame.header] = _decode(frame.header)
        if rng.random() < 0.95:
            tree = adapt(rng, tree, live, call_id, context_id)
        for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 2, 3))):
            changed = self._change(tree)
            if not self._spare_calls or _same_code(tree, changed):
                tree = changed
        try:
            header = _encode(tree)
        except (TypeError, ValueError, OverflowError, RecursionError):
            header = frame.header
        return _with_stream(rng, header, frame.stream)

    def _change(self, tree: Any) -> Any:
        """The tree with one change somewhere; what is not on the way there is shared with the old one."""
        rng = self.random
        if type(tree) is not list or not tree:
            return self._replace(tree)
        # The first of a list is often a tag, without which nothing else is looked at.
        index = rng.randrange(1 if len(tree) > 1 and rng.random() < 0.9 else 0, len(tree))
        copy = list(tree)
        if rng.random() < 0.6 and (lists := [at for at, child in enumerate(copy) if type(child) is list and child]):
            index = rng.choice(lists)
        child = copy[index]
        if type(child) is list and child and rng.random() < 0.95:
            copy[index] = self._change(child)
            return copy
        draw = rng.random()
        if draw < 0.91:
            copy[index] = self._replace(child)
        elif draw < 0.94:
            del copy[index]
        elif draw < 0.97:
            copy.insert(index, child)
        else:
            other = rng.randrange(len(copy))
            copy[index], copy[other] = copy[other], copy[index]
        return copy

    def _replace(self, value: Any) -> Any:
        rng = self.random
        draw = rng.random()
        kind = type(value)
        if draw < 0.55:
            if kind is bool:
                return not value
            if kind is int:
                return rng.choice((value + 1, value - 1, value ^ 1 << rng.randrange(20), value * 2, rng.randrange(64)))
            if kind is bytes and value:
                at = rng.randrange(len(value))
                return rng.choice((value[:at], value + value[:at], value[:at] + rng.randbytes(1) + value[at + 1 :]))
            if kind is str:
                return rng.choice((value[:-1], value + "x", value.upper(), value[::-1]))
        if draw < 0.94 and kind in _BY_TYPE:
            return rng.choice(_BY_TYPE[kind])
        return _some_part(rng, rng.choice(self._donors)) if draw < 0.97 else rng.choice(_VALUES)


def _by_kind(frames: list[Captured]) -> dict[str, list[Captured]]:
    found: dict[str, list[Captured]] = {}
    for frame in frames:
        found.setdefault(frame.kind, []).append(frame)
    return found


def _some_part(rng: random.Random, tree: Any) -> Any:
    while type(tree) is list and tree and rng.random() < 0.8:
        tree = rng.choice(tree)
    return tree


def _same_code(old: Any, new: Any) -> bool:
    """Whether a change leaves the function's name and the pickle as they were (see ``messages.Body``)."""
    try:
        return _code(old) == _code(new)
    except (LookupError, TypeError):
        return False


def _code(tree: list[Any]) -> Any:
    fields = FIELDS[tree[0]]
    code = [tree[0]]
    for name in ("function", "pickled_function", "type_name"):
        if name in fields:
            code.append(tree[fields[name]])
    if "body" in fields:
        body = tree[fields["body"]]
        code += [body[BODY[name]] for name in ("pickle", "pickle_buffers", "buffers")]
    return code


def _with_stream(rng: random.Random, header: bytes, stream: bytes) -> bytes:
    """A frame around a header; what follows it is what the header announces, most of the time."""
    try:
        sizes = codec.stream_sizes(codec.decode(header))
    except (ProtocolError, TypeError):
        return PREFIX.pack(MAGIC, len(header), len(stream)) + header + stream
    total = sum(sizes)
    if total != len(stream) and total < 1 << 64 and rng.random() < 0.9:
        stream = (
            (stream * (total // max(len(stream), 1) + 1) or bytes(total))[:total] if total <= _MOST_STREAMED else b""
        )
        return PREFIX.pack(MAGIC, len(header), total) + header + stream
    return PREFIX.pack(MAGIC, len(header), len(stream)) + header + stream


# --- blindly --------------------------------------------------------------------------------------------------------


def _flip_bits(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    data = bytearray(frame.raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _flip_in_header(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    header = bytearray(frame.header)
    for _ in range(rng.choice((1, 1, 2, 4))):
        header[rng.randrange(len(header))] = rng.randrange(256)
    return PREFIX.pack(MAGIC, len(header), len(frame.stream)) + bytes(header) + frame.stream


def _truncate(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    return frame.raw[: rng.randrange(1, len(frame.raw))]


def _truncate_header(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    header = frame.header[: rng.randrange(len(frame.header))]
    return PREFIX.pack(MAGIC, len(header), len(frame.stream)) + header + frame.stream


def _splice(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    header = frame.header[: rng.randrange(len(frame.header))] + other.header[rng.randrange(len(other.header)) :]
    return PREFIX.pack(MAGIC, len(header), len(frame.stream)) + header + frame.stream


def _change_lengths(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    sizes = [len(frame.header), len(frame.stream)]
    which = rng.randrange(2)
    most = ((1 << 32) - 1, (1 << 64) - 1)[which]
    wrong = rng.choice((0, 1, sizes[which] + 1, max(sizes[which] - 1, 0), MAX_HEADER, 1 << 31, 1 << 40, most))
    sizes[which] = min(wrong, most)
    return PREFIX.pack(MAGIC, *sizes) + frame.header + frame.stream


def _repeat(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    return frame.raw * rng.choice((2, 3, 10)) if len(frame.raw) < 4096 else frame.raw


def _noise(rng: random.Random, frame: Captured, other: Captured) -> bytes:
    header = rng.randbytes(rng.randrange(1, 200))
    return PREFIX.pack(MAGIC, len(header), 0) + header


_BLIND: tuple[Callable[[random.Random, Captured, Captured], bytes], ...] = (
    _flip_bits,
    _flip_in_header,
    _flip_in_header,
    _truncate,
    _truncate_header,
    _splice,
    _change_lengths,
    _repeat,
    _repeat,
    _noise,
)


# --- what the victim must do with it --------------------------------------------------------------------------------


def classify(raw: bytes, from_dialler: bool) -> str:
    """What becomes of the connection, as ``Input.ends`` says."""
    allowed = FROM_DIALLER if from_dialler else FROM_DIALLED
    at = 0
    while at < len(raw):
        if len(raw) - at < PREFIX.size:
            return "hang up"
        magic, header_size, stream_size = PREFIX.unpack_from(raw, at)
        if magic != MAGIC or header_size > MAX_HEADER:
            return "refused"
        begin = at + PREFIX.size
        if len(raw) - begin < header_size:
            return "hang up"
        try:
            message = codec.decode(raw[begin : begin + header_size])
        except ProtocolError:
            return "refused"
        if stream_size:
            sizes = codec.stream_sizes(message)
            if sum(sizes) != stream_size or min(sizes) <= 0:
                return "refused"
        at = begin + header_size + stream_size
        if at > len(raw):
            return "hang up"
        if type(message) not in allowed or type(message) is Goodbye:
            return "refused"
    return ""
