"""The sockets of one worker: what it listens on, and how it reaches the others."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Literal

from telegrad.agent.agent import Agent
from telegrad.agent.link import Link, StreamLink
from telegrad.agent.peers import Peer, WorkerRecord
from telegrad.errors import AuthenticationError, RendezvousError, UsageError
from telegrad.rpc.options import HOST_VARIABLE, RpcBackendOptions
from telegrad.transport.base import Stream
from telegrad.transport.dial import Address, dial
from telegrad.transport.handshake import Identity
from telegrad.transport.listener import Listener
from telegrad.transport.sockets import is_loopback, listen_tcp, listen_unix
from telegrad.transport.tls import Certificate, load_certificate, make_certificate

_Door = tuple[socket.socket, Literal["unix", "tcp"], Certificate | None]


class Network:
    def __init__(self, identity: Identity, key: bytes, options: RpcBackendOptions, near: str) -> None:
        self.identity = identity
        self._key = key
        self._options = options
        self._doors: list[_Door] = []
        self._early: list[tuple[Stream, Identity]] | None = []  # who came before this worker was ready
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self.addresses: list[Address] = []
        has_secret = options.secret_bytes() is not None
        try:
            if "unix" in options.transports:
                sock, path = listen_unix()
                self._doors.append((sock, "unix", None))
                self.addresses.append(Address("unix", path))
            if "tcp" in options.transports:
                host = _listen_host(options, has_secret, near)
                if has_secret:
                    self._open_tcp(host, has_secret, near)
            if not self.addresses:
                raise UsageError("the transport tcp needs a secret: set the same TELEGRAD_SECRET on every worker")
            self._listener = Listener(self._doors, key, identity, self._admit)
        except BaseException:
            for sock, _, _ in self._doors:
                sock.close()
            raise

    def _open_tcp(self, host: str, has_secret: bool, near: str) -> None:
        options, certificate = self._options, None
        if options.tls_certificate is not None and options.tls_key is not None:
            certificate = load_certificate(options.tls_certificate, options.tls_key)
        elif has_secret and not is_loopback(host):
            certificate = make_certificate()
        sock, (bound, port) = listen_tcp(host, self._options.port)
        self._doors.append((sock, "tcp", certificate))
        if bound in ("0.0.0.0", "::"):
            bound = _address_towards(near)  # it listens on all; the others need one
        self.addresses.append(Address("tcp", bound, port, certificate.fingerprint if certificate else None))

    # --- others reach us ------------------------------------------------------------------------------------------

    def _admit(self, stream: Stream, peer: Identity, where: str) -> None:
        with self._lock:
            if self._early is not None:
                self._early.append((stream, peer))
                return
        self._accept(stream, peer)

    def open(self, agent: Agent) -> None:
        """The worker is ready: lets in those who came early, and everyone after them."""
        with self._lock:
            self._agent = agent
            early, self._early = self._early or [], None
        for stream, peer in early:
            self._accept(stream, peer)

    def _accept(self, stream: Stream, peer: Identity) -> None:
        agent = self._agent
        assert agent is not None
        if agent.peer(peer.name).id != peer.worker_id:  # in a job of open size, this looks a newcomer up
            stream.close()
            raise AuthenticationError(f"a worker that calls itself {peer.name!r} has the id {peer.worker_id}")
        link = StreamLink(stream, peer.worker_id, False, agent.pool, agent, agent.bodies.buffers.lend)
        agent.accepted(link)
        link.start()

    # --- we reach others ------------------------------------------------------------------------------------------

    def dial(self, agent: Agent, peer: Peer) -> Link:
        address = self._choose(agent.me, peer.record)
        ca_file = str(self._options.tls_ca) if self._options.tls_ca is not None else None
        stream = dial(address, self._key, self.identity, peer.id, self._options.heartbeat, ca_file)
        link = StreamLink(stream, peer.id, True, agent.pool, agent, agent.bodies.buffers.lend)
        link.start()
        return link

    def _choose(self, me: WorkerRecord, other: WorkerRecord) -> Address:
        same_host = me.host == other.host
        for address in other.addresses:
            if address.kind in self._options.transports and (same_host or reachable(address)):
                return address
        raise RendezvousError(
            f"worker {other.name!r} listens on {', '.join(map(str, other.addresses))} only, which cannot be reached "
            f"from here over {' or '.join(self._options.transports)}"
        )

    def check(self, me: WorkerRecord, other: WorkerRecord) -> None:
        """A peer that can never be reached is an error at the start, and not at the first call."""
        if other.host != me.host and not any(map(reachable, other.addresses)):
            raise RendezvousError(
                f"worker {other.name!r} is on another host and serves its own host only, because it has no secret: "
                "set the same TELEGRAD_SECRET on every worker (and TELEGRAD_HOST where the address is not found)"
            )

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            early, self._early = self._early or [], None
        for stream, _ in early:
            stream.close()

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptors."""
        self._listener.disown()


def reachable(address: Address) -> bool:
    """From another host."""
    return address.kind == "tcp" and not is_loopback(address.host)


def host_id() -> str:
    """Equal for two processes that can meet over Unix sockets: one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _listen_host(options: RpcBackendOptions, has_secret: bool, near: str) -> str:
    host = options.host or os.environ.get(HOST_VARIABLE)
    if host is not None:
        if not has_secret and not is_loopback(host):
            raise UsageError(
                f"refusing to listen on {host} without a secret, since anyone who reaches it could run code here: set "
                "TELEGRAD_SECRET (or options.secret) to the same value on every worker"
            )
        return host
    return _address_towards(near) if has_secret else "127.0.0.1"


def _address_towards(near: str) -> str:
    """This host's address on the way to ``near``; connecting a datagram socket sends nothing, but asks the routes."""
    if not near or is_loopback(near):
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(near, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise RendezvousError(f"no way to {near!r}: {error}. Name this host's own address in TELEGRAD_HOST") from error
