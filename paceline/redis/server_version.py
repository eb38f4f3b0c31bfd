"""Minimum versions of Redis and Valkey: older servers run the code of whoever reaches them.

Refused is a server with a published flaw that lets a client run code in it, or that needs no
password. Flaws that only crash the server are not in the list: it starts again and loses nothing.
Sources are the advisories and release notes of both projects, read in November 2026. First mended
release of each branch:

    flaw                                         Redis                             Valkey
    CVE-2026-81934       TLS, no password        6.2.24 7.2.16 7.4.11 8.2.9
                                                 8.4.6 8.6.6 8.8.2 8.10.1
    GHSA-fq2f-crmw-q97r  scripts, no password                                      9.1.2
    CVE-2026-56684       TLS                                                       7.2.14 8.0.10 8.1.9
      and CVE-2026-63639 streams                                                   9.0.5 9.1.1
    CVE-2026-23479       blocked clients         7.2.14 7.4.9 8.2.6 8.4.3 8.6.3    7.2.13 8.0.9 8.1.7 9.0.4
      and CVE-2026-25243, CVE-2026-23631
    CVE-2026-27623       no password                                               9.0.3
    CVE-2025-49844       scripts                 6.2.20 7.2.11 7.4.6 8.0.4 8.2.2   7.2.11 8.0.6 8.1.4
      and CVE-2025-46817, CVE-2025-46818, CVE-2025-46819
    CVE-2025-32023       HyperLogLog             6.2.19 7.2.10 7.4.5 8.0.3         8.1.3
      and CVE-2025-48367 no password
    CVE-2024-46981       scripts                 6.2.17 7.2.7 7.4.2

Sources: https://github.com/redis/redis/security/advisories, https://github.com/CVEProject/cvelistV5
and the file 00-RELEASENOTES of each branch of https://github.com/valkey-io/valkey. The record of
CVE-2026-81934 names no mended release of Redis 8.0, so none is accepted.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import BadInput

Number = tuple[int, int, int]

MENDED: dict[str, tuple[Number, ...]] = {
    "redis": (
        (6, 2, 24),
        (7, 2, 16),
        (7, 4, 11),
        (8, 2, 9),
        (8, 4, 6),
        (8, 6, 6),
        (8, 8, 2),
        (8, 10, 1),
    ),
    "valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 2)),
}
"""First release of each branch without a flaw of the list above, oldest branch first."""
WORST = {"redis": "CVE-2026-81934", "valkey": "CVE-2026-56684"}
"""The flaw that an error names."""


@dataclass(frozen=True, slots=True)
class ServerVersion:
    product: str
    """redis or valkey."""
    number: Number

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.number))}"

    def problem(self) -> str:
        """Why this server is refused; empty: it is not."""
        mended = MENDED[self.product]
        least = next((m for m in mended if m[:2] == self.number[:2]), None)
        if least is None and self.number > mended[-1]:
            return ""
        if least is not None and self.number >= least:
            return ""
        wanted = ", ".join(".".join(map(str, m)) for m in mended)
        return (
            f"{self} has flaws that are mended in {self.product} {wanted} and later "
            f"({WORST[self.product]} among them)"
        )


def version_of_info(info: Mapping[str, Any]) -> ServerVersion:
    """From the reply to INFO server. Valkey names itself; its redis_version is for old clients."""
    if "valkey_version" in info:
        return ServerVersion("valkey", _number(str(info["valkey_version"])))
    return ServerVersion("redis", _number(str(info.get("redis_version", ""))))


def server_version(binary: Path) -> ServerVersion:
    """Asks ``binary``, a redis-server or valkey-server. Raises BadInput if it does not say."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{binary} --version: {error}") from error
    product = "valkey" if "valkey" in done.stdout.lower() else "redis"
    return ServerVersion(product, _number(done.stdout))


def _number(text: str) -> Number:
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise BadInput(f"no version in {text[:80]!r} of a Redis server")
    return int(found[1]), int(found[2]), int(found[3])
