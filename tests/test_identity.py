"""Credentials: what the kernel or TLS says of a peer, compared with what the peer's record says."""

from __future__ import annotations

import os
import socket

import pytest

from telegrad._transport.identity import Credentials, credentials_of
from telegrad.errors import AuthenticationError

FINGERPRINT = bytes(range(32))


def test_the_process_of_the_record() -> None:
    Credentials(pid=5).check_process(5)
    with pytest.raises(AuthenticationError, match=r"process 5 is at the other end .* record says process 6"):
        Credentials(pid=5).check_process(6)


def test_a_certificate_says_nothing_of_a_process() -> None:
    with pytest.raises(AuthenticationError, match="process None"):
        Credentials(fingerprint=FINGERPRINT).check_process(os.getpid())


def test_the_certificate_of_the_record() -> None:
    Credentials(fingerprint=FINGERPRINT).check_certificate(FINGERPRINT)
    with pytest.raises(AuthenticationError, match=r"certificate 0001020304050607…, .* record says 0{16}…"):
        Credentials(fingerprint=FINGERPRINT).check_certificate(bytes(32))


@pytest.mark.parametrize("recorded", [b"", FINGERPRINT])
def test_a_process_has_the_certificate_of_no_record(recorded: bytes) -> None:
    with pytest.raises(AuthenticationError, match="the certificate none"):
        Credentials(pid=5).check_certificate(recorded)


def test_the_name_of_the_record() -> None:
    credentials = Credentials(fingerprint=FINGERPRINT, names=frozenset({"ps0", "ps1"}))
    credentials.check_name("ps1")
    for name in ("ps2", "ps", "PS1", "*", ""):
        with pytest.raises(AuthenticationError) as refusal:
            credentials.check_name(name)
        assert f"the peer's certificate is for 'ps0, ps1', not for worker {name!r}" in str(refusal.value)
    with pytest.raises(AuthenticationError, match="is for 'no name', not for worker 'ps0'"):
        Credentials(fingerprint=FINGERPRINT).check_name("ps0")


def test_what_a_certificate_says_does_not_fill_the_log() -> None:
    names = frozenset(f"name{number}" for number in range(10_000))
    with pytest.raises(AuthenticationError) as refusal:
        Credentials(names=names).check_name("ps0")
    assert len(str(refusal.value)) < 500


def test_the_kernel_knows_the_process_of_a_unix_socket() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert credentials_of(one, None) == Credentials(pid=os.getpid())
