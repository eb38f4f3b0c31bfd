"""JSON of a snapshot in pieces: the event loop turns between its slices, however much the snapshot
holds. A thread would not help, because the encoder keeps the interpreter to itself from beginning
to end. With 30 % of 1,000,000 tasks dropped, coverage is 0.84 million numbers: 6 MB, and 0.1 s in
one piece. With 10,000,000 tasks one piece would outlast the lease. Tasks in memory are encoded as
they are written: see controller.ledger.state.tasks. Nobody ever holds the whole text."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from controller.ledger.state.tasks import Moment

SLICE = 4096  # Items of an array in one piece: under 1 ms of numbers
TURN = 65_536  # Characters between two turns of the event loop: some milliseconds

PIECE = 1 << 20  # Characters of a piece, which is one write to Redis

_compact = json.JSONEncoder(separators=(",", ":")).encode


async def snapshot_pieces(snapshot: Any) -> AsyncIterator[str]:
    """The same text as ``json.dumps`` in compact form, in pieces of at most ``PIECE`` characters
    and a slice. The snapshot must not change meanwhile."""
    parts: list[str] = []
    length = since = 0
    for part in slices(snapshot):
        parts.append(part)
        length += len(part)
        since += len(part)
        if length >= PIECE:
            yield "".join(parts)
            parts.clear()
            length = 0
        if since >= TURN:
            since = 0
            await asyncio.sleep(0)
    yield "".join(parts)


def slices(value: Any) -> Iterator[str]:
    if isinstance(value, dict | Moment):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' * (number > 0)}{_compact(name)}:"
            yield from slices(item)
        yield "}"
    elif isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | dict):
        # Each may be long, as the groups of a step are.
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ","
            yield from slices(item)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > SLICE:
        yield "["
        items, comma = iter(value), ""
        while some := list(islice(items, SLICE)):
            yield comma + _compact(some)[1:-1]
            comma = ","
        yield "]"
    else:
        yield _compact(value)
