"""Totals of a projection: their cache in the ledger's snapshot, and the coverage report."""

from collections.abc import Mapping
from typing import Any

from controller.ledger.codec import decode, encode
from controller.ledger.enums import Kind
from controller.ledger.state.state import State
from controller.ledger.state.tasks import TaskState
from controller.store.journal import LedgerSnapshot
from paceline.observe.coverage import CoverageReport
from paceline.observe.projection import Totals


def encoded(totals: Totals) -> Mapping[str, Any] | None:
    """Without what the ledger's own state in the snapshot tells of tasks under way."""
    return encode(totals)


def totals_of(snapshot: LedgerSnapshot) -> Totals:
    """The totals as of the snapshot. Releases that counted in the ledger left them in its state."""
    state, observed = snapshot.state, snapshot.observed
    if observed is not None:
        totals = decode(Totals, observed)
        totals.restore(state)
        return totals
    coverage, faults = state["tasks"].get("coverage", {}), state.get("faults", {})
    totals = decode(Totals, {"coverage": coverage, "faults": faults})
    totals.restore(state)
    totals.restore_old(state)
    return totals


def coverage_of(totals: Totals, state: State) -> CoverageReport:
    """Report of every row and its outcome. Linear in tasks in memory and in drops."""
    tasks = state.tasks
    in_flight = (
        (task.ordinal, str(task.state))
        for task in tasks.records.values()
        if task.kind is Kind.TRAIN and task.state not in (None, TaskState.TRAINED)
    )
    return totals.coverage.report(
        cursor=tasks.cursor, trained=tasks.trained, dropped=tasks.dropped, in_flight=in_flight
    )
