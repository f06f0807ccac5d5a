"""Internal messages that take effect exactly once, whatever the network loses, repeats or reorders.

The sender numbers its notes per receiver and repeats each with growing pauses until it is acknowledged; the receiver
acknowledges every copy and lets the first one through.  ``floor``, the lowest number still unacknowledged, rides
along, so that the receiver can forget what lies below it.  No thread, socket or clock in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from telegrad.wire.messages import Note, NotePayload

_LONGEST_PAUSE = 5.0


@dataclass(slots=True)
class _Unacknowledged:
    payload: NotePayload
    pause: float
    due: float


@dataclass(slots=True)
class _Outgoing:
    next_seq: int = 0
    waiting: dict[int, _Unacknowledged] = field(default_factory=dict)

    def note(self, seq: int, payload: NotePayload) -> Note:
        return Note(seq, min(self.waiting, default=seq), payload)


class Outbox:
    """The notes of one worker that are not yet acknowledged.  Not thread-safe: the agent holds a lock."""

    def __init__(self, first_pause: float) -> None:
        self._first_pause = first_pause
        self._to: dict[int, _Outgoing] = {}

    def post(self, to: int, payload: NotePayload, now: float) -> Note:
        outgoing = self._to.setdefault(to, _Outgoing())
        seq = outgoing.next_seq
        outgoing.next_seq += 1
        outgoing.waiting[seq] = _Unacknowledged(payload, self._first_pause, now + self._first_pause)
        return outgoing.note(seq, payload)

    def acknowledged(self, by: int, seq: int) -> None:
        if by in self._to:
            self._to[by].waiting.pop(seq, None)

    def due(self, now: float) -> list[tuple[int, Note]]:
        """The notes to send again."""
        again = []
        for to, outgoing in self._to.items():
            for seq, entry in outgoing.waiting.items():
                if entry.due <= now:
                    entry.pause = min(entry.pause * 2, _LONGEST_PAUSE)
                    entry.due = now + entry.pause
                    again.append((to, outgoing.note(seq, entry.payload)))
        return again

    def lost(self, worker: int) -> None:
        self._to.pop(worker, None)

    def __len__(self) -> int:
        return sum(len(outgoing.waiting) for outgoing in self._to.values())


class Inbox:
    """Lets each note through once."""

    def __init__(self) -> None:
        self._floor: dict[int, int] = {}
        self._seen: dict[int, set[int]] = {}

    def accept(self, sender: int, note: Note) -> bool:
        floor = max(self._floor.get(sender, 0), note.floor)
        seen = self._seen.setdefault(sender, set())
        if floor != self._floor.get(sender, 0):
            self._floor[sender] = floor
            seen.difference_update([seq for seq in seen if seq < floor])
        if note.seq < floor or note.seq in seen:
            return False
        seen.add(note.seq)
        return True

    def lost(self, worker: int) -> None:
        self._floor.pop(worker, None)
        self._seen.pop(worker, None)
