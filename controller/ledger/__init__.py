"""The run's ledger: pure, replayable, checked."""

from controller.ledger.ledger import BrokenInvariant, Ledger

__all__ = ["BrokenInvariant", "Ledger"]
