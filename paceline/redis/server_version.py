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
from pathlib import Path
from typing import Any

from paceline.errors import BadInput

LEAST = {
    "redis": "6.2.24 7.2.16 7.4.11 8.2.9 8.4.6 8.6.6 8.8.2 8.10.1",
    "valkey": "7.2.14 8.0.10 8.1.9 9.0.5 9.1.2",
}
"""Least patch release of each branch, oldest branch first."""


def problem_of(product: str, version: str) -> str:
    """Reason to refuse this server; empty if it is accepted."""
    number, least = _number(version), [_number(word) for word in LEAST[product].split()]
    if number >= next((patch for patch in least if patch[:2] == number[:2]), least[-1]):
        return ""
    wanted = LEAST[product].replace(" ", ", ")
    shown = ".".join(map(str, number))
    return f"{product} {shown} has known security flaws: take {product} {wanted} or later"


def problem_of_info(info: Mapping[str, Any]) -> str:
    """``info``: reply to INFO server. Valkey's redis_version is there for old clients."""
    product = "valkey" if "valkey_version" in info else "redis"
    return problem_of(product, str(info.get(f"{product}_version", "")))


def problem_of_binary(binary: Path) -> str:
    """Asks ``binary``, a redis-server or valkey-server. Raises BadInput if it does not say."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{binary} --version: {error}") from error
    return problem_of("valkey" if "valkey" in done.stdout.lower() else "redis", done.stdout)


def _number(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise BadInput(f"no version in {text[:80]!r} of a Redis server")
    return tuple(map(int, found.groups()))
