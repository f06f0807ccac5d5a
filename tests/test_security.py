"""Strangers at the doors of a real worker, and workers that let no code in."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from programs import exported, remote_functions
from support import AT_ONCE
from telegrad import rpc
from telegrad._transport.dial import Address, dial
from telegrad._transport.handshake import MAGIC, VERSION, Identity, derive_key
from telegrad._transport.tls import make_authority, tls_end
from telegrad._wire.frames import MAGIC as FRAME_MAGIC
from telegrad.errors import AuthenticationError, SerializationError, TelegradError, UsageError
from worker_processes import PATIENCE, WorkerProcess, join, leave, running_workers, worker_processes

MB = 1 << 20


class Trap:
    """A pickle that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    with worker_processes(2) as cast:
        for process in cast:
            process.run(remote_functions.log_every_refusal)
        join(cast, secret="ours")
        yield cast
        leave(cast)


@pytest.fixture(params=["unix", "tcp"])
def address(workers: list[WorkerProcess], request: pytest.FixtureRequest) -> Address:
    return next(one for one in workers[0].run(remote_functions.addresses) if one.kind == request.param)


def connect(address: Address) -> socket.socket:
    if address.kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + address.host[1:])
    else:
        sock = socket.create_connection((address.host, address.port))
    sock.settimeout(PATIENCE)
    return sock


def all_that_comes(sock: socket.socket) -> bytes:
    """Until the worker closes, which it must."""
    heard = b""
    try:
        while data := sock.recv(1 << 16):
            heard += data
    except ConnectionError:
        pass
    return heard


HELLO = struct.Struct("!8sHBH")


def hello(length: int, body: bytes = b"", kind: int = 1, version: int = VERSION) -> bytes:
    return HELLO.pack(MAGIC, version, kind, length) + body


def good_hello() -> bytes:
    """That of worker1, for worker0."""
    body = os.urandom(32) + struct.pack("!H", 0) + Identity(1, "worker1").encode()
    return hello(len(body), body)


STRANGERS: dict[str, Callable[[Path], bytes]] = {
    "random bytes": lambda _: os.urandom(5000),
    "HTTP": lambda _: b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    "a pickle": lambda trap: pickle.dumps(Trap(trap)),
    "the right magic, then a pickle": lambda trap: MAGIC + pickle.dumps(Trap(trap)),
    "a frame with a pickle": lambda trap: (
        FRAME_MAGIC + struct.pack("<IQ", 0xFFFFFFFF, 1 << 60) + pickle.dumps(Trap(trap))
    ),
    "a huge length": lambda _: hello(0xFFFF, b"x" * 1000),
    "a length that does not fit": lambda _: hello(3, b"abc"),
    "another kind first": lambda _: hello(32, b"m" * 32, kind=3),
    "another version": lambda _: hello(60, b"h" * 60, version=99),
    "a good hello, then a pickle": lambda trap: good_hello() + pickle.dumps(Trap(trap)),
    "a good hello, then a wrong proof": lambda _: good_hello() + hello(32, bytes(32), kind=3),
}


@pytest.mark.parametrize("who", list(STRANGERS))
def test_a_stranger_gets_a_closed_door_and_one_line_in_the_log(
    workers: list[WorkerProcess], address: Address, who: str, tmp_path: Path
) -> None:
    worker = workers[0]
    trap = tmp_path / "trap"
    before = worker.log().count("refused a connection")
    with connect(address) as sock:
        sock.sendall(STRANGERS[who](trap))
        heard = all_that_comes(sock)
    assert b"worker" not in heard, "the worker told a stranger its name"
    assert len(heard) < 100
    deadline = time.monotonic() + PATIENCE
    while worker.log().count("refused a connection") == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
    assert worker.log().count("refused a connection") == before + 1
    assert "Traceback" not in worker.log()
    assert not trap.exists()


def test_a_stranger_who_says_nothing_is_shown_the_door_after_five_seconds(workers: list[WorkerProcess]) -> None:
    """All at once, and one who drips: dripping wins no time."""
    addresses = workers[0].run(remote_functions.addresses)
    before = workers[0].log().count("refused a connection")
    silent = [connect(address) for address in addresses]
    dripping = connect(addresses[0])
    start = time.monotonic()
    try:
        for byte in good_hello()[:10]:
            dripping.sendall(bytes([byte]))
            time.sleep(0.1)
        for sock in [*silent, dripping]:
            assert all_that_comes(sock) == b""
        assert 3 < time.monotonic() - start < 5 + AT_ONCE
    finally:
        for sock in [*silent, dripping]:
            sock.close()
    assert workers[1].run(rpc.rpc_sync, "worker0", remote_functions.add, args=(1, 2)) == 3
    assert workers[0].log().count("refused a connection") == before + 3


def test_many_strangers_cost_little_memory_and_keep_nobody_out(workers: list[WorkerProcess]) -> None:
    worker, address = workers[0], workers[0].run(remote_functions.addresses)[0]
    rss, _, files = worker.run(remote_functions.resources)
    crowd: list[socket.socket] = []
    try:
        for _ in range(400):
            sock = connect(address)
            crowd.append(sock)
            try:
                sock.sendall(good_hello()[:45])  # and never the rest
            except ConnectionError:
                pass  # the oldest has to go when there are too many
        assert workers[1].run(rpc.rpc_sync, "worker0", remote_functions.add, args=(1, 2)) == 3
        during, _, open_files = worker.run(remote_functions.resources)
        assert during - rss < 16 * MB
        assert open_files - files <= 260
    finally:
        for sock in crowd:
            sock.close()
    deadline = time.monotonic() + PATIENCE
    while worker.run(remote_functions.resources)[2] > files:
        assert time.monotonic() < deadline, "the connections of strangers stay open"
        time.sleep(0.05)


def test_a_handshake_with_another_secret_fails_on_both_sides(workers: list[WorkerProcess], address: Address) -> None:
    """On TCP it ends with the certificate, which the secret signs, on Unix with the first proof."""
    guessed = derive_key(b"guessed", "job")
    authority = make_authority(guessed)
    tls = tls_end(authority.sign("worker1"), authority, server_side=False)
    reason = "another secret" if address.kind == "unix" else "TELEGRAD_SECRET"
    with pytest.raises(AuthenticationError, match=reason):
        dial(address, guessed, Identity(1, "worker1"), Identity(0, "worker0"), 5.0, lambda _: None, tls)
    assert workers[0].wait_for_log(reason)


def test_a_stranger_who_floods_is_read_no_further(workers: list[WorkerProcess], address: Address) -> None:
    rss, _, _ = workers[0].run(remote_functions.resources)
    with connect(address) as sock, pytest.raises(ConnectionError):
        sock.sendall(MAGIC + bytes(256 * MB))
    assert workers[0].run(remote_functions.rss) - rss < 8 * MB


# --- without pickle ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict() -> Iterator[list[WorkerProcess]]:
    with running_workers(2, allow_pickle=False) as cast:
        yield cast


def test_without_pickle_exported_functions_and_plain_data_go(strict: list[WorkerProcess]) -> None:
    assert strict[0].run(rpc.rpc_sync, "worker1", exported.scale, args=([1, 2.5, "x"], 2)) == [2, 5.0, "xx"]
    assert strict[0].run(rpc.rpc_sync, "worker1", "short", args=(4,)) == 5
    assert strict[0].run(exported.use_tensors, "worker1")
    assert strict[0].run(exported.use_reference, "worker1") == 3


@pytest.mark.parametrize(
    "function", [remote_functions.echo, os.system, "os:system", "builtins:eval", exported.not_exported]
)
def test_without_pickle_other_functions_are_refused(strict: list[WorkerProcess], function: object) -> None:
    with pytest.raises(SerializationError, match=r"is not exported here.*@rpc\.export"):
        strict[0].run(rpc.rpc_sync, "worker1", function, args=("1",))


@pytest.mark.parametrize("attack", [exported.reinterpret_quantised, exported.multiply_sparse])
def test_without_pickle_operators_take_no_tensor_that_crashes_torch(
    strict: list[WorkerProcess], attack: Callable[[str], None]
) -> None:
    with pytest.raises(SerializationError, match=r"torch's '\w+' takes no tensor of .*@rpc\.export"):
        strict[0].run(attack, "worker1")
    assert strict[0].run(rpc.rpc_sync, "worker1", "short", args=(4,)) == 5


def test_without_pickle_no_pickle_is_sent(strict: list[WorkerProcess]) -> None:
    kind, text = strict[0].run(remote_functions.error_of_call, "worker1", exported.scale, Path("x"), 2)
    assert kind == "SerializationError"
    assert "argument 1 ('items') of scale for worker 'worker1' cannot be sent" in text
    assert "cannot send a value of type PosixPath without pickle (allow_pickle=False)" in text
    kind, text = strict[0].run(exported.call_lambda, "worker1")
    assert kind == "SerializationError"


@pytest.mark.parametrize("lenient", [0, 1])
def test_without_pickle_on_one_side_none_is_taken_there(lenient: int, tmp_path: Path) -> None:
    """A worker that breaks the rule and sends one anyway, as a request and as an answer."""
    with worker_processes(2) as cast:
        options = {"init_method": f"file://{tmp_path}/meet", "init_timeout": 20}
        pending = [
            process.start(
                remote_functions.start_worker, f"worker{rank}", rank, 2, {**options, "allow_pickle": rank == lenient}
            )
            for rank, process in enumerate(cast)
        ]
        for one in pending:
            one.result()
        trap = tmp_path / "trap"
        liar, strict_one = cast[lenient], cast[1 - lenient]
        name, strict_name = f"worker{lenient}", f"worker{1 - lenient}"
        liar.run(exported.pickle_anyway)
        kind, text = liar.run(exported.send_trap, strict_name, str(trap))
        assert kind == "SerializationError", text
        assert "this worker takes none (allow_pickle=False)" in text
        kind, text = strict_one.run(remote_functions.error_of_call, name, exported.return_trap, str(trap))
        assert kind == "SerializationError", text
        assert "this worker takes none (allow_pickle=False)" in text
        assert not trap.exists()
        assert strict_one.run(rpc.rpc_sync, name, exported.scale, args=([1], 2)) == [2]
        leave(cast)


# --- open doors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_an_open_address_without_a_secret_is_refused(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TELEGRAD_SECRET", raising=False)
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", host=host)
    with pytest.raises(UsageError, match=r"refusing to listen on .* without a secret.*set TELEGRAD_SECRET"):
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)


def test_with_a_secret_an_open_address_is_encrypted(tmp_path: Path) -> None:
    with worker_processes(2) as cast:
        join(cast, secret="ours", host="0.0.0.0", transports=("tcp",))
        assert cast[0].run(remote_functions.call_all, ["worker0", "worker1"]) == 2
        assert set(cast[0].run(remote_functions.links)) == {"TlsStream"}
        leave(cast)


def test_secrets_are_in_no_repr_and_no_message() -> None:
    options = rpc.RpcBackendOptions(secret="hush", init_method="udp://nowhere")
    assert "hush" not in repr(options)
    with pytest.raises(TelegradError) as caught:
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    assert "hush" not in str(caught.value)
