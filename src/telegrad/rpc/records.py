"""The signed records of workers in the store: encoding, checking field by field, and the keys of a job."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from telegrad._agent.peers import WorkerRecord
from telegrad._ids import MAX_WORKERS
from telegrad._text import printable
from telegrad._transport.dial import Address
from telegrad._transport.handshake import JOIN_NONCE
from telegrad.errors import AuthenticationError, RendezvousError, UsageError
from telegrad.rpc.options import check_name

SIGNATURE_BYTES = hashlib.sha256().digest_size
_records = msgspec.msgpack.Decoder(WorkerRecord)


def sign(key: bytes, place: str, data: bytes) -> bytes:
    """``place``: the key that the record is stored under."""
    return hmac.digest(key, b"telegrad record\0" + place.encode() + b"\0" + data, "sha256")


def link_key(key: bytes, records: Sequence[WorkerRecord] | None) -> bytes:
    """The key that links authenticate with.

    In a job of fixed size it depends on the records of all workers, and so on each one's nonce.  Signed records that
    were copied from another job with the same secret give another key, and links between the two jobs fail; so do
    links between workers that were shown different records.  In a job of open size the records are not known in
    advance (``None``); there the handshake binds the nonces of its two workers.
    """
    return hmac.digest(key, b"telegrad links" + (b"" if records is None else _members(records)), "sha256")


def digest_of(key: bytes, records: Sequence[WorkerRecord]) -> str:
    """The digest with which rank 0 confirms which workers it has met."""
    return hmac.digest(key, b"telegrad met" + _members(records), "sha256").hex()


def _members(records: Sequence[WorkerRecord]) -> bytes:
    return msgspec.msgpack.encode(sorted(records, key=lambda record: record.worker_id))


def read_record(data: bytes, rank: int) -> WorkerRecord:
    """Decodes and checks the record that was found under a rank."""
    try:
        record = _records.decode(data)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's errors, and text that is not UTF-8
        raise RendezvousError(
            f"malformed record of rank {rank}: {printable(str(error))}. Does every worker run the same version of "
            "telegrad?"
        ) from error
    if record.worker_id != rank:
        raise AuthenticationError(f"the record of rank {rank} is that of worker {record.worker_id}")
    try:
        check_name(record.name)
    except UsageError as error:
        raise RendezvousError(f"malformed record of rank {rank}: {printable(str(error))}") from None
    wrong = [name for name, right in _well_formed(record).items() if not right]
    if wrong:
        raise RendezvousError(
            f"malformed record of rank {rank} (worker {record.name!r}): bad {', '.join(wrong)}. Does every worker run "
            "the same version of telegrad?"
        )
    return record


def _well_formed(record: WorkerRecord) -> dict[str, bool]:
    return {
        "pid": 0 <= record.pid < 1 << 31,
        "host": record.host.isprintable() and len(record.host) <= 255,
        "addresses": len(record.addresses) <= 16 and all(map(_is_address, record.addresses)),
        "shared_memory_fd": -1 <= record.shared_memory_fd < 1 << 31,
        "shared_memory_token": len(record.shared_memory_token) <= 64,
        "world_size": record.world_size == 0 or record.worker_id < record.world_size <= MAX_WORKERS,
        "nonce": len(record.nonce) == JOIN_NONCE,
    }


def _is_address(address: Address) -> bool:
    if not address.host.isprintable() or not address.host.isascii():
        return False
    if address.kind == "unix":
        return 2 <= len(address.host) <= 107 and address.port == 0 and not address.fingerprint
    pinned = len(address.fingerprint) == hashlib.sha256().digest_size
    return 1 <= len(address.host) <= 255 and 1 <= address.port <= 65535 and pinned


def check_names(records: Sequence[WorkerRecord]) -> None:
    ranks: dict[str, int] = {}
    for record in records:
        first = ranks.setdefault(record.name, record.worker_id)
        if first != record.worker_id:
            raise RendezvousError(
                f"the name {record.name!r} is already taken by rank {first}: every worker needs its own, and rank "
                f"{record.worker_id} has the same"
            )


def check_on_this_host(record: WorkerRecord, host: str) -> None:
    """Raises unless a worker of a job without a secret is on this host and listens on a Unix socket.

    Other users can write to the store of such a job.  On a Unix socket the kernel reports the user of the other end.
    """
    if record.host != host:
        raise RendezvousError(
            f"worker {record.name!r} is on another host and this job has no secret: set the same TELEGRAD_SECRET on "
            "every worker (and TELEGRAD_HOST where the address is not found)"
        )
    others = [address for address in record.addresses if address.kind != "unix"]
    if others:
        raise RendezvousError(
            f"worker {record.name!r} listens on {others[0]}, and this job has no secret: set the same TELEGRAD_SECRET "
            "on every worker"
        )
