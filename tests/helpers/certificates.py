"""A certificate for 127.0.0.1 that nobody else has signed."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest


def self_signed(directory: Path) -> tuple[Path, Path]:
    """(certificate, key) in ``directory``, good for two days; skips the test without openssl."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip(f"openssl cannot make a certificate at {datetime.date.today()}")
    key.chmod(0o600)
    return certificate, key
