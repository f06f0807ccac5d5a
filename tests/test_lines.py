"""Lines come out whole, whatever the pieces in which they came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.launch import lines
from telegrad.launch.lines import LineSplitter


def split(*pieces: bytes, times: list[float] | None = None) -> list[bytes]:
    splitter = LineSplitter()
    moments = times or [0.0] * len(pieces)
    found = [line for piece, now in zip(pieces, moments, strict=True) for line in splitter.feed(piece, now)]
    return found + splitter.close()


def test_a_line_in_pieces_comes_out_whole() -> None:
    assert split(b"he", b"llo\nwo", b"rld\n") == [b"hello", b"world"]


def test_a_last_line_without_an_end_comes_out_when_the_stream_closes() -> None:
    assert split(b"one\ntwo") == [b"one", b"two"]


def test_empty_lines_stay() -> None:
    assert split(b"\n\na\n") == [b"", b"", b"a"]


def test_bytes_that_are_not_utf8_pass_through() -> None:
    assert split(b"\xff\xfe\x00\n") == [b"\xff\xfe\x00"]


def test_carriage_return_and_newline_is_one_line_end_even_across_pieces() -> None:
    assert split(b"a\r\nb\r", b"\nc\r\n") == [b"a", b"b", b"c"]


def test_a_progress_bar_shows_one_state_a_second_and_the_last() -> None:
    bar = [b"\r1%", b"\r2%", b"\r3%", b"\r4%", b"\r5%\n"]
    assert split(*bar, times=[0.0, 0.1, 0.2, 1.3, 1.4]) == [b"1%", b"3%", b"5%"]


def test_a_line_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 10)
    assert split(b"x" * 8, b"x" * 8, b"y\n") == [b"x" * 16, b"y"]


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\r", b"")), max_size=10))
def test_pieces_do_not_matter(pieces: list[bytes]) -> None:
    assert split(*pieces) == split(b"".join(pieces))
    assert b"\n".join(split(*pieces)).rstrip(b"\n") == b"".join(pieces).rstrip(b"\n")
