"""Internal messages that take effect exactly once, whatever the network loses, repeats or reorders.

The sender numbers its notes per receiver and repeats each with growing pauses until it is acknowledged; the receiver
acknowledges every copy and lets the first one through.  Acknowledgements ride on a note in the other direction where
one goes soon.  ``floor``, the lowest number still unacknowledged, rides along too, so that the receiver can forget what
lies below it.  No thread, socket or clock in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from telegrad._wire.messages import Note, NotePayload
from telegrad._wire.values import PACKED_NONE, PackedValue

_LONGEST_PAUSE = 5.0
_MOST_SEEN = 1 << 17  # numbers above the floor that a receiver remembers of one sender


@dataclass(slots=True)
class _Unacknowledged:
    payload: NotePayload
    packed: PackedValue
    pause: float
    due: float


@dataclass(slots=True)
class _Outgoing:
    next_seq: int = 0
    floor: int = 0
    waiting: dict[int, _Unacknowledged] = field(default_factory=dict)

    def note(self, seq: int, acks: tuple[int, ...] = ()) -> Note:
        entry = self.waiting[seq]
        while self.floor not in self.waiting:
            self.floor += 1
        return Note(seq, self.floor, entry.payload, acks, entry.packed.body)


class Outbox:
    """The notes of one worker that are not yet acknowledged.  Not thread-safe: the agent holds a lock."""

    def __init__(self, first_pause: float) -> None:
        self._first_pause = first_pause
        self._to: dict[int, _Outgoing] = {}

    def post(
        self, to: int, payload: NotePayload, now: float, packed: PackedValue = PACKED_NONE, acks: tuple[int, ...] = ()
    ) -> Note:
        outgoing = self._to.get(to)
        if outgoing is None:
            outgoing = self._to[to] = _Outgoing()
        seq = outgoing.next_seq
        outgoing.next_seq += 1
        outgoing.waiting[seq] = _Unacknowledged(payload, packed, self._first_pause, now + self._first_pause)
        return outgoing.note(seq, acks)

    def acknowledged(self, by: int, seqs: tuple[int, ...]) -> None:
        if seqs and by in self._to:
            waiting = self._to[by].waiting
            for seq in seqs:
                waiting.pop(seq, None)

    def due(self, now: float) -> list[tuple[int, Note, PackedValue]]:
        """The notes to send again."""
        again = []
        for to, outgoing in self._to.items():
            for seq, entry in outgoing.waiting.items():
                if entry.due <= now:
                    entry.pause = min(entry.pause * 2, _LONGEST_PAUSE)
                    entry.due = now + entry.pause
                    again.append((to, outgoing.note(seq), entry.packed))
        return again

    def lost(self, worker: int) -> None:
        self._to.pop(worker, None)

    def __len__(self) -> int:
        return sum(len(outgoing.waiting) for outgoing in self._to.values())


@dataclass(slots=True)
class _Incoming:
    floor: int = 0
    seen: set[int] = field(default_factory=set)  # of the numbers from the floor on
    acks: list[int] = field(default_factory=list)  # what the sender has not been told has come


class Inbox:
    """Lets each note through once, and remembers what is to be acknowledged."""

    def __init__(self) -> None:
        self._from: dict[int, _Incoming] = {}

    def accept(self, sender: int, note: Note) -> bool:
        incoming = self._from.get(sender)
        if incoming is None:
            incoming = self._from[sender] = _Incoming()
        seq, floor, seen = note.seq, note.floor, incoming.seen
        if floor > incoming.floor:
            # Whichever is shorter: a stranger may name any number.
            few = floor - incoming.floor < len(seen)
            seen.difference_update(range(incoming.floor, floor) if few else [old for old in seen if old < floor])
            incoming.floor = floor
        first = seq >= incoming.floor and seq not in seen
        if first:
            if len(seen) >= _MOST_SEEN:
                return False  # nor acknowledged: an honest sender repeats it, and its floor has moved on by then
            seen.add(seq)
        incoming.acks.append(seq)
        return first

    def acks_for(self, worker: int) -> tuple[int, ...]:
        """What that worker should be told has come; from now on it counts as told."""
        incoming = self._from.get(worker)
        if incoming is None or not incoming.acks:
            return ()
        acks, incoming.acks = incoming.acks, []
        return tuple(acks)

    def owing(self) -> list[int]:
        """The workers that are to be told something."""
        return [worker for worker, incoming in self._from.items() if incoming.acks]

    def lost(self, worker: int) -> None:
        self._from.pop(worker, None)
