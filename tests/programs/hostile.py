"""What a hostile worker process does: it has joined the job, and uses what it learned there against the others."""

from __future__ import annotations

import select
from typing import Any

import psutil
import torch

from telegrad import rpc
from telegrad._agent.peers import WorkerRecord
from telegrad._current import current_worker
from telegrad._transport.dial import dial
from telegrad._transport.handshake import JOIN_NONCE, Identity
from telegrad._wire import codec
from telegrad._wire.frames import prefix
from telegrad._wire.messages import Body, Call, InSegment, TensorMeta
from telegrad._wire.tree import TreeWriter
from telegrad.errors import TelegradError
from telegrad.rpc import joining
from telegrad.rpc.network import Network

kept: list[torch.Tensor] = []
touched: list[str] = []


def touch(by: str) -> str:
    touched.append(by)
    return by


def touched_by() -> list[str]:
    return touched


def keep(tensor: torch.Tensor) -> None:
    kept.append(tensor)


def kept_values() -> list[float]:
    return [float(tensor.sum()) for tensor in kept]


def kept_double(tensor: torch.Tensor) -> float:
    """Writes into what it is given, and says what was there."""
    found = float(tensor.sum())
    tensor.fill_(666.0)
    return found


def shared_memory_of_this_process() -> dict[str, Any]:
    """What another worker of the job can read in this worker's record, and guess of its descriptors."""
    worker = current_worker()
    segments = [(segment.number, segment.fd, segment.size) for segment in worker.agent.marshal.segments._segments]
    me = worker.agent.me
    return {"pid": me.pid, "fd": me.shared_memory_fd, "token": me.shared_memory_token, "segments": segments}


def shares_memory_with(other: str) -> bool:
    rpc.rpc_sync(other, touched_by)
    link = current_worker().agent.peer(other).link
    return link is not None and link.shares_memory


def listening_addresses() -> list[str]:
    """The TCP addresses that this process listens on."""
    found = psutil.Process().net_connections("tcp")
    return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


def claim_the_memory_of(other: dict[str, Any]) -> None:
    """Before init_rpc: this worker's record will name another worker's process."""

    class Forged(joining.Proof):
        def __init__(self) -> None:
            super().__init__()
            self.pid, self.fd, self.token = other["pid"], other["fd"], other["token"]

    joining.Proof = Forged  # type: ignore[misc]


def name_foreign_memory(victim: str, segment: tuple[int, int, int]) -> tuple[str, str]:
    """Calls a worker with a tensor that is said to lie in another process's shared memory."""
    agent = current_worker().agent
    number, fd, size = segment
    floats = TensorMeta(dtype_code(), (1000,), 0)
    body = Body(
        tree=TreeWriter().write((torch.zeros(1), None)), buffers=(InSegment(number, fd, size),), tensors=(floats,)
    )
    peer = agent.peer(victim)
    call = agent.start_call(peer, "attack", 10.0, lambda i, _: Call(i, "programs.hostile:kept_double", body))
    try:
        return "answered", str(agent.wait(call))
    except TelegradError as error:
        return type(error).__name__, str(error)


def dtype_code() -> int:
    from telegrad._wire.dtypes import DTYPES

    return list(DTYPES).index(torch.float32)


def pass_for(other: str, victim: str) -> str:
    """Dials the victim under another worker's identity, and sends a request."""
    worker = current_worker()
    fake = worker.agent.peer(other).record
    return _knock(_network(), worker.agent.peer(victim).record, Identity(fake.worker_id, fake.name, fake.nonce))


def _network() -> Network:
    owners = [getattr(action, "__self__", None) for action in current_worker().on_fork]
    return next(owner for owner in owners if isinstance(owner, Network))


def _knock(network: Network, target: WorkerRecord, me: Identity) -> str:
    """Dials under that identity and sends a request; what becomes of it."""
    address = network._choose(current_worker().agent.me, target)
    try:
        stream = dial(
            address,
            network._link_key,
            me,
            Identity(target.worker_id, target.name, target.nonce),
            10.0,
            lambda credentials: None,
            network._client_tls if address.kind == "tcp" else None,
        )
    except (TelegradError, OSError) as error:
        return f"refused: {error}"
    try:
        header = codec.encode(Call(1, "programs.hostile:touch", Body(tree=TreeWriter().write(("stranger", None)))))
        stream.send([prefix(len(header), 0) + header])
        answer = bytearray(1 << 12)
        while select.select([stream.fileno()], [], [], 10.0)[0]:
            try:
                return "closed" if stream.recv_into(memoryview(answer)) == 0 else "answered"
            except BlockingIOError:
                continue
        return "silence"
    except OSError:
        return "closed"
    finally:
        stream.close()


_streams: list[Any] = []


def keep_connecting(victim: str, times: int) -> int:
    """Opens connections to a worker beside the one for calls; how many stay open."""
    worker = current_worker()
    network, target, me = _network(), worker.agent.peer(victim).record, worker.agent.me
    address = network._choose(me, target)
    for _ in range(times):
        try:
            _streams.append(
                dial(
                    address,
                    network._link_key,
                    Identity(me.worker_id, me.name, me.nonce),
                    Identity(target.worker_id, target.name, target.nonce),
                    10.0,
                    lambda credentials: None,
                    network._client_tls if address.kind == "tcp" else None,
                )
            )
        except (TelegradError, OSError):
            pass
    return sum(not _is_closed(stream) for stream in _streams)


def _is_closed(stream: Any) -> bool:
    buffer = memoryview(bytearray(1 << 12))
    while select.select([stream.fileno()], [], [], 1.0)[0]:
        try:
            if stream.recv_into(buffer) == 0:
                return True
        except BlockingIOError:
            continue
        except OSError:
            return True
    return False


def come_as_a_ghost(victim: str) -> str:
    """Dials as a worker that the job does not have."""
    worker = current_worker()
    network, target = _network(), worker.agent.peer(victim).record
    return _knock(network, target, Identity(77, "ghost", bytes(JOIN_NONCE)))


def call(to: str) -> tuple[str, str]:
    try:
        return "answered", rpc.rpc_sync(to, touch, args=("honest",), timeout=5.0)
    except (TelegradError, OSError) as error:
        return type(error).__name__, str(error)
