"""Text from a peer or a store, made safe to print."""

from __future__ import annotations

__all__ = ["printable", "printable_lines"]


def printable(text: str, limit: int = 200) -> str:
    r"""Escapes characters that could control a terminal or break a log line, and truncates long text.

    Control characters, escape sequences, newlines, bidirectional marks and other unprintable characters become
    ``\x1b``, ``\n``, ``\u202e`` and so on.  At most ``limit`` characters of ``text`` are shown.
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text[:limit]
    )
    return f"{shown}... ({len(text)} characters)" if len(text) > limit else shown


def printable_lines(text: str, limit: int = 64 << 10) -> str:
    """The same for text of several lines, such as a traceback: newlines and tabs stay."""
    if text.isprintable() and len(text) <= limit:
        return text
    lines = text[:limit].split("\n")
    return "\n".join("\t".join(printable(part, limit) for part in line.split("\t")) for line in lines)
