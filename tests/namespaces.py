"""Several hosts: network namespaces of this machine with a cable between them.  Needs root and the ``ip`` tool."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the ip tool (iproute2), to make network namespaces"
    probe = f"tg{secrets.token_hex(3)}p"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        return f"this system does not allow network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=10, check=False)
    return ""


_reason = _why_not()
needs_namespaces = pytest.mark.skipif(bool(_reason), reason=_reason or "-")


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, each with one end of a virtual cable; names are unique to this run."""

    namespaces: tuple[str, str]
    interfaces: tuple[str, str]

    def cut(self) -> None:
        ip("-n", self.namespaces[1], "link", "set", self.interfaces[1], "down")

    def mend(self) -> None:
        ip("-n", self.namespaces[1], "link", "set", self.interfaces[1], "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    tag = f"tg{secrets.token_hex(3)}"
    made = Hosts((f"{tag}a", f"{tag}b"), (f"{tag}x", f"{tag}y"))
    try:
        for namespace in made.namespaces:
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        first, second = made.interfaces
        ip("-n", made.namespaces[0], "link", "add", first, "type", "veth", "peer", second, "netns", made.namespaces[1])
        for namespace, interface, address in zip(made.namespaces, made.interfaces, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
        yield made
    finally:
        for namespace in made.namespaces:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=10, check=False)
