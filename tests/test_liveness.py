"""Finding dead peers: with links that only say what the test tells them, and real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from planes import IMPLEMENTATIONS, linked
from telegrad._agent.liveness import Liveness
from telegrad._agent.peers import Peer, WorkerRecord
from telegrad._transport.sockets import SocketStream
from telegrad._wire.values import Route

HOST_SECONDS = 8.0

Child = subprocess.Popen[bytes]


class FakeLink:
    def __init__(self, pid: int | None = None, peer_id: int = 1) -> None:
        self.peer_id = peer_id
        self.pid = pid
        self.silent_for = 0.0

    def host_is_silent(self, seconds: float) -> bool:
        return self.silent_for >= seconds


class Watch:
    """A watch over one peer, and what it reports."""

    def __init__(self) -> None:
        self.peer = Peer(WorkerRecord(1, "b"), Route(1))
        self.lost: list[tuple[FakeLink, str]] = []
        self.liveness = Liveness(HOST_SECONDS, lambda link, reason: self.lost.append((link, reason)))  # type: ignore[arg-type]

    def link(self, pid: int | None) -> FakeLink:
        link = FakeLink(pid)
        self.peer.accepted.add(link)  # type: ignore[arg-type]
        self.liveness.adopt(link)  # type: ignore[arg-type]
        return link

    def look(self) -> list[tuple[FakeLink, str]]:
        """What one look reports."""
        self.lost.clear()
        self.liveness.look([self.peer])
        return list(self.lost)


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.liveness.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts processes, each with a group of its own, and ends them and their children."""
    children: list[Child] = []

    def start(*command: str, keep: int | None = None) -> Child:
        fds = () if keep is None else (keep,)
        children.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, start_new_session=True
            )
        )
        return children[-1]

    yield start
    for child in children:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.communicate()


@pytest.fixture
def process(start: Callable[..., Child]) -> Child:
    """One that lives until it is killed."""
    return start("cat")


def kill(process: Child) -> None:
    """It has ended when this returns, but is a zombie still, as a worker is until its parent asks for it."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_process_that_lives_is_left_in_peace(watch: Watch, process: Child) -> None:
    watch.link(process.pid)
    assert [watch.look() for _ in range(3)] == [[], [], []]


def test_a_process_that_was_stopped_is_not_dead(watch: Watch, process: Child) -> None:
    watch.link(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert [watch.look() for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("reaped", [False, True])
def test_a_process_that_has_ended_is_reported_at_the_second_look(watch: Watch, process: Child, reaped: bool) -> None:
    """Between the two, what it sent last is read: a goodbye, or the end of its connection."""
    link = watch.link(process.pid)
    kill(process)
    if reaped:
        process.wait()
    assert watch.look() == []
    assert watch.look() == [(link, "its process has ended")]


def test_all_links_of_a_process_end_with_it(watch: Watch, process: Child) -> None:
    links = {watch.link(process.pid) for _ in range(3)}
    kill(process)
    watch.look()
    lost = watch.look()
    assert {link for link, _ in lost} == links
    assert len(lost) == 3


def test_a_process_that_has_ended_before_its_link_began(watch: Watch, process: Child) -> None:
    """Its socket tells; there is nothing to watch any more, and no error."""
    kill(process)
    process.wait()
    watch.link(process.pid)
    assert [watch.look() for _ in range(3)] == [[], [], []]


def test_a_link_without_a_process_is_not_watched(watch: Watch) -> None:
    before = descriptors()
    watch.link(None)
    assert [watch.look() for _ in range(3)] == [[], [], []]
    assert descriptors() == before


def test_a_child_that_holds_the_socket_open_does_not_hide_the_end(watch: Watch, start: Callable[..., Child]) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        process = start("sh", "-c", "sleep 1000 & echo started; exec cat", keep=theirs.fileno())
        theirs.close()
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        link = watch.link(process.pid)
        kill(process)
        watch.look()
        assert watch.look() == [(link, "its process has ended")]
        with pytest.raises(BlockingIOError):
            mine.recv(1, socket.MSG_DONTWAIT)  # the socket has nothing to say of it


# --- descriptors ------------------------------------------------------------------------------------------------------


def test_links_of_one_peer_have_one_descriptor_which_goes_with_the_last_of_them(watch: Watch, process: Child) -> None:
    before = descriptors()
    links = [watch.link(process.pid) for _ in range(3)]
    assert descriptors() == before + 1
    for link in links:
        watch.look()
        assert descriptors() == before + 1
        watch.peer.forget(link)  # type: ignore[arg-type]
    watch.look()
    assert descriptors() == before
    watch.link(process.pid)
    assert descriptors() == before + 1, "and it comes again with the next"


def test_close_gives_all_descriptors_back(start: Callable[..., Child]) -> None:
    processes = [start("cat") for _ in range(3)]
    before = descriptors()
    liveness = Liveness(HOST_SECONDS, lambda link, reason: None)
    for number, process in enumerate(processes):
        liveness.adopt(FakeLink(process.pid, number))  # type: ignore[arg-type]
    assert descriptors() == before + 3
    liveness.close()
    liveness.close()
    assert descriptors() == before


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_respond_loses_its_links(watch: Watch) -> None:
    silent, quiet = watch.link(None), watch.link(None)
    silent.silent_for, quiet.silent_for = HOST_SECONDS, HOST_SECONDS / 2
    assert watch.look() == [(silent, "its host has not responded for 8 s")]


def test_the_host_of_a_unix_socket_responds() -> None:
    one, two = (SocketStream(sock) for sock in socket.socketpair())
    assert one.send([bytes(8 << 20)], 0.0), "the peer reads nothing"
    assert not one.host_is_silent(0.0)
    one.close()
    two.close()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_link_within_the_process_has_no_host_to_watch(implementation: str) -> None:
    with linked(IMPLEMENTATIONS[implementation], "loopback") as ends:
        for end in ends:
            assert end.link.pid is None
            assert not end.link.host_is_silent(0.0)
