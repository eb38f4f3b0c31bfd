"""Decisions of the ledger, by subject: pure functions from a command and the state to events. Each
module registers its decisions when it is imported; see ``decider.decides``."""

from controller.ledger.decisions import (
    faults,
    held_out,
    leases,
    links,
    membership,
    mesh,
    rejections,
    run,
    settings,
    standby_workers,
    steps,
)

__all__ = [
    "faults",
    "held_out",
    "leases",
    "links",
    "membership",
    "mesh",
    "rejections",
    "run",
    "settings",
    "standby_workers",
    "steps",
]
