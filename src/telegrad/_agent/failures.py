"""Exceptions across the wire: their own type comes back where it can be imported, with the remote traceback."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad._text import printable, printable_lines
from telegrad._transport.refusals import RefusalLog
from telegrad._wire.callables import exception_type
from telegrad._wire.messages import Failure
from telegrad._wire.values import PACKED_NONE, PackedValue
from telegrad.errors import RemoteError, TelegradError

log = logging.getLogger("telegrad.agent")

E = TypeVar("E", bound=BaseException)

_failed_calls = RefusalLog(log, "failed calls from other workers")
_LONGEST_TEXT = 64 << 10
_STORY = "_telegrad_story"
_TOLD = "_telegrad_text"


def failure_of(
    error: BaseException, call_id: int, worker: str, pack: Callable[[Any], PackedValue], tells_where: bool = True
) -> tuple[Failure, PackedValue]:
    """The message that carries an exception to the caller, and the memory that goes with it.

    ``tells_where``: with its traceback, which shows lines of the program.
    """
    try:
        packed = pack((_args_of(error), _attributes_of(error, tells_where)))
    except BaseException:
        packed = PACKED_NONE  # its type and text still go
    try:
        text = str(error)
    except Exception:
        text = "(its text could not be made)"
    kind = type(error)
    if tells_where:
        story = story_of(error) if _has_story(error) else ""
    else:
        story = "(where, only its own log tells: allow_pickle=False)"
        # The traceback of what telegrad refuses would only show telegrad's own lines.
        refused = isinstance(error, TelegradError)
        reason = f"{kind.__name__}: {text.partition(chr(10))[0]}" if refused else story_of(error)
        _failed_calls.write(f"worker {worker!r}: a call from another worker failed: {printable_lines(_clean(reason))}")
    failure = Failure(
        call_id, worker, f"{kind.__module__}:{kind.__qualname__}", _clean(text), _clean(story), packed.body
    )
    return failure, packed


def _attributes_of(error: BaseException, tells_where: bool) -> dict[str, Any]:
    ours = {_STORY, _TOLD} if tells_where else {_STORY, _TOLD, "__notes__"}  # a note may be the story of another error
    return {name: value for name, value in error.__dict__.items() if name not in ours}


def _args_of(error: BaseException) -> Any:
    """What makes the exception again; a built-in one may keep more than its ``args`` (a file's name, say)."""
    if type(error).__module__ == "builtins":
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and len(reduced) >= 2:
            return reduced[1]
    return error.args


def _user_frames(error: BaseException) -> Any:
    """The traceback below our own frames, which say nothing to the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def let_go_of_frames(error: BaseException) -> None:
    """For an exception that is kept: where it was raised becomes text.

    A traceback holds its frames, these the frames that called them, and all of them their values: the arguments of a
    call, the future that keeps the exception, ourselves.
    """
    error.__dict__[_STORY] = story_of(error)
    forget_tracebacks(error)


def forget_tracebacks(error: BaseException) -> None:
    each: BaseException | None = error
    while each is not None and (each.__traceback__ is not None or each is error):
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


def story_of(error: BaseException) -> str:
    """The traceback as text, below our own frames."""
    kept = error.__dict__.get(_STORY)
    return kept or "".join(traceback.format_exception(type(error), error, _user_frames(error)))


def _has_story(error: BaseException) -> bool:
    """Whether there is more to tell than the type and the text: not of an error that was made and never raised."""
    return bool(error.__traceback__ or error.__cause__ or error.__context__ or _STORY in error.__dict__)


def _is_ours(module: str) -> bool:
    return module.startswith(("telegrad._agent", "telegrad._rref", "telegrad._wire"))


def _clean(text: str) -> str:
    """Text that UTF-8 can carry, of bounded length."""
    return text[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


def rebuild(failure: Failure, details: Any, allow_any: bool, worker: str) -> Exception:
    """The exception to raise here for one that was raised on that worker."""
    story = printable_lines(failure.traceback.rstrip())
    where = f"This was raised on worker {worker!r}" + (f":\n{story}" if story else ".")
    text = f"{printable_lines(failure.text)}\n\n{where}"
    kind = exception_type(failure.type_name, allow_any)
    type_name = printable(failure.type_name.replace(":", "."))
    if kind is None or issubclass(kind, SyntaxError):  # Python prints the file and line that such a one names
        return RemoteError(f"{type_name}: {text}")
    try:
        return _rebuild_as(kind, details, text)
    except Exception:
        return RemoteError(f"{type_name}: {text}")


def _rebuild_as(kind: type[BaseException], details: Any, text: str) -> Exception:
    args, attributes = details if details is not None else ((), {})
    plain = kind.__str__ is BaseException.__str__ or issubclass(kind, TelegradError)
    error = _make(kind if plain else _told(kind), args)
    theirs = [name for name in attributes if not name.startswith(("__", "_telegrad"))]
    error.__dict__.update({name: attributes[name] for name in theirs})
    notes = attributes.get("__notes__")
    for note in notes if isinstance(notes, list) else ():
        error.add_note(printable_lines(str(note)))
    if plain:
        error.args = (text, *args[1:]) if len(args) <= 1 else (text,)
    else:
        error.__dict__[_TOLD] = text
    assert isinstance(error, Exception)
    return error


def _told(kind: type[BaseException]) -> type[BaseException]:
    """A class that makes its text itself (a KeyError, an OSError), with the remote story in that text.

    To everyone else it is the class itself: the same name and module, and caught by the same ``except``.
    """
    names = {"__str__": lambda self: self.__dict__[_TOLD], "__module__": kind.__module__}
    return type(kind.__name__, (_Quiet, kind), names | {"__qualname__": kind.__qualname__})


class _Quiet:
    def __init_subclass__(cls) -> None:
        """Not the user's, who may keep a register of the classes."""


def copy_of(error: E) -> E:
    """The same exception without its traceback; the very same where it cannot be copied."""
    try:
        copy = _make(type(error), _args_of(error))
        copy.__dict__.update(error.__dict__)
        if "__notes__" in copy.__dict__:
            copy.__notes__ = list(error.__notes__)  # each may get more of its own
    except Exception:
        return error
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy


_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _make(kind: type[E], args: Any) -> E:
    if kind.__module__ == "builtins":
        return kind(*args)
    error = _blank(kind, args)
    error.args = args
    return error


def _blank(kind: type[E], args: Any) -> E:
    """An exception of that class without a call of ``__init__``, whose signature is the user's."""
    try:
        return kind.__new__(kind, *args)
    except TypeError:
        # With two built-in bases, as our own errors have, only the one that decides on the layout can make it.
        base: Any = kind
        while base.__flags__ & _MADE_IN_PYTHON:
            base = base.__base__
        made: E = base.__new__(kind, *args)
        return made
