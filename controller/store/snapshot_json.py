"""JSON of a snapshot in slices: the event loop turns between them, however much the snapshot holds.

A thread would not help, because the encoder keeps the interpreter to itself from beginning to end. With 30 % of
1,000,000 tasks dropped, coverage is 0.84 million numbers: 6 MB, and 0.1 s in one piece. With 10,000,000 tasks
one piece would outlast the lease.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

SLICE = 4096
"""Items of an array in one piece: under 1 ms of numbers."""
TURN = 65_536
"""Characters between two turns of the event loop: some milliseconds."""

_compact = json.JSONEncoder(separators=(",", ":")).encode


async def snapshot_json(snapshot: Any) -> str:
    """The same text as ``json.dumps`` in compact form. The snapshot must not change meanwhile."""
    parts: list[str] = []
    since = 0
    for part in slices(snapshot):
        parts.append(part)
        since += len(part)
        if since >= TURN:
            since = 0
            await asyncio.sleep(0)
    return "".join(parts)


def slices(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' * (number > 0)}{_compact(name)}:"
            yield from slices(item)
        yield "}"
    elif isinstance(value, list | tuple) and len(value) > SLICE:
        yield "["
        items, comma = iter(value), ""
        while some := list(islice(items, SLICE)):
            yield comma + _compact(some)[1:-1]
            comma = ","
        yield "]"
    else:
        yield _compact(value)
