"""Minimum version of a Redis or Valkey server: older ones run code of whoever can send them a script.

The versions are those that mend CVE-2025-49844 (a script can run code in the server) and the flaws that
were published with it, one for each branch that its maintainers still mend.
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
    "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4), (9, 0, 0)),
}
"""First mended release of each branch, oldest branch first."""


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
            "(CVE-2025-49844 among them)"
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
