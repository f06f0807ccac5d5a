"""Feeds a victim: many members of its job, each with a connection that it made and one that the victim made to it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from telegrad import autograd, rpc
from telegrad._agent.agent import Agent, AgentOptions
from telegrad._agent.peers import Peer
from telegrad._core.interface import Link
from telegrad._current import acting_as
from telegrad._transport.shared_memory import Proof
from telegrad._transport.sockets import SocketStream, connect_unix, listen_unix
from telegrad._wire import codec
from telegrad._wire.frames import FrameReader, prefix
from telegrad._wire.messages import Call, Fetch, RemoteCall, Reply
from telegrad._wire.values import Route, pack
from telegrad._worker import Worker
from telegrad.errors import ProtocolError, TelegradError

from .adapt import Live
from .mutate import Input, Mutator
from .victim import FIRST_HOSTILE, HELLO, HONEST, VICTIM, Setup, encode_setup

HOSTILE = 6
_BATCH = 40  # inputs at most
_LIFETIMES = (0, 0, 0, 1, 3, 10)  # of connections, in batches
_HANG_SECONDS = 60.0  # the machine may be busy
_REMEMBERED = 400  # batches
_LOG_LINES = 2000  # that a victim may write in a minute: twenty entries of each kind, some of them tracebacks


_INTERNAL_ERROR = re.compile(
    "failed in an internal task|failed to use a connection|ended on an internal error|Exception ignored|"
    "Exception in thread|Fatal Python error"
)


class VictimFailed(Exception):
    """It crashed, hangs, or gives wrong answers."""


@dataclass
class Batch:
    """What went out on one connection, in order: ``dialled`` is the side of the victim."""

    peer: int
    dialled: bool
    inputs: list[Input]


class VictimProcess:
    """A victim, its log, and the honest worker of its job, which lives in this process."""

    def __init__(self, proof: Proof, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.inbound, address = listen_unix()
        self._honest_door, honest_address = listen_unix()
        token = base64.b64encode(proof.token).decode()
        self._setup = Setup(HOSTILE, address, honest_address, os.getpid(), proof.fd, token, allow_pickle)
        self.log = tempfile.NamedTemporaryFile("w+", prefix="live-fuzz-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.victim"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self._answers: deque[dict[str, Any]] = deque()
        self._came = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        self.address = self.ask(encode_setup(self._setup))["address"]
        self.honest = self._make_honest()
        self.canaries = 0
        self._started = time.monotonic()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self._answers.append(json.loads(line))
                self._came.notify()
        self.process.wait()
        with self._came:
            self._came.notify()

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except OSError:
            pass  # it is dead: no answer comes
        with self._came:
            if not self._came.wait_for(lambda: bool(self._answers) or not self.is_alive(), 2 * _HANG_SECONDS):
                raise VictimFailed(f"the victim does not answer {line!r}")
            if not self._answers:
                raise VictimFailed(self.story())
            return self._answers.popleft()

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def story(self) -> str:
        return f"the victim ended with code {self.process.poll()}\n{self.text()[-6000:]}"

    def text(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    # --- the honest worker ----------------------------------------------------------------------------------------

    def _make_honest(self) -> Worker:
        records = self._setup.records()
        options = AgentOptions(allow_pickle=self.allow_pickle, timeout=_HANG_SECONDS)
        worker = Worker(records[HONEST], options, self._dial, lambda to: Route(to.worker_id, self.allow_pickle))
        worker.add_peer(records[VICTIM])
        worker.start()
        threading.Thread(target=self._let_in, args=(worker,), daemon=True).start()
        return worker

    def _dial(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        sock = connect_unix(self.address, timeout)
        sock.sendall(HELLO.pack(HONEST))
        return self._link(sock, agent, True)

    def _let_in(self, worker: Worker) -> None:
        try:
            while True:
                sock, _ = self._honest_door.accept()
                sock.recv(HELLO.size, socket.MSG_WAITALL)
                worker.agent.accepted(self._link(sock, worker.agent, False))
        except OSError:
            pass  # it is over

    def _link(self, sock: socket.socket, agent: Agent, dialled: bool) -> Link:
        return agent.plane.adopt(SocketStream(sock), VICTIM, dialled, self.process.pid)

    def check(self) -> None:
        """The canary: the victim still answers an honest worker, and backward still gives the right gradients."""
        self.canaries += 1
        number = self.canaries
        x = torch.tensor([1.0, float(number)], requires_grad=True)
        try:
            with acting_as(self.honest):
                answer = rpc.rpc_sync(VICTIM, "fuzz.echo", ({"number": number, "tensor": torch.ones(3)},))
                with autograd.context() as context_id:
                    loss = rpc.rpc_sync(VICTIM, "fuzz.scale", (x,)).sum()
                    autograd.backward(context_id, [loss], timeout=_HANG_SECONDS)
                    gradient = autograd.get_gradients(context_id)[x]
        except TelegradError as error:
            raise VictimFailed(f"an honest worker got no answer: {error}\n{self.story()}") from error
        if answer["number"] != number or answer["tensor"].tolist() != [1.0] * 3 or gradient.tolist() != [2.0, 5.0]:
            raise VictimFailed(f"an honest worker got wrong results: {answer}, {gradient}")

    def check_log(self) -> None:
        """No internal error, and not too many lines.  Users' functions may raise, and that is logged."""
        text = self.text()
        if (found := _INTERNAL_ERROR.search(text)) is not None:
            raise VictimFailed(f"an error in the victim's log: {text[max(found.start() - 500, 0) :][:4000]}")
        lines = text.count("\n")
        if lines > _LOG_LINES * (1 + (time.monotonic() - self._started) / 60):
            raise VictimFailed(f"{lines:,} lines in the victim's log, which ends with\n{text[-3000:]}")

    def close(self) -> None:
        self.honest.abandon()
        for sock in (self.inbound, self._honest_door):
            sock.close()
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        self.log.close()


def _reader() -> FrameReader:
    return FrameReader(codec.decode, codec.stream_sizes, lambda size: np.empty(size, np.uint8))


@dataclass(eq=False)
class Connection:
    """One socket to the victim."""

    sock: socket.socket
    peer: int
    dialled: bool  # by the victim
    reader: FrameReader = field(default_factory=_reader)

    def receive(self) -> list[Any] | None:
        """The messages that came; None when the victim has closed."""
        try:
            count = self.sock.recv_into(self.reader.space())
        except BlockingIOError:
            return []
        except OSError:
            return None
        return [frame.message for frame in self.reader.advance(count)] if count else None


@dataclass(eq=False)
class Member:
    """A hostile worker."""

    peer: int
    live: Live
    out: Connection | None = None  # the one that it made
    back: Connection | None = None  # the one that the victim made
    token: str = ""  # of the last call of a batch; empty: the victim must close
    last: Input | None = None  # what ends the connection, after that
    batches: int = 0  # that go out before one that ends it
    since: float = 0.0
    waits: bool = False


class Attacker:
    def __init__(self, victim: VictimProcess, mutator: Mutator) -> None:
        self.victim = victim
        self.recent: deque[Batch] = deque(maxlen=_REMEMBERED)
        self.sent = 0
        self._mutator = mutator
        self._random = mutator.random
        self._numbers = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        self._members = [Member(peer, Live(peer)) for peer in range(FIRST_HOSTILE, FIRST_HOSTILE + HOSTILE)]
        self._selector.register(victim.inbound, selectors.EVENT_READ, None)

    def run(self, count: int) -> None:
        """Sends about so many inputs, and waits until the victim has taken them."""
        goal = self.sent + count
        while True:
            for member in self._members:
                if not member.waits and self.sent < goal:
                    self._send_batch(member)
            if not any(member.waits for member in self._members):
                return
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._admit()
                else:
                    self._receive(key.data)
            self._check_hang()

    def disconnect(self) -> None:
        for member in self._members:
            self._close(member)

    def close(self) -> None:
        self.disconnect()
        self._selector.close()

    def _check_hang(self) -> None:
        now = time.monotonic()
        for member in self._members:
            if member.waits and now - member.since > _HANG_SECONDS:
                if self.victim.is_alive():
                    self.victim.ask("stacks\n")
                raise VictimFailed(f"no answer to member {member.peer} for {_HANG_SECONDS} s\n{self.victim.story()}")
        if not self.victim.is_alive():
            raise VictimFailed(self.victim.story())

    # --- sending --------------------------------------------------------------------------------------------------

    def _send_batch(self, member: Member) -> None:
        """Up to an input that ends the connection.  That goes alone, when the others were taken: a worker drops what it
        has read in one go with something malformed."""
        connection = self._connect(member)
        inputs = [self._mutator.request(member.live, may_end=False) for _ in range(self._random.randrange(_BATCH))]
        member.batches -= 1
        member.last = self._mutator.request(member.live) if member.batches < 0 else None
        if member.last is not None and not member.last.ends:
            inputs.append(member.last)
            member.last = None
        if self._random.random() < 0.15:
            inputs.append(self._call("fuzz.visit", self._random.randrange(10), member.peer))
        member.token = self._random.randbytes(12).hex()
        inputs.append(self._call("fuzz.echo", member.token))
        member.waits, member.since = True, time.monotonic()
        self._send(member.peer, False, connection, inputs)

    def _call(self, function: str, *args: Any) -> Input:
        body = pack((*args, None), Route(VICTIM, allow_pickle=False)).body
        return Input(_frame(Call(next(self._numbers), function, body)))

    def _token_came(self, member: Member) -> None:
        if member.last is None:
            member.waits = False
        elif member.out is not None:
            member.token = ""
            self._send(member.peer, False, member.out, [member.last])
            if member.last.ends == "hang up":
                try:
                    member.out.sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # the victim was faster

    def _send(self, peer: int, dialled: bool, connection: Connection, inputs: list[Input]) -> bool:
        self.recent.append(Batch(peer, dialled, inputs))
        self.sent += len(inputs)
        data = memoryview(b"".join(each.raw for each in inputs))
        connection.sock.setblocking(True)
        try:
            connection.sock.settimeout(_HANG_SECONDS)
            connection.sock.sendall(data)
        except TimeoutError:
            raise VictimFailed(f"the victim reads nothing from member {peer}") from None
        except OSError:
            return False  # it has closed, and will be seen to have
        finally:
            connection.sock.setblocking(False)
        return True

    def _connect(self, member: Member) -> Connection:
        if member.out is None:
            self._close(member)
            sock = connect_unix(self.victim.address, _HANG_SECONDS)
            sock.sendall(HELLO.pack(member.peer))
            member.out = self._add(sock, member.peer, False)
            member.batches = self._random.choice(_LIFETIMES)
        return member.out

    def _add(self, sock: socket.socket, peer: int, dialled: bool) -> Connection:
        sock.setblocking(False)
        connection = Connection(sock, peer, dialled)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _close(self, member: Member) -> None:
        for connection in (member.out, member.back):
            if connection is not None:
                self._selector.unregister(connection.sock)
                connection.sock.close()
        member.out = member.back = None
        member.waits = False
        member.live.sends.clear()
        member.live.passes.clear()

    # --- receiving ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        sock, _ = self.victim.inbound.accept()
        (peer,) = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
        member = self._members[peer - FIRST_HOSTILE]
        if member.back is not None:
            self._selector.unregister(member.back.sock)
            member.back.sock.close()
        member.back = self._add(sock, peer, True)

    def _receive(self, connection: Connection) -> None:
        member = self._members[connection.peer - FIRST_HOSTILE]
        if connection not in (member.out, member.back):
            return  # it was closed just now
        try:
            messages = connection.receive()
        except ProtocolError as error:
            raise VictimFailed(f"the victim sent nonsense: {error}") from error
        if messages is None:
            if connection is member.out:
                self._close(member)
            else:
                self._selector.unregister(connection.sock)
                connection.sock.close()
                member.back = None
            return
        answers: list[Input] = []
        for message in messages:
            self._learn(member, message)
            if isinstance(message, Reply) and message.body.tree == member.token != "":
                self._token_came(member)
            elif isinstance(message, Call | RemoteCall | Fetch):
                context_id = message.body.extra[0] if message.body.extra is not None else None
                answers.append(self._mutator.answer(member.live, message.call_id, context_id))
        if answers and member.back is not None:
            self._send(member.peer, True, member.back, answers)

    @staticmethod
    def _learn(member: Member, message: Any) -> None:
        live = member.live
        body = getattr(message, "body", None)
        if body is not None and body.extra is not None:
            context_id, message_id, _ = body.extra
            live.learn(live.contexts, context_id)
            if message_id:
                live.learn(live.sends, (context_id, message_id))
        for fork in body.rrefs if body is not None else ():
            live.learn(live.references, list(fork.rref_id))
        pass_id = getattr(getattr(message, "head", message), "pass_id", None)
        if pass_id is not None:
            live.learn(live.passes, list(pass_id))


def _frame(message: Any) -> bytes:
    header = codec.encode(message)
    return prefix(len(header), 0) + header
