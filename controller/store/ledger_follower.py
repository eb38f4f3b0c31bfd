"""Copy of the ledger from the journal: a standby keeps it current, a leader starts from it. Beside
it the totals of a projection, which are cached in the ledger's snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from controller.ledger.codec import decode
from controller.ledger.enums import Kind
from controller.ledger.ledger import Ledger
from controller.ledger.state.state import State
from controller.ledger.state.tasks import TaskState
from controller.store.journal import START, Entry, Journal, JournalGap, LedgerSnapshot, Position
from paceline.observe.coverage import CoverageReport
from paceline.observe.projection import Projector, Totals


@dataclass(slots=True)
class LedgerFollower:
    ledger: Ledger
    at: Position
    snapshot_at: str = ""  # Stream id of the snapshot that was loaded; empty: none
    projector: Projector | None = None

    @classmethod
    async def load(cls, journal: Journal, projector: Projector | None = None) -> "LedgerFollower":
        """Loads the newest snapshot and applies the journal after it."""
        while True:
            snapshot = await journal.load_snapshot()
            replica = cls.of_snapshot(snapshot)
            if projector is not None:
                totals = None if snapshot is None else partial(totals_of, snapshot)
                lacks_past = projector.begin(totals, replica.snapshot_at)
                replica.projector = projector
                if snapshot is not None and lacks_past:
                    await replica.tell_past(journal)
            try:
                await replica.catch_up(journal)
                return replica
            except JournalGap:
                # The journal was trimmed after the snapshot was read: there is a newer snapshot.
                newer = await journal.load_snapshot()
                if newer is None or (snapshot is not None and newer.at == snapshot.at):
                    raise

    async def tell_past(self, journal: Journal) -> None:
        """Shows the projector the entries before the snapshot, as far as they are still there."""
        position = START
        while entries := await journal.scan(position, until=self.snapshot_at):
            for entry in entries:
                self._show(entry)
            position = entries[-1].at.entry

    def _show(self, entry: Entry) -> None:
        if self.projector is not None:
            self.projector.post(entry.at.entry, entry.t, entry.records)

    @classmethod
    def of_snapshot(cls, snapshot: LedgerSnapshot | None) -> "LedgerFollower":
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
            for event in entry.decoded:
                self.ledger.apply(event)
            self.at = entry.at
            self._show(entry)
        # Only the leader deletes payloads.
        self.ledger.take_garbage()


def totals_of(snapshot: LedgerSnapshot) -> Totals:
    """The totals as of a snapshot that was read."""
    assert snapshot.observed is not None
    totals = decode(Totals, snapshot.observed)
    totals.coverage.restore(snapshot.state)
    return totals


def coverage_of(totals: Totals, state: State) -> CoverageReport:
    """Report of rows that have no outcome, or two. Linear in tasks in memory and in drops."""
    tasks = state.tasks
    in_flight = (
        task.ordinal
        for task in tasks.records.values()
        if task.kind is Kind.TRAIN and task.state not in (None, TaskState.TRAINED)
    )
    return totals.coverage.report(tasks.cursor, in_flight)
