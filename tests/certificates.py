"""Certificate files such as a user's own authority would make."""

from __future__ import annotations

import os
from pathlib import Path

from telegrad._transport.tls import make_authority


class OwnAuthority:
    """Signs certificates for workers, and keeps all files in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = make_authority(os.urandom(32))
        (directory / "ca.pem").write_bytes(self._authority.cert_pem)

    def files_for(self, name: str) -> dict[str, str]:
        """The options of a worker whose certificate is for that name."""
        certificate = self._authority.sign(name)
        paths = {kind: self._directory / f"{name}-{kind}.pem" for kind in ("cert", "key")}
        paths["cert"].write_bytes(certificate.cert_pem)
        paths["key"].write_bytes(certificate.key_pem)
        return {
            "tls_certificate": str(paths["cert"]),
            "tls_key": str(paths["key"]),
            "tls_ca": str(self._directory / "ca.pem"),
        }
