"""The handshake: both sides prove that they hold the job's secret before any of their other bytes is processed.

There are no sockets, threads or clocks here: ``feed`` takes the peer's bytes and returns bytes to send.

::

    client                                             server
    (1) HELLO: nonce, server's id, own identity ─────▶
                                                ◀─────  (2) CHALLENGE: nonce
    (3) PROOF: MAC over 1 and 2                 ─────▶
                                                ◀─────  (4) WELCOME: MAC over 1, 2 and 3, own identity
    done: reads (4) and not a byte more                 done: sent (4)

Every MAC is HMAC-SHA256 under a key made of secret and job, over the role, the *binding* (the fingerprints of both
TLS certificates, empty without TLS) and every byte exchanged so far.  So a MAC is not valid in another connection (two
fresh nonces), when reflected to its sender (the role), for another pair of workers (the identities), or through a man
in the middle with a certificate of its own (the binding).

**The client proves first.**  A peer that receives a MAC can test guesses of the secret against it offline.  A server is
reachable from the whole network, so it sends only random bytes, and not its name, before the client has authenticated.
A client connects only to an address that it was given.

Each message begins with 13 bytes that are the same in all versions: magic, version, kind, length.  So another protocol
is detected at its first wrong byte, and a peer with another version gets a clear error.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from telegrad._ids import MAX_WORKERS
from telegrad.errors import AuthenticationError, ProtocolError, UsageError

__all__ = ["ClientHandshake", "Handshake", "Identity", "ServerHandshake", "derive_key"]

MAGIC = b"\x93tlgrd\r\n"
VERSION = 2
MAX_NAME = 128
MAX_BUFFERED = 256  # longer than the longest message

_HEADER = struct.Struct("!8sHBH")
_WORKER = struct.Struct("!H")
_NONCE = 32
_MAC = 32
JOIN_NONCE = 16
_IDENTITY = range(_WORKER.size + JOIN_NONCE + 1, _WORKER.size + JOIN_NONCE + MAX_NAME + 1)


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


_BODY_SIZES = {
    Kind.HELLO: range(_NONCE + _WORKER.size + _IDENTITY.start, _NONCE + _WORKER.size + _IDENTITY.stop),
    Kind.CHALLENGE: range(_NONCE, _NONCE + 1),
    Kind.PROOF: range(_MAC, _MAC + 1),
    Kind.WELCOME: range(_MAC + _IDENTITY.start, _MAC + _IDENTITY.stop),
    Kind.REFUSAL: range(1, 2),
}


class Refusal(enum.IntEnum):
    """Why the server closes.  A number, not a text: text of an unauthenticated peer must not go into the log."""

    VERSION = 1
    SECRET = 2


_OTHER_SECRET = (
    "the peer holds another secret, or belongs to another job: set the same TELEGRAD_SECRET and job on every worker"
)

#: The first bytes of other protocols, for the text in the log.
_OTHER_PROTOCOLS = (
    (b"\x16\x03", "TLS, where this port speaks without: set the same TELEGRAD_SECRET on every worker"),
    (b"\x15\x03", "a TLS alert: the peer expects TLS: set the same TELEGRAD_SECRET on every worker"),
    (b"GET ", "HTTP"),
    (b"POST", "HTTP"),
    (b"HEAD", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"OPTI", "HTTP"),
    (b"HTTP", "an HTTP answer"),
    (b"PRI ", "HTTP/2"),
    (b"SSH-", "SSH"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
)


@dataclass(frozen=True)
class Identity:
    """The identity that a worker claims.  ``nonce``: the random bytes in its signed record, drawn when it joined."""

    worker_id: int
    name: str
    nonce: bytes = bytes(JOIN_NONCE)

    def __post_init__(self) -> None:
        if not 0 <= self.worker_id < MAX_WORKERS:
            raise UsageError(f"worker id {self.worker_id} is not in 0..{MAX_WORKERS - 1}")
        try:
            size = len(self.name.encode())
        except UnicodeEncodeError as error:
            raise UsageError(f"worker name {self.name!r} is not valid Unicode") from error
        if not 1 <= size <= MAX_NAME:
            raise UsageError(f"a worker's name takes 1 to {MAX_NAME} bytes, this one {size}: {self.name[:32]!r}")
        if len(self.nonce) != JOIN_NONCE:
            raise UsageError(f"a worker's nonce has {JOIN_NONCE} bytes, not {len(self.nonce)}")

    def encode(self) -> bytes:
        return _WORKER.pack(self.worker_id) + self.nonce + self.name.encode()

    @classmethod
    def decode(cls, data: bytes) -> Identity:
        try:
            nonce, name = data[_WORKER.size :][:JOIN_NONCE], data[_WORKER.size + JOIN_NONCE :]
            return cls(_WORKER.unpack_from(data)[0], name.decode(), nonce)
        except (UnicodeDecodeError, UsageError) as error:
            raise ProtocolError("the peer's name is not UTF-8 text") from error


def derive_key(secret: bytes, job: str) -> bytes:
    """Makes the handshake's key.  It is stretched (8 ms, once per process) to make guessing a weak secret expensive."""
    return hashlib.pbkdf2_hmac("sha256", secret, b"telegrad handshake\0" + job.encode(), 20_000)


def _message(kind: Kind, body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def _describe(first: bytes) -> str:
    for prefix, name in _OTHER_PROTOCOLS:
        if first.startswith(prefix):
            return f"looks like {name}"
    if len(first) >= 8 and first[0] and not any(first[1:8]):
        return "looks like TensorPipe: a torch.distributed.rpc worker at this port?"
    return f"begins with {first[:8].hex(' ')}"


class Handshake:
    """The part that both roles share: the buffer, the checks of the header, the transcript."""

    role: str

    def __init__(self, key: bytes, me: Identity, binding: bytes, awaits: Kind) -> None:
        self._key = key
        self._me = me
        self._binding = binding
        self._awaits: Kind | None = awaits
        self._buffer = bytearray()
        self._transcript = b""
        self.done = False
        self.peer: Identity | None = None
        self.farewell = b""  #: what to send before closing, once ``feed`` has raised

    def __repr__(self) -> str:
        state = "done" if self.done else f"waits for {self._awaits.name}" if self._awaits else "failed"
        return f"<{self.role} handshake of {self._me.name!r}: {state}>"

    @property
    def waits_for(self) -> str:
        """What the peer has not sent yet, for the text of a timeout."""
        return f"its {self._awaits.name}" if self._awaits else "nothing"

    @property
    def wants(self) -> int:
        """Maximum number of bytes to read next."""
        raise NotImplementedError

    def start(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of the peer; returns bytes to send.  After it has raised, the connection must be closed."""
        if self._awaits is None:
            self.done, self.peer = False, None
            raise ProtocolError(f"{len(data)} bytes after the end of the handshake")
        try:
            return self._feed(data)
        except BaseException:
            self._awaits, self.peer = None, None
            self._buffer.clear()
            raise

    def _feed(self, data: bytes) -> bytes:
        buffer = self._buffer
        buffer += data[: MAX_BUFFERED - len(buffer)]
        if not MAGIC.startswith(buffer[: len(MAGIC)]):
            raise ProtocolError(f"not telegrad's protocol: {_describe(bytes(buffer))}")
        if len(buffer) >= len(MAGIC) + 2:
            version = int.from_bytes(buffer[len(MAGIC) : len(MAGIC) + 2], "big")
            if version != VERSION:
                self.farewell = self._refusal(Refusal.VERSION)
                raise ProtocolError(
                    f"the peer speaks version {version} of the protocol, this worker version {VERSION}: "
                    "install the same telegrad everywhere"
                )
        if len(buffer) < _HEADER.size:
            return b""
        _, _, kind, size = _HEADER.unpack_from(buffer)
        self._check(kind, size)
        end = _HEADER.size + size
        if len(buffer) < end:
            return b""
        if len(buffer) > end:
            raise ProtocolError(f"more bytes than its {Kind(kind).name}, before it was answered")
        message = bytes(buffer)
        buffer.clear()
        return self._take(Kind(kind), message, message[_HEADER.size :])

    def _check(self, kind: int, size: int) -> None:
        assert self._awaits is not None
        if kind != self._awaits and not (kind == Kind.REFUSAL and self.role == "client"):
            name = Kind(kind).name if kind in _BODY_SIZES else f"kind {kind}"
            raise ProtocolError(f"a message {name} where {self._awaits.name} belongs")
        if size not in _BODY_SIZES[Kind(kind)]:
            raise ProtocolError(f"a {Kind(kind).name} of {size} bytes")

    def _refusal(self, reason: Refusal) -> bytes:
        return _message(Kind.REFUSAL, bytes([reason])) if self.role == "server" else b""

    def _mac(self, role: str, more: bytes = b"") -> bytes:
        parts = f"telegrad {role}\0".encode(), bytes([len(self._binding)]), self._binding, self._transcript, more
        return hmac.digest(self._key, b"".join(parts), "sha256")

    def _take(self, kind: Kind, message: bytes, body: bytes) -> bytes:
        raise NotImplementedError


class ClientHandshake(Handshake):
    """The side that dialled."""

    role = "client"

    def __init__(self, key: bytes, me: Identity, expect: Identity, binding: bytes = b"") -> None:
        super().__init__(key, me, binding, Kind.CHALLENGE)
        self._expect = expect

    @property
    def wants(self) -> int:
        """Exactly the missing bytes: the server's first frame may follow the WELCOME, and is not for the handshake."""
        if self._awaits is None:
            return 0
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size - len(self._buffer)
        size: int = _HEADER.unpack_from(self._buffer)[3]
        return _HEADER.size + size - len(self._buffer)

    def start(self) -> bytes:
        body = secrets.token_bytes(_NONCE) + _WORKER.pack(self._expect.worker_id) + self._me.encode()
        self._transcript = _message(Kind.HELLO, body)  # (1)
        return self._transcript

    def _take(self, kind: Kind, message: bytes, body: bytes) -> bytes:
        if kind is Kind.REFUSAL:
            if body[0] == Refusal.SECRET:
                raise AuthenticationError(f"refused: {_OTHER_SECRET}")
            raise ProtocolError(f"refused by the peer, reason {body[0]}: its log says more")
        if kind is Kind.CHALLENGE:
            self._transcript += message  # (2)
            proof = _message(Kind.PROOF, self._mac("client"))  # (3)
            self._transcript += proof
            self._awaits = Kind.WELCOME
            return proof
        mac, who = body[:_MAC], body[_MAC:]  # (4)
        if not hmac.compare_digest(mac, self._mac("server", who)):
            raise AuthenticationError(f"the worker that was dialled could not authenticate: {_OTHER_SECRET}")
        peer = Identity.decode(who)
        if peer != self._expect:
            raise AuthenticationError(
                f"dialled worker {self._expect.worker_id} and reached worker {peer.worker_id} ({peer.name!r}), or that "
                "worker of another job: the address is out of date, or two workers were given the same one"
            )
        self._awaits, self.peer, self.done = None, peer, True
        return b""


class ServerHandshake(Handshake):
    """The side that listens."""

    role = "server"

    def __init__(self, key: bytes, me: Identity, binding: bytes = b"") -> None:
        super().__init__(key, me, binding, Kind.HELLO)
        self._wanted = -1
        self._claimed: Identity | None = None

    @property
    def wants(self) -> int:
        """No limit but that of the buffer: a client that sends more than it may is refused."""
        return MAX_BUFFERED - len(self._buffer) if self._awaits else 0

    def _take(self, kind: Kind, message: bytes, body: bytes) -> bytes:
        if kind is Kind.HELLO:  # (1)
            self._wanted = _WORKER.unpack_from(body, _NONCE)[0]
            self._claimed = Identity.decode(body[_NONCE + _WORKER.size :])
            challenge = _message(Kind.CHALLENGE, secrets.token_bytes(_NONCE))  # (2)
            self._transcript = message + challenge
            self._awaits = Kind.PROOF
            return challenge
        if not hmac.compare_digest(body, self._mac("client")):  # (3)
            self.farewell = self._refusal(Refusal.SECRET)
            raise AuthenticationError(_OTHER_SECRET)
        self._transcript += message
        who = self._me.encode()
        welcome = _message(Kind.WELCOME, self._mac("server", who) + who)  # (4)
        if self._wanted != self._me.worker_id:
            self.farewell = welcome  # the client has authenticated, so it may learn which worker it reached
            raise AuthenticationError(
                f"worker {self._claimed.worker_id if self._claimed else '?'} looked for worker {self._wanted}, "
                f"this is worker {self._me.worker_id}"
            )
        self._awaits, self.peer, self.done = None, self._claimed, True
        return welcome
