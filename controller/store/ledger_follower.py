"""Copy of the ledger made from the journal: a standby keeps it current, and a leader starts from
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.ledger.events import from_json
from controller.ledger.ledger import Ledger
from controller.store.journal import Entry, Journal, JournalGap, LedgerSnapshot, Position


@dataclass(slots=True)
class LedgerFollower:
    """``ledger`` is the state at journal position ``at``."""

    ledger: Ledger
    at: Position
    snapshot_at: str = ""
    """Stream id of the snapshot that was loaded; empty: none."""

    @classmethod
    async def load(cls, journal: Journal) -> LedgerFollower:
        """Loads the newest snapshot and applies the journal after it."""
        while True:
            snapshot = await journal.load_snapshot()
            replica = cls.of_snapshot(snapshot)
            try:
                await replica.catch_up(journal)
                return replica
            except JournalGap:
                # The journal was trimmed after the snapshot was read: there is a newer snapshot.
                newer = await journal.load_snapshot()
                if newer is None or (snapshot is not None and newer.at == snapshot.at):
                    raise

    @classmethod
    def of_snapshot(cls, snapshot: LedgerSnapshot | None) -> LedgerFollower:
        if snapshot is None:
            return cls(Ledger(), Position())
        return cls(Ledger.from_snapshot(dict(snapshot.state)), snapshot.at, snapshot.at.entry)

    async def catch_up(self, journal: Journal) -> int:
        """Applies all entries of the journal; returns their number."""
        applied = 0
        while entries := await journal.read(self.at):
            self.apply(entries)
            applied += len(entries)
        return applied

    async def follow(self, journal: Journal, *, block_ms: int) -> Sequence[Entry]:
        """Waits up to ``block_ms`` for entries; applies and returns them."""
        entries = await journal.read(self.at, block_ms=block_ms)
        self.apply(entries)
        return entries

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for event in entry.events:
                self.ledger.apply(from_json(event))
            self.at = entry.at
        # Only the leader deletes payloads.
        self.ledger.take_garbage()
