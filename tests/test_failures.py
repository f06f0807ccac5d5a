"""Exceptions across the wire, without a wire."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any, ClassVar

import pytest

from telegrad._agent.failures import copy_of, failure_of, let_go_of_frames, rebuild, story_of
from telegrad._wire import codec
from telegrad._wire.messages import Failure
from telegrad._wire.values import PackedValue, Route, pack, unpack
from telegrad.errors import RemoteError, RpcTimeoutError, SerializationError, UsageError, WorkerLostError


class Picky(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(code)
        self.hint = hint

    def __str__(self) -> str:
        return f"code {self.args[0]}, hint {self.hint}"


class Listed(Exception):
    register: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Listed.register.append(cls)

    def __str__(self) -> str:
        return "its own text"


class Maker(Exception):
    def __new__(cls, *args: Any) -> Maker:
        assert args, "cannot be made of nothing"
        return super().__new__(cls, *args)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def packed(value: Any) -> PackedValue:
    return pack(value, Route(1))


def sent(error: BaseException) -> Failure:
    return failure_of(raised(error), 7, "worker", packed)[0]


def trip(error: BaseException, allow_any: bool = True) -> Exception:
    """There and back, through the codec."""
    failure = codec.decode(codec.encode(sent(error)))
    assert isinstance(failure, Failure)
    body = failure.body
    details = unpack(body, list(body.buffers), [], [], allow_pickle=True)
    return rebuild(failure, details, allow_any, failure.worker)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"),
        ValueError("text", 2, [3]),
        ValueError(),
        KeyError("key"),
        OSError(2, "no file"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        StopIteration(3),
        Picky(3, hint="less"),
        Maker("something"),
        RpcTimeoutError("late"),
        WorkerLostError("lost"),
        SerializationError("cannot"),
        UsageError("wrong"),
        RemoteError("again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_type_comes_back_with_text_and_traceback(error: Exception) -> None:
    back = trip(error)
    assert isinstance(back, type(error))
    assert type(back).__qualname__ == type(error).__qualname__
    for shown in (str(back), "".join(traceback.format_exception(back))):
        assert "This was raised on worker 'worker':" in shown
        assert "in raised" in shown
        assert str(error) in shown


def test_attributes_come_back() -> None:
    back = trip(Picky(3, hint="less"))
    assert isinstance(back, Picky)
    assert (back.args, back.hint) == ((3,), "less")
    file_error = trip(OSError(2, "no file"))
    assert isinstance(file_error, FileNotFoundError)
    assert (file_error.errno, file_error.strerror) == (2, "no file")


def test_notes_and_causes_come_along() -> None:
    error = ValueError("text")
    error.__cause__ = KeyError("the cause")
    error.add_note("a note of the user")
    back = trip(error)
    assert "the cause" in str(back)
    assert "a note of the user" in back.__notes__


def test_a_type_that_is_not_here_becomes_a_remote_error() -> None:
    class Local(Exception):
        pass

    back = trip(Local("text"))
    assert type(back) is RemoteError
    assert "Local: text" in str(back)
    assert "raised on worker 'worker'" in str(back)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_caller_becomes_a_remote_error(error: BaseException) -> None:
    assert type(trip(error)) is RemoteError


def test_without_pickle_only_built_in_types_and_our_own_are_rebuilt() -> None:
    assert type(trip(Picky(3, hint="x"), allow_any=False)) is RemoteError
    assert type(trip(ValueError("x"), allow_any=False)) is ValueError
    assert type(trip(WorkerLostError("x"), allow_any=False)) is WorkerLostError


@pytest.mark.parametrize("name", ["os:system", "builtins:print", "builtins:int", "nonsense", "a:b:c", ""])
def test_a_name_that_is_no_exception_is_never_called(name: str) -> None:
    back = rebuild(Failure(1, "worker", name, "text"), (("x",), {}), True, "worker")
    assert type(back) is RemoteError


@pytest.mark.parametrize("details", [None, 5, ("x",), (5, {}), (("x",), 5), ((), {"args": 3})])
def test_strange_details_make_an_error_all_the_same(details: Any) -> None:
    back = rebuild(Failure(1, "worker", "builtins:ValueError", "text", "trace"), details, True, "worker")
    assert "text" in str(back)


def test_an_error_without_text_or_with_far_too_much() -> None:
    assert "could not be made" in "".join(traceback.format_exception(trip(Mute())))
    assert len(sent(ValueError("x" * 1_000_000)).text) <= 64 << 10
    assert "\\udc80" in sent(ValueError("\udc80")).text


def test_details_that_cannot_be_packed_are_left_out() -> None:
    def refuse(value: Any) -> PackedValue:
        raise SerializationError("no")

    failure, _ = failure_of(raised(ValueError("text")), 1, "worker", refuse)
    back = rebuild(failure, None, True, failure.worker)
    assert type(back) is ValueError
    assert "text" in str(back)


def test_a_copy_is_the_same_but_for_its_traceback() -> None:
    for error in (Picky(3, hint="less"), OSError(2, "no file"), RpcTimeoutError("late"), Maker("x")):
        raised(error)
        again = copy_of(error)
        assert type(again) is type(error)
        assert again is not error
        assert again.args == error.args
        assert again.__dict__ == error.__dict__
        assert again.__traceback__ is None
    assert copy_of(OSError(2, "no file")).errno == 2


def test_a_copy_has_notes_of_its_own() -> None:
    error = ValueError("x")
    error.add_note("one")
    copy_of(error).add_note("two")
    assert copy_of(error).__notes__ == ["one"]


def test_no_class_of_ours_comes_into_a_users_register() -> None:
    failure = Failure(0, "b", f"{__name__}:Listed", "text", "traceback")
    again = rebuild(failure, ((3,), {}), True, failure.worker)
    assert isinstance(again, Listed)
    assert "text" in str(again)
    assert Listed.register == []


def test_an_error_that_is_kept_holds_no_frames_but_knows_its_story() -> None:
    class Big:
        pass

    def fails() -> None:
        big = Big()
        alive.append(weakref.ref(big))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    alive: list[weakref.ref[Big]] = []
    try:
        fails()
    except ValueError as caught:
        kept = caught
    let_go_of_frames(kept)
    gc.collect()
    assert alive[0]() is None
    failure, _ = failure_of(kept, 1, "worker", packed)
    assert "in fails" in failure.traceback
    assert "inner" in failure.traceback


def test_what_a_peer_says_cannot_steer_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    failure = Failure(1, "b", f"nowhere:{evil}", f"first {evil}\n\tsecond\r", f"Traceback {evil}\n  line\n")
    error = rebuild(failure, None, True, failure.worker)
    assert "\x1b" not in str(error)
    assert "\x07" not in str(error)
    assert "\r" not in str(error)
    assert "first \\x1b]0;owned" in str(error)
    assert "\n\tsecond\\r" in str(error)
    assert "  line" in str(error)


@pytest.mark.parametrize("notes", [["\x1b[2J"], "\x1b", 7])
def test_nor_can_attributes_and_notes_that_a_peer_sends(notes: Any) -> None:
    attributes = {"__notes__": notes, "_telegrad_story": "\x1b[2J", "__class__": int, "code": 3}
    error = rebuild(Failure(1, "b", "builtins:ValueError", "text"), (("text",), attributes), True, "b")
    assert type(error) is ValueError
    assert error.code == 3  # type: ignore[attr-defined]
    shown = "".join(traceback.format_exception(error)) + story_of(error)
    assert "\x1b" not in shown


def test_a_syntax_error_names_no_file_here() -> None:
    details = (("\x1b", ("\x1b", 1, 1, "\x1b[2J\n", 1, 1)), {})
    error = rebuild(Failure(1, "b", "builtins:SyntaxError", "text"), details, True, "b")
    assert isinstance(error, RemoteError)
    assert "\x1b" not in "".join(traceback.format_exception(error))


def test_the_worker_that_is_named_is_that_of_the_link() -> None:
    error = rebuild(Failure(1, "somebody else", "builtins:ValueError", "text"), None, True, "b")
    assert "raised on worker 'b'" in str(error)
