"""Minimum versions of Redis and Valkey: older servers run the code of whoever reaches them.

The table has the first release of each branch without a published flaw that lets a client run code
in the server, or that needs no password. A branch that is not in it, and older than the newest one,
is refused. Sources are https://github.com/redis/redis/security/advisories and the release notes of
https://github.com/valkey-io/valkey, read in November 2026.
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


def _numbers(text: str) -> tuple[Number, ...]:
    return tuple(_number(word) for word in text.split())


def _number(text: str) -> Number:
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise BadInput(f"no version in {text[:80]!r} of a Redis server")
    return int(found[1]), int(found[2]), int(found[3])


LEAST = {
    "redis": _numbers("6.2.24 7.2.16 7.4.11 8.2.9 8.4.6 8.6.6 8.8.2 8.10.1"),
    "valkey": _numbers("7.2.14 8.0.10 8.1.9 9.0.5 9.1.2"),
}
"""Least patch release of each branch, oldest branch first."""


@dataclass(frozen=True, slots=True)
class ServerVersion:
    product: str
    """redis or valkey."""
    number: Number

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.number))}"

    def problem(self) -> str:
        """Reason to refuse this server; empty if it is accepted."""
        least = next((m for m in LEAST[self.product] if m[:2] == self.number[:2]), None)
        if self.number >= (least or LEAST[self.product][-1]):
            return ""
        wanted = ", ".join(".".join(map(str, number)) for number in LEAST[self.product])
        return f"{self} has known security flaws: take {self.product} {wanted} or later"


def version_of_info(info: Mapping[str, Any]) -> ServerVersion:
    """Version in the reply to INFO server. Valkey's redis_version is there for old clients."""
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
