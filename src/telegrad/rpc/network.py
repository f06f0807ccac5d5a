"""The sockets of one worker: where it listens, how it connects to other workers, and how it identifies a peer.

Within a host workers use Unix sockets, on which the kernel reports the process at the other end.  Between hosts they
use TCP with mutual TLS, which gives the certificate of the other end.  Both are compared with the peer's signed record.
Without a secret there is no TCP.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from telegrad._agent.agent import Agent
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._core.interface import Link
from telegrad._transport.base import Stream
from telegrad._transport.dial import Address, dial
from telegrad._transport.handshake import Identity
from telegrad._transport.identity import Credentials
from telegrad._transport.listener import Listener, ListeningSocket
from telegrad._transport.sockets import is_loopback, listen_tcp, listen_unix
from telegrad._transport.tls import Authority, load_authority, load_certificate, make_authority, tls_end
from telegrad.errors import AuthenticationError, RendezvousError, UsageError
from telegrad.rpc.options import HOST_VARIABLE, RpcBackendOptions

_MOST_LINKS = 2  # connections from one worker to another: one for its calls, and one if a signal handler dials too


class Network:
    """``key`` signs records.  Links are authenticated with another key, which ``open`` gets when all have joined."""

    def __init__(self, identity: Identity, key: bytes, options: RpcBackendOptions, near: str) -> None:
        self.identity = identity
        self._options = options
        self._transports = usable_transports(options)
        self._listening: list[ListeningSocket] = []
        self._authority: Authority | None = None
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._link_key = b""
        self.addresses: list[Address] = []
        try:
            if "unix" in self._transports:
                sock, path = listen_unix()
                self._listening.append(ListeningSocket(sock))
                self.addresses.append(Address("unix", path))
            if "tcp" in self._transports:
                self._open_tcp(key, near)
        except BaseException:
            self.close()
            raise

    def _open_tcp(self, key: bytes, near: str) -> None:
        options = self._options
        if options.tls_certificate is not None and options.tls_key is not None and options.tls_ca is not None:
            self._authority = load_authority(options.tls_ca)
            certificate = load_certificate(options.tls_certificate, options.tls_key)
        else:
            self._authority = make_authority(key)
            certificate = self._authority.sign(self.identity.name)
        self._client_tls = tls_end(certificate, self._authority, server_side=False)
        sock, (bound, port) = listen_tcp(_listen_host(options, near), options.port)
        self._listening.append(ListeningSocket(sock, tls_end(certificate, self._authority, server_side=True)))
        if bound in ("0.0.0.0", "::"):
            bound = _address_towards(near)  # it listens on all; the others need one
        self.addresses.append(Address("tcp", bound, port, certificate.fingerprint))

    # --- incoming -------------------------------------------------------------------------------------------------

    def open(self, agent: Agent, link_key: bytes) -> None:
        """Starts to accept connections.  Those that were made before wait in the kernel."""

        def admit(stream: Stream, peer: Identity, credentials: Credentials) -> None:
            if agent.knows(peer.worker_id):
                self._accept(agent, stream, peer, credentials)
            else:  # a new worker in a job of open size: reading its record from the store may take long
                agent.submit(self._accept_newcomer, agent, stream, peer, credentials)

        with self._lock:
            if not self._closed:
                self._link_key = link_key
                self._listener = Listener(self._listening, link_key, self.identity, admit)

    def _accept_newcomer(self, agent: Agent, stream: Stream, peer: Identity, credentials: Credentials) -> None:
        assert self._listener is not None
        try:
            self._accept(agent, stream, peer, credentials)
        except Exception as error:
            stream.close()
            self._listener.refused(f"a worker that calls itself {peer.name!r}", str(error))

    def _accept(self, agent: Agent, stream: Stream, peer: Identity, credentials: Credentials) -> None:
        if peer.worker_id == self.identity.worker_id:
            raise AuthenticationError("the peer calls itself by the id of this worker")
        known = agent.peer(peer.worker_id)
        if known.state is not PeerState.KNOWN:
            raise AuthenticationError(f"worker {peer.name!r} counts as {known.state.value} here, and cannot come back")
        if len(known.accepted) >= _MOST_LINKS:
            raise AuthenticationError(f"worker {peer.name!r} has {_MOST_LINKS} connections to this worker already")
        record = known.record
        if (record.name, record.nonce) != (peer.name, peer.nonce):
            raise AuthenticationError(
                f"a worker that calls itself {peer.name!r} ({peer.worker_id}) is not the one of that id in this job"
            )
        self._check(record, agent.me, credentials)
        agent.accepted(self._link(agent, stream, record, False, credentials.pid))

    def _link(self, agent: Agent, stream: Stream, record: WorkerRecord, dialled: bool, pid: int | None) -> Link:
        stream.watch_host(self._options.heartbeat)
        return agent.plane.adopt(stream, record.worker_id, dialled, pid)

    def _check(self, record: WorkerRecord, me: WorkerRecord, credentials: Credentials) -> None:
        """Raises unless the process or certificate at the other end is that of the record."""
        if credentials.fingerprint is None:
            if record.host != me.host:
                raise AuthenticationError(f"worker {record.name!r} is on another host: it cannot come by a Unix socket")
            credentials.check_process(record.pid)
            return
        credentials.check_certificate(_fingerprint_of(record))
        if self._authority is not None and self._authority.names_workers:
            credentials.check_name(record.name)

    # --- outgoing -------------------------------------------------------------------------------------------------

    def dial(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        record = peer.record
        address = self._choose(agent.me, record)
        stream = dial(
            address,
            self._link_key,
            self.identity,
            Identity(record.worker_id, record.name, record.nonce),
            timeout,
            lambda credentials: self._check(record, agent.me, credentials),
            self._client_tls if address.kind == "tcp" else None,
        )
        return self._link(agent, stream, record, True, record.pid if address.kind == "unix" else None)

    def _choose(self, me: WorkerRecord, other: WorkerRecord) -> Address:
        same_host = me.host == other.host
        for address in other.addresses:
            if address.kind in self._transports and (same_host or reachable(address)):
                return address
        raise RendezvousError(
            f"worker {other.name!r} listens on {', '.join(map(str, other.addresses))} only, which cannot be reached "
            f"from here over {' or '.join(self._transports)}"
        )

    def check(self, me: WorkerRecord, other: WorkerRecord) -> None:
        """Raises if a peer can never be reached, so that ``init_rpc`` fails and not the first call."""
        if other.host != me.host and not any(map(reachable, other.addresses)):
            raise RendezvousError(
                f"worker {other.name!r} is on another host and serves its own host only, because it has no secret: "
                "set the same TELEGRAD_SECRET on every worker (and TELEGRAD_HOST where the address is not found)"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listener = self._listener
        if listener is not None:
            listener.close()
            return
        for listening in self._listening:
            listening.sock.close()

    def disown(self) -> None:
        """In a forked child: closes this process's descriptors."""
        if self._listener is not None:
            self._listener.disown()
            return
        for listening in self._listening:
            listening.sock.close()


def usable_transports(options: RpcBackendOptions) -> tuple[str, ...]:
    """Confines a job without a secret to its host: any process that reaches a TCP port could claim to be a worker."""
    if options.secret_bytes() is not None:
        return options.transports
    if "unix" not in options.transports:
        raise UsageError("transport 'tcp' needs a secret: set TELEGRAD_SECRET to the same value on every worker")
    host = options.host or os.environ.get(HOST_VARIABLE)
    if host is not None and not is_loopback(host):
        raise UsageError(
            f"refusing to listen on {host} without a secret, since any program that reaches it could run code here: "
            "set TELEGRAD_SECRET (or options.secret) to the same value on every worker"
        )
    return ("unix",)


def reachable(address: Address) -> bool:
    """The TCP address that other hosts can use for this worker."""
    return address.kind == "tcp" and not is_loopback(address.host)


def host_id() -> str:
    """Equal for two processes that can meet over Unix sockets and see each other's process ids.

    These share a kernel, a network namespace and a namespace of processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def _fingerprint_of(record: WorkerRecord) -> bytes:
    for address in record.addresses:
        if address.kind == "tcp":
            return address.fingerprint
    raise AuthenticationError(f"worker {record.name!r} does not use TCP, its record says")


def _listen_host(options: RpcBackendOptions, near: str) -> str:
    return options.host or os.environ.get(HOST_VARIABLE) or _address_towards(near)


def _address_towards(near: str) -> str:
    """This host's address on the route to ``near``.  Connecting a datagram socket finds the route and sends nothing."""
    if not near or is_loopback(near):
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(near, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise RendezvousError(f"no route to {near!r}: {error}. Set TELEGRAD_HOST to this host's own address") from error
