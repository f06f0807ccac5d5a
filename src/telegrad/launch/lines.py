"""Splits the bytes of a worker's pipe into whole lines.  No I/O: ``local`` reads and writes."""

from __future__ import annotations

__all__ = ["LineSplitter"]

LONGEST_LINE = 16 << 20  # a worker that never ends its line must not fill the launcher's memory
PROGRESS_INTERVAL = 1.0  # seconds between two states of one progress bar


class LineSplitter:
    r"""Cuts one stream into lines, as bytes, so that text in any encoding passes through unchanged.

    A lone ``\r`` comes from a progress bar that redraws its line.  The output of several workers has no line to redraw,
    so the states become lines: at most one per second, and always the last one.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the line that has begun and not ended
        self._progress_shown = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that ``data`` completes, without their line ends."""
        *ends, tail = data.split(b"\n")
        lines = []
        for end in ends:
            lines.append(_visible(bytes(self._rest) + end))
            self._rest.clear()
        self._rest += tail
        lines.extend(self._progress(now))
        if len(self._rest) > LONGEST_LINE:
            lines.extend(self.close())
        return lines

    def close(self) -> list[bytes]:
        """The last line, if the stream ended inside one."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [_visible(rest)] if rest else []

    def _progress(self, now: float) -> list[bytes]:
        # A \r at the very end may be half of a \r\n: it waits for the next bytes.
        cut = self._rest.rfind(b"\r", 0, max(0, len(self._rest) - 1))
        if cut < 0:
            return []
        state = _visible(bytes(self._rest[:cut]))
        del self._rest[: cut + 1]
        if not state.strip() or now - self._progress_shown < PROGRESS_INTERVAL:
            return []
        self._progress_shown = now
        return [state]


def _visible(line: bytes) -> bytes:
    """What a terminal would leave of a line that redraws itself: the text after the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
