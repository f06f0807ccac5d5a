"""What tests let worker processes do: functions that are called over RPC, and functions that call."""

from __future__ import annotations

import collections
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import psutil
import torch

from telegrad import rpc
from telegrad._agent.peers import WorkerRecord
from telegrad._current import current_worker
from telegrad._transport import refusals
from telegrad._transport.dial import Address
from telegrad._transport.handshake import derive_key
from telegrad.errors import NotInitializedError, RpcTimeoutError, TelegradError
from telegrad.rpc.rendezvous import Meeting
from telegrad.rpc.stores import JobStore

# --- called ---------------------------------------------------------------------------------------------------------

counter = 0


def whoami() -> tuple[str, int]:
    return rpc.get_worker_info().name, os.getpid()


def count_up(by: int = 1) -> int:
    global counter
    counter += by
    return counter


def echo(value: Any) -> Any:
    return value


def nothing() -> None:
    pass


def add(a: Any, b: Any) -> Any:
    return a + b


def filled(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def double_array(array: Any) -> Any:
    assert isinstance(array, np.ndarray)
    return array * 2


def wait_forever(seconds: float = 300.0) -> None:
    time.sleep(seconds)


class Unlucky(Exception):
    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(f"{number}: {why}")
        self.number = number


def fail(number: int) -> None:
    raise Unlucky(number, why="as asked")


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, by: int) -> int:
        self.value += by
        return self.value


def ask_through(rref: Any) -> int:
    """On a third worker: uses a reference that it was given."""
    return int(rref.rpc_sync().add(1))


def forward(to: str, function: Any, args: tuple[Any, ...]) -> Any:
    return rpc.rpc_sync(to, function, args=args)


@rpc.functions.async_execution
def add_via(to: str, a: int, b: int) -> Any:
    return rpc.rpc_async(to, add, args=(a, b)).then(lambda done: done.wait() + 1)


# --- measuring ------------------------------------------------------------------------------------------------------


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def resources() -> tuple[int, int, int]:
    """Memory, threads, file descriptors."""
    return rss(), threading.active_count(), len(os.listdir("/proc/self/fd"))


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass  # the listing's own
    return found


def leftovers() -> dict[str, Any]:
    """What a worker with nothing to do should have nothing of."""
    gc.collect()
    worker = current_worker()
    worker.references.wait_empty(10)
    deadline = time.monotonic() + 10
    while len(worker.agent.calls) and time.monotonic() < deadline:
        time.sleep(0.01)
    held = sum(len(link.held) for peer in worker.agent.peers for link in peer.links)
    while held and time.monotonic() < deadline:
        time.sleep(0.05)
        held = sum(len(link.held) for peer in worker.agent.peers for link in peer.links)
    return {
        "references": worker.references.empty or repr(worker.references),
        "broken": len(worker.references.broken),
        "calls": len(worker.agent.calls),
        "held": held,
    }


NO_LEFTOVERS = {"references": True, "broken": 0, "calls": 0, "held": 0}


def links() -> list[str]:
    """The kinds of streams that this worker's links use."""
    worker = current_worker()
    others = [peer for peer in worker.agent.peers if peer.id != worker.id]
    return [type(link._stream).__name__ for peer in others for link in peer.links]  # type: ignore[attr-defined]


def log_every_refusal() -> None:
    """For tests that count log lines, of which there is a limited number otherwise."""
    refusals.LINES = 1_000_000


def addresses() -> list[Any]:
    return list(current_worker().agent.me.addresses)


# --- at the store ---------------------------------------------------------------------------------------------------

stores: list[Any] = []


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        return False
    return True


def serve_store(host: str) -> int:
    """As torchrun does: on all addresses."""
    stores.append(torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False))
    return int(stores[-1].port)


def forge_record(host: str, port: int, own_host: str) -> None:
    """What a stranger does who reaches the store of a job without a secret: the token is there to be read."""
    store = torch.distributed.TCPStore(host, port, is_master=False)
    name = store.get("telegrad/round").decode()  # waits for rank 0
    corner = torch.distributed.PrefixStore(f"telegrad/{name}", store)
    key = derive_key(corner.get("token"), corner.get("job").decode())
    meeting = Meeting(JobStore(corner), 1, "worker1", 2, 10.0)
    addresses = (Address("tcp", own_host, 666, bytes(32)),)
    record = WorkerRecord(1, "worker1", 1, "far away", addresses, world_size=2, nonce=bytes(16))
    meeting.publish(record, key)


# --- joining ----------------------------------------------------------------------------------------------------------


def start_worker(name: str, rank: int, world_size: int | None, options: dict[str, Any]) -> None:
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcBackendOptions(**options))


# --- calling --------------------------------------------------------------------------------------------------------


def outcome(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """Type and text of the error that comes, and after how many seconds; "" when none does."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def call_many(to: str, count: int) -> None:
    for number in range(count):
        assert rpc.rpc_sync(to, add, args=(number, 1)) == number + 1


def call_all(names: list[str], rounds: int = 1) -> int:
    """Calls everybody, all at once."""
    total = 0
    for _ in range(rounds):
        pending = [rpc.rpc_async(name, whoami) for name in names]
        assert [one.wait()[0] for one in pending] == names
        total += len(names)
    return total


def use_references(owner: str, third: str) -> int:
    rref = rpc.remote(owner, Counter, args=(10,))
    assert rref.owner_name() == owner
    assert rref.rpc_sync().add(5) == 15
    assert rpc.rpc_sync(third, ask_through, args=(rref,)) == 16
    value: int = rref.rpc_async().add(0).wait()
    return value


def error_of_call(to: str, function: Any, *args: Any) -> tuple[str, str]:
    kind, text, _ = outcome(rpc.rpc_sync, to, function, args=args)
    return kind, text


def unlucky(to: str) -> tuple[str, int, str]:
    try:
        rpc.rpc_sync(to, fail, args=(7,))
    except Unlucky as error:
        return type(error).__name__, error.number, str(error)
    raise AssertionError("no error came")


def send_around(to: str, size: int) -> tuple[bool, int]:
    """A tensor goes there and back; whether it is the same, and how many links may use shared memory."""
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    back = rpc.rpc_sync(to, echo, args=(tensor,))
    links_with_memory = sum(link.shares_memory for peer in current_worker().agent.peers for link in peer.links)
    return torch.equal(tensor, back), links_with_memory


def keep_replies(to: str, size: int, count: int) -> bool:
    """Whether replies that are held stay what they were while others come and go."""
    kept = []
    for value in range(count):
        kept.append(rpc.rpc_sync(to, filled, args=(size, value)))
        rpc.rpc_sync(to, filled, args=(size, 255))  # comes, and goes at once: its memory is for the next
    return all(bool((tensor == value).all()) for value, tensor in enumerate(kept))


def send_from_threads(to: str, size: int, threads: int, rounds: int) -> int:
    """Several threads send big tensors at once; how many came back right."""
    right = []

    def send(number: int) -> None:
        for turn in range(rounds):
            value = (number * rounds + turn) % 251
            tensor = filled(size, value)
            back = rpc.rpc_sync(to, add, args=(tensor, 1))
            right.append(bool((back == value + 1).all()) and bool((tensor == value).all()))

    them = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(threads)]
    for thread in them:
        thread.start()
    for thread in them:
        thread.join(60)
    return sum(right)


def double_arrays(to: str) -> bool:
    small, big = np.arange(10.0), np.arange(1 << 20)
    fine = [np.array_equal(rpc.rpc_sync(to, double_array, args=(array,)), array * 2) for array in (small, big)]
    mixed = rpc.rpc_sync(to, echo, args=({"array": big, "set": {1, 2}},))
    return all(fine) and np.array_equal(mixed["array"], big) and mixed["set"] == {1, 2}


def forbid_shared_memory() -> None:
    """Publishes a token that nobody finds behind this process's descriptor, as on a host that forbids to look there."""
    from telegrad._transport.shared_memory import Proof
    from telegrad.rpc import joining

    class Unreadable(Proof):
        def __init__(self) -> None:
            super().__init__()
            self.token = bytes(32)

    joining.Proof = Unreadable  # type: ignore[attr-defined]


def start_pending(to: str, count: int) -> None:
    """Leaves calls behind that will not be answered."""
    global _pending, _settled
    _settled = []
    _pending = [rpc.rpc_async(to, wait_forever, timeout=0) for _ in range(count)]
    for future in _pending:
        future.add_done_callback(lambda _: _settled.append(time.time()))


_pending: list[Any] = []
_settled: list[float] = []


def reap_pending() -> tuple[list[tuple[str, str]], float]:
    """How those calls ended, and when the last did."""
    errors = []
    for future in _pending:
        try:
            future.wait()
            errors.append(("", ""))
        except TelegradError as error:
            errors.append((type(error).__name__, str(error)))
    deadline = time.monotonic() + 5
    while len(_settled) < len(_pending) and time.monotonic() < deadline:
        time.sleep(0.001)
    return errors, max(_settled)


class EndOfChild(SystemExit):
    """Ends a forked child as the end of a main program does, with all destructors; the process lets it through."""


def fork_and_exit(how: str) -> int:
    """Forks; the child ends, in one way or another.  Its exit code."""
    reference = rpc.RRef(Counter())
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(20)
        assert child.exitcode is not None
        return child.exitcode
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        if how == "use it":
            os._exit(_use_after_fork(reference))
        if how == "exit properly":
            del reference
            gc.collect()
            raise EndOfChild
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_and_stay() -> int:
    """Forks a child that lives on; its process id."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    return pid


def _use_after_fork(reference: Any) -> int:
    """A child is no worker: all that it may get is a clear error."""
    for action in (
        lambda: rpc.rpc_sync("worker1", nothing),
        lambda: rpc.rpc_sync("worker0", nothing),
        lambda: reference.rpc_sync().add(1),
        rpc.shutdown,
    ):
        try:
            action()
        except NotInitializedError:
            continue
        return 1
    return 0


def cycle(rank: int, world_size: int, init_method: str, times: int) -> tuple[list[int], list[int], dict[str, str]]:
    """Joins and leaves again and again; threads and descriptors after each time, and the last descriptors."""
    threads, open_files = [], []
    for _ in range(times):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=world_size,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method, init_timeout=20),
        )
        assert rpc.rpc_sync(f"worker{1 - rank}", add, args=(1, 2)) == 3
        rpc.shutdown()
        gc.collect()
        _, alive, files = resources()
        threads.append(alive)
        open_files.append(files)
    return threads, open_files, descriptors()


def serve_once(host: str, port: int) -> bytes:
    with socket.create_server((host, port)) as server:
        server.settimeout(10)
        conn, _ = server.accept()
        with conn:
            conn.settimeout(10)
            return conn.recv(1000)


def send_plain(host: str, port: int, data: bytes) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection((host, port), 10) as sock:
                sock.sendall(data)
                return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# --- for a long time --------------------------------------------------------------------------------------------------


def call_and_measure(to: str, warm_up: int, count: int) -> dict[str, list[tuple[int, int, int]]]:
    """Memory, threads and descriptors here and there, before and after many calls of several kinds."""

    _mixed_calls(to, warm_up)
    before = [resources(), rpc.rpc_sync(to, resources)]
    _mixed_calls(to, count)
    after = [resources(), rpc.rpc_sync(to, resources)]
    return {"here": [before[0], after[0]], "there": [before[1], after[1]]}


def _mixed_calls(to: str, count: int) -> None:
    tensor = torch.arange(64.0)
    for turn in range(count // 100):
        for number in range(40):
            assert rpc.rpc_sync(to, add, args=(number, turn)) == number + turn
        for _ in range(10):
            assert rpc.rpc_sync(to, add, args=(tensor, 1))[1] == 2
        pending = [rpc.rpc_async(to, echo, args=({"turn": turn},)) for _ in range(40)]
        assert all(one.wait()["turn"] == turn for one in pending)
        counter = rpc.remote(to, Counter)
        assert [counter.rpc_sync().add(1) for _ in range(8)] == list(range(1, 9))
        try:
            rpc.rpc_sync(to, fail, args=(turn,))
        except Unlucky:
            pass


def big_message(to: str, size: int) -> tuple[float, float]:
    """Sends a tensor of that many bytes and gets one; the seconds each way."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[-1], tensor[size // 2] = 7, 5
    start = time.monotonic()
    assert rpc.rpc_sync(to, ends_of, args=(tensor,), timeout=0) == (size, 0, 5, 7)
    there = time.monotonic() - start
    del tensor
    gc.collect()
    start = time.monotonic()
    back = rpc.rpc_sync(to, big_tensor, args=(size,), timeout=0)
    seconds = time.monotonic() - start
    assert ends_of(back) == (size, 0, 5, 7)
    return there, seconds


def ends_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    return tensor.numel(), int(tensor[0]), int(tensor[tensor.numel() // 2]), int(tensor[-1])


def big_tensor(size: int) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[-1], tensor[size // 2] = 7, 5
    return tensor


def soak(me: int, world_size: int, seconds: float, seed: int) -> dict[str, int]:
    """Random calls, references, errors and timeouts, to random workers; how many of each."""
    dice = random.Random(seed)
    done: collections.Counter[str] = collections.Counter()
    kept: list[Any] = []
    deadline = time.monotonic() + seconds
    names = [f"worker{rank}" for rank in range(world_size)]
    while time.monotonic() < deadline:
        to, other = dice.choice(names), dice.choice(names)
        what = dice.choice(["call", "burst", "tensor", "big", "reference", "keep", "error", "timeout", "forward"])
        done[what] += 1
        if what == "call":
            assert rpc.rpc_sync(to, add, args=(1, me)) == 1 + me
        elif what == "burst":
            pending = [rpc.rpc_async(name, add, args=(number, me)) for number in range(20) for name in names]
            assert [one.wait() for one in pending[:: len(names)]] == [number + me for number in range(20)]
            for one in pending:
                one.wait()
        elif what == "tensor":
            value = dice.randrange(200)
            assert bool((rpc.rpc_sync(to, filled, args=(dice.randrange(1, 100_000), value)) == value).all())
        elif what == "big":
            size, value = dice.randrange(300_000, 3_000_000), dice.randrange(200)
            assert bool((rpc.rpc_sync(to, add, args=(filled(size, value), 1)) == value + 1).all())
        elif what == "reference":
            assert use_references(to, other) == 16
        elif what == "keep":
            kept.append(rpc.remote(to, Counter, args=(me,)))
            if len(kept) > 20:
                kept.pop(dice.randrange(len(kept)))
            assert dice.choice(kept).rpc_sync().add(0) >= 0
        elif what == "error":
            try:
                rpc.rpc_sync(to, fail, args=(me,))
            except Unlucky as error:
                assert error.number == me  # noqa: PT017
        elif what == "timeout":
            try:
                rpc.rpc_sync(to, wait_forever, args=(0.05,), timeout=dice.choice([0.001, 0.02, 0.05]))
            except RpcTimeoutError:
                done["timed out"] += 1
        else:
            assert rpc.rpc_sync(to, forward, args=(other, add, (1, 2))) == 3
    kept.clear()
    return dict(done)


def weight_after(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return 2 * torch.ones(2, requires_grad=True)


def results_waited_for_in_another_mode(to: str, enabled: bool) -> list[bool]:
    """Whether a result needs a gradient that is there before the wait, and one that comes meanwhile."""
    found = []
    for seconds in (0.0, 0.1):
        with torch.set_grad_enabled(enabled):
            future = rpc.rpc_async(to, weight_after, (seconds,))
        while not seconds and not future.done():
            time.sleep(0.001)
        with torch.set_grad_enabled(not enabled):
            found.append(future.wait().requires_grad)
    return found


def hold_gil(seconds: int) -> int:
    """Runs no other Python code in this process meanwhile, as a long call of a C library does."""
    ctypes.PyDLL(None).sleep(seconds)
    return seconds


def send_big(to: str, size: int, timeout: float) -> int:
    """The size of a tensor, as the other side sees it."""
    return rpc.rpc_sync(to, ends_of, args=(torch.zeros(size, dtype=torch.uint8),), timeout=timeout)[0]  # type: ignore[no-any-return]


def call_in_vain(call: Any, to: str, timeout: float) -> None:
    """Starts a call whose result is not used."""
    call(to, nothing, timeout=timeout)


def fork_unnoticed() -> int:
    """A child that C code forked: Python's hooks do not run in it."""
    libc = ctypes.PyDLL(None)
    child = int(libc.fork())
    if child == 0:
        libc.sleep(600)
        libc._exit(0)
    return child
