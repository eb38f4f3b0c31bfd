"""Catalogue of events: everything that can happen to a run, as the journal keeps it.

A class has the event's fields and everything that the controller does with it: its effect on the
state (``apply``), the long polls it ``wakes``, whether it ``directs`` workers, whether it is
``listed`` for people, its ``severity`` and its ``text()``.

In the journal an event is a JSON object with ``type`` and its fields; ``to_json`` and ``from_json``
are exact inverses.
"""

from collections.abc import Mapping
from typing import Any

from controller.ledger.codec import decode, encode
from controller.ledger.events.event import TYPES as TYPES
from controller.ledger.events.event import Event as Event
from controller.ledger.events.event import Topic as Topic
from controller.ledger.events.fleet import *
from controller.ledger.events.hosts import *
from controller.ledger.events.run import *
from controller.ledger.events.seats import *
from controller.ledger.events.steps import *
from controller.ledger.events.tasks import *


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object: ``type`` and its fields."""
    return {"type": type(event).__name__, **encode(event)}


def from_json(data: Mapping[str, Any]) -> Event:
    """Inverse of ``to_json``. Raises ValueError for an unknown type and KeyError for a missing
    field that has no default."""
    kind = TYPES.get(data["type"])
    if kind is None:
        raise ValueError(f"the journal has an event of unknown type {data['type']!r}")
    return decode(kind, data)
