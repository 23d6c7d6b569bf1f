"""A small certificate authority for one test run, made with the ``openssl`` program."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NO_OPENSSL = "NO OPENSSL PROGRAM: there are no certificates to test with; TLS to Redis is NOT TESTED"


def have_openssl() -> bool:
    return shutil.which("openssl") is not None


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates; ``certificate`` is its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key, self.certificate = folder / f"{name}.key", folder / f"{name}.pem"
        subject = ["-subj", f"/CN={name}", "-days", "2"]
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self._key, "-out", self.certificate, *subject
        )

    def sign(self, name: str, host: str = "IP:127.0.0.1") -> Pair:
        """A certificate for that host, or for a client."""
        key, request, made = (self._folder / f"{self._name}-{name}.{end}" for end in ("key", "csr", "pem"))
        extra = self._folder / f"{name}.ext"
        extra.write_text(f"subjectAltName={host}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signer = ["-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extra]
        _openssl("x509", "-req", "-in", request, "-out", made, *signer)
        return Pair(made, key)


def _openssl(*args: object) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)
