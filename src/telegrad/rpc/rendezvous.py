"""How the workers of a job find each other.

1. Each worker claims its rank and its name in the store; for a second claimant, the error names the first one.
2. Without a secret the workers share a random token from the store instead, and all must be on one host.
3. Each publishes a record of itself, signed with the secret: where it listens, and the fingerprint of its certificate.
   The signature covers the key that the record is stored under.
4. Each waits for the records of all ranks; the error of a timeout names the missing ones.

**Rounds.**  Under torchrun the store, and what dead workers wrote to it, outlives a restart, and nothing that the
environment says is common to all workers of one attempt: each agent counts its own restarts.  So rank 0 opens a round
under a random name when it joins, and the others meet it there.  The name that a worker finds may be that of an earlier
round, whose rank 0 is dead.  A worker has therefore joined only when rank 0 has confirmed the round, with a digest that
covers this worker's nonce; while it waits, it looks for a newer round.  Within a round the newest process of a rank
counts, so there are no claims.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from telegrad._agent.peers import WorkerRecord
from telegrad._ids import MAX_WORKERS
from telegrad._text import printable
from telegrad._transport.handshake import derive_key
from telegrad.errors import AuthenticationError, RendezvousError
from telegrad.rpc.foreign_rpc import TorchWorkers
from telegrad.rpc.records import SIGNATURE_BYTES, check_names, check_on_this_host, digest_of, read_record, sign
from telegrad.rpc.stores import JobStore, StoreGoneError, malformed

log = logging.getLogger("telegrad.rpc")

_SILENT_SECONDS = 10.0  # between two log lines of a worker that waits for others
_TOKEN = re.compile(r"[0-9a-f]{16,64}")
_ROUND = "round"  # the key with the name of the newest round


class NewRoundError(RendezvousError):
    """Rank 0 has opened another round than the one in which this worker waits."""


@dataclass
class Meeting:
    """One worker's part in the rendezvous of a job."""

    store: JobStore
    rank: int
    name: str
    world_size: int | None
    timeout: float
    mark: str = field(default_factory=lambda: secrets.token_hex(8))  # by which a worker recognises its own claim

    torch_workers: TorchWorkers | None = None
    missing: list[int] = field(default_factory=list)  # the ranks without a record when the store was last read
    host: str | None = None  # where all workers must be, in a job without a secret
    rounds: JobStore | None = None  # where rank 0 announces rounds, under torchrun
    round: str = ""

    _claimed: list[str] = field(default_factory=list)
    _joined: bool = False
    _refused_before: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def enter_round(self, rounds: JobStore) -> None:
        """Under torchrun, before step 1: finds the round in which the workers meet.  Rank 0 opens a new one."""
        self.rounds = rounds
        if self.rank == 0:
            self.round = secrets.token_hex(8)
            rounds.set(_ROUND, self.round)
        else:
            wait = _Wait(self.timeout, self._deadline, lambda: f"worker {self.name!r} waits for rank 0")
            while (found := read_round(rounds)) is None or rounds.under(found).has("met"):
                if not wait.pause():
                    self.missing[:] = [0]
                    raise self._not_met({})
            self.round = found
        self.store = rounds.under(self.round)

    def claim(self) -> None:
        """Step 1: claims rank and name, or raises an error that names their holder."""
        if self.rounds is None:
            self._claim_rank()
            self._claim_name()
        self._joined = True
        if self.store.get(f"refused/{self.rank}") is not None:  # at an earlier try
            _quietly(lambda: self.store.delete(f"refused/{self.rank}"))
        if self.rounds is not None and self.rank != 0:
            # The claims are of workers of this round.  When it is over, rank 0 opens a new one.
            ranks = range(self.world_size or 0)
            self._refused_before = {rank for rank in ranks if self.store.get(f"refused/{rank}") is not None}
        mine = "open" if self.world_size is None else "closed"
        theirs = self.store.set_once("size", mine)
        if theirs not in ("open", "closed"):
            raise malformed("size", theirs)
        if theirs != mine:
            raise RendezvousError(
                f"other workers of this job were given {'no' if theirs == 'open' else 'a'} world size, and this one "
                f"{'a' if theirs == 'open' else 'none'}: give all the same, or none to any"
            )

    def _claim_rank(self) -> None:
        mark = f"{self.name} {self.mark}"
        holder = self.store.set_once(f"rank/{self.rank}", mark)
        if holder != mark:
            raise RendezvousError(
                f"rank {self.rank} is already taken by worker '{printable(holder.partition(' ')[0])}': two workers "
                "have the same rank, or two jobs share one rendezvous (choose another port or file)"
            )
        self._claimed.append(f"rank/{self.rank}")

    def _claim_name(self) -> None:
        holder = self.store.set_once(f"name/{self.name}", str(self.rank))
        if holder != str(self.rank):
            raise RendezvousError(
                f"the name {self.name!r} is already taken by rank {printable(holder)}: every worker needs its own"
            )
        self._claimed.append(f"name/{self.name}")

    def give_up(self, reason: str) -> None:
        """Frees the claims for another try, and writes the reason, which workers that wait for this rank will raise."""
        if self._joined or self._claimed:
            _quietly(lambda: self.store.set(f"refused/{self.rank}", f"{self.name!r}: {reason}"))
        self.leave()

    def key(self, secret: bytes | None) -> bytes:
        """Step 2: the key that signs the records of the job's workers."""
        job = self._token("job", 16)
        mode = self.store.set_once("secret", "yes" if secret else "no")
        if mode not in ("yes", "no"):
            raise malformed("secret", mode)
        if mode != ("yes" if secret else "no"):
            there, here = ("have", "this one has not") if mode == "yes" else ("have not", "this one has")
            raise AuthenticationError(
                f"other workers of this job {there} a secret and {here}: set the same TELEGRAD_SECRET on every worker"
            )
        return derive_key(secret or self._token("token", 32).encode(), job)

    def publish(self, record: WorkerRecord, key: bytes) -> None:
        """Step 3."""
        place = f"record/{self.rank}"
        data = msgspec.msgpack.encode(record)
        self.store.set(place, (sign(key, place, data) + data).hex())

    def wait_for_all(self, key: bytes) -> list[WorkerRecord]:
        """Step 4: the records of all ranks, in order."""
        assert self.world_size is not None
        met: list[WorkerRecord] | None = None
        self.missing[:] = range(self.world_size)
        # Polls: torch's stores print to the terminal when their own wait times out.
        wait = _Wait(
            self.timeout,
            self._deadline,
            lambda: f"worker {self.name!r} waits for {_ranks(self.missing)} of {self.world_size}",
        )
        records: dict[int, WorkerRecord] = {}
        while True:
            if self.rounds is None:
                met = self._look(records, key)
            elif self.rank == 0:
                met = self._look_and_confirm(records, key)
            else:
                met = self._look_for_confirmation(key)
            if met is not None:
                return met
            if self.torch_workers is not None and self.missing:
                self.torch_workers.check(self.missing)
            if not wait.pause():
                raise self._not_met(records)

    def _look(self, records: dict[int, WorkerRecord], key: bytes) -> list[WorkerRecord] | None:
        """Adds the records that were published; returns them when they are complete."""
        for rank in list(self.missing):
            record = self._read(rank, key)
            if record is not None:
                records[rank] = self._check_size(record)
                self.missing.remove(rank)
            else:
                self._check_refusal(rank)
        if self.missing:
            return None
        met = [records[rank] for rank in sorted(records)]
        check_names(met)
        return met

    def _look_and_confirm(self, records: dict[int, WorkerRecord], key: bytes) -> list[WorkerRecord] | None:
        """On rank 0 of a round: also confirms to the others which workers are in it."""
        met = self._look(records, key)
        if met is None:
            return None
        if [self._read(record.worker_id, key) for record in met] != met:  # a worker was restarted since
            records.clear()
            self.missing[:] = range(len(met))
            return None
        self.store.set("met", digest_of(key, met))
        return met

    def _look_for_confirmation(self, key: bytes) -> list[WorkerRecord] | None:
        """On the other ranks of a round: uses the records only after rank 0, which is alive then, confirmed them."""
        assert self.rounds is not None
        assert self.world_size is not None
        if read_round(self.rounds) != self.round:
            raise NewRoundError("rank 0 has opened another round of the rendezvous")
        ranks = range(self.world_size)
        self.missing[:] = [rank for rank in ranks if not self.store.get(f"record/{rank}")]
        for rank in self.missing:
            self._check_refusal(rank)
        confirmed = self.store.get("met")
        if self.missing or confirmed is None:
            return None
        met = [record for rank in ranks if (record := self._read(rank, key)) is not None]
        return met if confirmed == digest_of(key, met) else None

    def _check_refusal(self, rank: int) -> None:
        reason = self.store.get(f"refused/{rank}")
        if reason is not None and rank not in self._refused_before:
            raise RendezvousError(f"rank {rank} could not join: {printable(reason, 400)}")

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
            if isinstance(worker, int):
                return self._read(worker, key)
            found = self.store.get(f"name/{worker}")
            if found is None:
                return None
            if not found.isascii() or not found.isdecimal() or len(found) > 9 or int(found) >= MAX_WORKERS:
                raise malformed(f"name/{worker}", found)
            deadline = time.monotonic() + self.timeout
            wait = _Wait(self.timeout, deadline, lambda: f"worker {self.name!r} waits for worker {worker!r}")
            while (record := self._read(int(found), key)) is None:
                if not wait.pause():
                    return None
        except StoreGoneError as error:
            raise RendezvousError(
                f"cannot find out about worker {worker!r}: the rendezvous is gone, which rank 0 or the launcher served"
            ) from error
        if record.name != worker:
            raise AuthenticationError(
                f"the rendezvous names rank {found} as worker {worker!r}, but that worker is called {record.name!r}"
            )
        return record

    def leave(self) -> None:
        """Frees rank and name."""
        if self._joined:
            _quietly(lambda: self.store.set(f"record/{self.rank}", ""))  # not deleted: a reader would wait for it
        for part in self._claimed:
            _quietly(lambda part=part: self.store.delete(part))  # type: ignore[misc]
        self.store.close()

    def _read(self, rank: int, key: bytes) -> WorkerRecord | None:
        """The record of a rank; None if it has none yet."""
        place = f"record/{rank}"
        text = self.store.get(place)
        if not text:
            return None  # it has not joined, or gave up
        try:
            signed = bytes.fromhex(text)
        except ValueError:
            raise malformed(place, text) from None
        signature, data = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, sign(key, place, data)):
            raise AuthenticationError(
                f"the record of rank {rank} is signed with another secret: set the same TELEGRAD_SECRET on every worker"
            )
        record = read_record(data, rank)
        if self.host is not None:
            check_on_this_host(record, self.host)
        return record

    def _token(self, key: str, size: int) -> str:
        """A random token that all workers share: that of the first worker that wrote one."""
        found = self.store.set_once(key, secrets.token_hex(size))
        if not _TOKEN.fullmatch(found):
            raise malformed(key, found)
        return found

    def _not_met(self, records: dict[int, WorkerRecord]) -> RendezvousError:
        assert self.world_size is not None
        if not self.missing:
            return RendezvousError(
                f"rank 0 did not confirm this process as rank {self.rank} within {self.timeout:g} s. Was the job "
                "restarted without its rank 0, or do two processes have the same rank?"
            )
        names = ", ".join(f"{records[rank].name!r} ({rank})" for rank in sorted(records))
        here = f"; joined are {names}" if names else ""
        text = (
            f"{_ranks(self.missing)} of {self.world_size} did not join "
            f"within {self.timeout:g} s{here}. Do all workers run, with the same address and world size?"
        )
        if self.host is not None:
            text += " Without a secret they must be on this host: to use others, set TELEGRAD_SECRET on every worker"
        return RendezvousError(text)


def read_round(store: JobStore) -> str | None:
    found = store.get(_ROUND)
    if found is not None and not _TOKEN.fullmatch(found):
        raise malformed(_ROUND, found)
    return found


class _Wait:
    """Pauses between two reads of the store; logs every few seconds what the worker waits for."""

    def __init__(self, timeout: float, deadline: float, what: Callable[[], str]) -> None:
        self._what = what
        self._timeout = timeout
        self._deadline = deadline
        self._tell_at = time.monotonic() + _SILENT_SECONDS
        self._pause = 0.002

    def pause(self) -> bool:
        """Sleeps, and returns whether there is time for another read."""
        now = time.monotonic()
        if now > self._deadline:
            return False
        if now > self._tell_at:
            self._tell_at += _SILENT_SECONDS
            log.warning("%s to join, until %g s are over", self._what(), self._timeout)
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, 0.1)
        return True


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError:
        pass
