"""How the workers of a job find each other.

1. Each worker claims its rank and its name in the store; a second claimant is told who has it.
2. Without a secret the store hands all of them one random token instead, and they serve this host only.
3. Each opens its sockets, then publishes a record of itself, signed with the secret: where it listens, and the
   fingerprint of its certificate.  A record with a wrong signature is refused, so a stranger who can write to the store
   cannot make himself a worker.
4. Each waits for the records of all ranks, and can say which ones are missing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from telegrad._torch import DistNetworkError, Store
from telegrad.agent.peers import WorkerRecord
from telegrad.errors import AuthenticationError, RendezvousError
from telegrad.rpc.strangers import Strangers
from telegrad.transport.handshake import derive_key

log = logging.getLogger("telegrad.rpc")

_SILENT_SECONDS = 10.0  # after which a worker that waits for others says for whom
_SIGNATURE = hashlib.sha256().digest_size
_records = msgspec.msgpack.Decoder(WorkerRecord)


@dataclass
class Meeting:
    """The store of one job, as one worker sees it."""

    store: Store
    rank: int
    name: str
    world_size: int | None
    timeout: float
    mark: str = field(default_factory=lambda: secrets.token_hex(8))  # by which a worker knows its own claim again

    strangers: Strangers | None = None
    missing: list[int] = field(default_factory=list)  # the ranks that had not come at the last look
    _claimed: list[str] = field(default_factory=list)

    def claim(self) -> None:
        """Steps 1: takes rank and name, or says who has them."""
        mark = f"{self.name} {self.mark}"
        holder = self._once(f"rank/{self.rank}", mark)
        if holder == mark:
            self._claimed.append(f"rank/{self.rank}")
            if self.store.check([f"refused/{self.rank}"]):  # at an earlier try
                _quietly(lambda: self.store.delete_key(f"refused/{self.rank}"))
        if holder != mark:
            raise RendezvousError(
                f"rank {self.rank} is already taken by worker {holder.split()[0]!r}: two workers have the same rank, "
                "or two jobs share one rendezvous (choose another port or file)"
            )
        holder = self._once(f"name/{self.name}", str(self.rank))
        if holder != str(self.rank):
            raise RendezvousError(
                f"the name {self.name!r} is already taken by rank {holder}: every worker needs its own"
            )
        self._claimed.append(f"name/{self.name}")
        mine = "open" if self.world_size is None else "closed"
        theirs = self._once("size", mine)
        if theirs != mine:
            raise RendezvousError(
                f"other workers of this job were given {'no' if theirs == 'open' else 'a'} world size, and this one "
                f"{'a' if theirs == 'open' else 'none'}: give all the same, or none to any"
            )

    def give_up(self, reason: str) -> None:
        """Frees what was claimed, for another try, and tells those who wait for this rank why it did not come."""
        if self._claimed:
            _quietly(lambda: self.store.set(f"refused/{self.rank}", f"{self.name!r}: {reason}"))
        self.leave()

    def key(self, secret: bytes | None) -> bytes:
        """Step 2: the key with which the job's workers know each other."""
        job = self._once("job", secrets.token_hex(16))
        mode = self._once("secret", "yes" if secret else "no")
        if mode != ("yes" if secret else "no"):
            there, here = ("have", "this one has not") if mode == "yes" else ("have not", "this one has")
            raise AuthenticationError(
                f"other workers of this job {there} a secret and {here}: set the same TELEGRAD_SECRET on every worker"
            )
        return derive_key(secret or self._once("token", secrets.token_hex(32)).encode(), job)

    def publish(self, record: WorkerRecord, key: bytes) -> None:
        """Step 3."""
        data = msgspec.msgpack.encode(record)
        self.store.set(f"record/{self.rank}", (_sign(key, data) + data).hex())

    def wait_for_all(self, key: bytes) -> list[WorkerRecord]:
        """Step 4."""
        assert self.world_size is not None
        records: dict[int, WorkerRecord] = {}
        deadline = time.monotonic() + self.timeout
        pause = 0.002
        self.missing[:] = range(self.world_size)
        tell_at = time.monotonic() + _SILENT_SECONDS
        # Asking again and again, because the stores complain on the terminal when a wait of theirs runs out.
        while True:
            for rank in list(self.missing):
                record = self._read(rank, key)
                if record is not None:
                    records[rank] = self._check_size(record)
                    self.missing.remove(rank)
                elif self.store.check([f"refused/{rank}"]):
                    raise RendezvousError(f"rank {rank} could not join: {self.store.get(f'refused/{rank}').decode()}")
            if not self.missing:
                return [records[rank] for rank in sorted(records)]
            if self.strangers is not None:
                self.strangers.check(self.missing)
            if time.monotonic() > deadline:
                raise self._nobody_came([records[rank] for rank in sorted(records)])
            if time.monotonic() > tell_at:
                tell_at += _SILENT_SECONDS
                log.warning(
                    "worker %r waits for %s of %d to join, until %g s are over",
                    self.name,
                    _ranks(self.missing),
                    self.world_size,
                    self.timeout,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _check_size(self, record: WorkerRecord) -> WorkerRecord:
        if record.world_size != self.world_size:
            raise RendezvousError(
                f"worker {record.name!r} expects a job of {record.world_size or 'any number of'} workers, and this one "
                f"one of {self.world_size}: give all the same world_size"
            )
        return record

    def find(self, worker: str | int, key: bytes) -> WorkerRecord | None:
        """The record of a worker that joined later, by name or rank (a job of open size)."""
        try:
            rank = worker
            if isinstance(rank, str):
                if not self.store.check([f"name/{worker}"]):
                    return None
                rank = int(self.store.get(f"name/{worker}"))
                self.store.wait([f"record/{rank}"], timedelta(seconds=self.timeout))
            return self._read(rank, key)
        except DistNetworkError as error:
            raise RendezvousError(
                f"cannot find out about worker {worker!r}: the rendezvous is gone, which rank 0 or the launcher served"
            ) from error

    def leave(self) -> None:
        """Frees rank and name."""
        if f"rank/{self.rank}" in self._claimed:
            _quietly(lambda: self.store.set(f"record/{self.rank}", ""))  # not deleted: a reader would wait for it
        for part in self._claimed:
            _quietly(lambda part=part: self.store.delete_key(part))  # type: ignore[misc]

    def _read(self, rank: int, key: bytes) -> WorkerRecord | None:
        """The record of a rank, once it has one."""
        if not self.store.check([f"record/{rank}"]):
            return None
        data = bytes.fromhex(self.store.get(f"record/{rank}").decode())
        if not data:
            return None  # it gave up
        signature, data = data[:_SIGNATURE], data[_SIGNATURE:]
        if not hmac.compare_digest(signature, _sign(key, data)):
            raise AuthenticationError(
                f"the record of rank {rank} is signed with another secret: set the same TELEGRAD_SECRET on every worker"
            )
        return _records.decode(data)

    def _once(self, key: str, value: str) -> str:
        """Sets a key that nobody has set yet; returns what it is now."""
        now: str = self.store.compare_set(key, "", value).decode()
        return now

    def _nobody_came(self, records: list[WorkerRecord]) -> RendezvousError:
        assert self.world_size is not None
        came = ", ".join(f"{record.name!r} ({record.worker_id})" for record in records) or "nobody"
        missing = sorted(set(range(self.world_size)) - {record.worker_id for record in records})
        return RendezvousError(
            f"{_ranks(missing)} of {self.world_size} did not come "
            f"within {self.timeout:g} s; here are {came}. Do all workers run, with the same address and world size?"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, b"telegrad record" + data, "sha256")


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError:
        pass
