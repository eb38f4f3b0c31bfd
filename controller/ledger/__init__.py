"""Ledger of a run: a pure state machine, replayable and checked.

    commands ──► decisions ──► events ──► state ──► views
                    ▲                       │
                    └──────── reads ────────┘

- ``events/`` are the vocabulary, with ``enums`` and ``specs``; ``codec`` is their JSON.
- ``state/`` has a file for each noun, such as ``tasks``, ``steps``, ``fleet`` and ``versions``, and
  ``state`` as a whole. It changes in the ``apply`` of an event only.
- ``decisions/`` has a file for each: ``leases``, ``steps``, ``membership``, ``mesh``, ``run``. A
  command is a decision with its arguments. A decision reads the state, refuses or emits events, and
  changes nothing itself.
- ``views`` are what the shell reads; ``invariants`` are checked after every event.
"""

from controller.ledger.ledger import BrokenInvariant, Ledger

__all__ = ["BrokenInvariant", "Ledger"]
