"""Finds the few inputs, of the many that went out, after which a victim fails; and sends such a stream again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from telegrad._transport.shared_memory import Proof
from telegrad._transport.sockets import connect_unix

from .attacker import Batch, VictimFailed, VictimProcess
from .mutate import Input
from .victim import FIRST_HOSTILE, HELLO

Stream = list[bytes]  # inputs of one connection, in order

_SECONDS = 5.0


class Saved(msgspec.Struct):
    """A stream as it is kept in a file."""

    allow_pickle: bool
    inputs: Stream

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.msgpack.encode(self))

    @staticmethod
    def read(path: Path) -> Saved:
        return msgspec.msgpack.decode(path.read_bytes(), type=Saved)


def replay(proof: Proof, saved: Saved) -> str:
    """Sends the stream to a new victim; why it failed, or nothing."""
    victim = VictimProcess(proof, saved.allow_pickle)
    try:
        for data in saved.inputs:
            with connect_unix(victim.address, _SECONDS) as sock:
                sock.sendall(HELLO.pack(FIRST_HOSTILE))
                _send_and_wait(sock, data)
        victim.check()
        victim.check_log()
        return ""
    except (VictimFailed, OSError) as error:
        return str(error) if victim.is_alive() else victim.story()
    finally:
        victim.close()


def _send_and_wait(sock: socket.socket, data: bytes) -> None:
    """Until the victim has closed in its turn, or says nothing any more."""
    sock.settimeout(_SECONDS)
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass


def minimize(proof: Proof, batches: Sequence[Batch], allow_pickle: bool, tries: int = 60) -> Saved | None:
    """The last batches alone, then halves of them.  None: it takes more than what one connection sent."""
    left = [tries]

    def fails(inputs: Stream) -> bool:
        left[0] -= 1
        return left[0] >= 0 and bool(replay(proof, Saved(allow_pickle, inputs)))

    for batch in list(batches)[: -tries // 2 : -1]:
        if not batch.dialled and fails([_joined(batch.inputs)]):
            return Saved(allow_pickle, [_joined(_shrink(batch.inputs, lambda part: fails([_joined(part)])))])
    return None


def _joined(inputs: Sequence[Input]) -> bytes:
    return b"".join(each.raw for each in inputs)


def _shrink(inputs: list[Input], fails: Callable[[list[Input]], bool]) -> list[Input]:
    """Leaves out what is not needed, in ever smaller pieces."""
    size = len(inputs) // 2
    while size:
        at = 0
        while at < len(inputs) and len(inputs) > 1:
            rest = inputs[:at] + inputs[at + size :]
            if rest and fails(rest):
                inputs = rest
            else:
                at += size
        size //= 2
    return inputs
