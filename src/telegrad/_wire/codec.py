"""Messages to headers and back.  Reading a header checks every field's type and cannot execute code."""

from __future__ import annotations

from typing import Any

import msgspec

from telegrad._wire.messages import Body, Message
from telegrad.errors import ProtocolError

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)

encode = _encoder.encode


def decode(header: bytes | bytearray | memoryview) -> Message:
    try:
        message: Message = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a header of {len(header):,} bytes is not a message: {error}") from error
    return message


def stream_sizes(message: Message) -> list[int]:
    """The lengths of the buffers that follow the header."""
    body: Body | None = getattr(message, "body", None)
    return [buffer for buffer in body.buffers if type(buffer) is int] if body is not None else []


def complete(body: Body, streamed: list[Any], borrowed: list[Any]) -> list[Any]:
    """All buffers of a body, in order.  ``streamed``: those after the header; ``borrowed``: those in shared memory."""
    if not streamed and not borrowed:
        return list(body.buffers)
    following, shared = iter(streamed), iter(borrowed)
    try:
        return [
            buffer if type(buffer) is bytearray else next(following if type(buffer) is int else shared)
            for buffer in body.buffers
        ]
    except StopIteration:
        raise ProtocolError("a message names more buffers than came with it") from None
