"""Coverage report: what became of every row in every data-set epoch, and how the dropped groups
compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from controller.ledger.enums import Kind
from controller.ledger.state.coverage import Tally
from controller.ledger.state.state import State
from controller.ledger.state.tasks import TaskState, ordinal_of
from controller.ledger.state.token_ages import masked_groups
from paceline.dataset.data_order import DataOrder

ROWS_NAMED = 20
MASKED = "trained in part"
"""Outcome of groups that were trained without their oldest tokens. They count as trained, too."""
TRAINED = str(TaskState.TRAINED)
_IN_FLIGHT = tuple(str(s) for s in TaskState if s is not TaskState.TRAINED)


@dataclass(slots=True)
class EpochCoverage:
    """One pass over a source: each of its rows is counted in exactly one of these, unless it was
    repeated."""

    epoch: int
    rows: int
    source: str = ""
    """Empty: the run has one source, without a name."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    """pending, leased, ready, in_step."""
    to_come: int = 0
    """Rows that were not dispatched yet."""
    passed_over: int = 0
    """Rows that the curriculum left out."""
    skipped: int = 0
    """Passed by, and neither trained nor dropped nor on their way."""
    twice: int = 0
    """Finished or held more than once."""
    unrecorded: int = 0
    """Finished under a release that did not record which rows."""


@dataclass(slots=True)
class Comparison:
    """Groups with one outcome beside those that were trained."""

    outcome: str
    """trained, trained in part (tokens were masked for their age), or the reason of a drop."""
    groups: int
    share: float
    """Of all finished groups."""
    measured: int
    """Those of them whose completions the ledger has seen: the means are over these."""
    completion_tokens: float | None
    reward: float | None


@dataclass(slots=True)
class CoverageReport:
    rows: int = 0
    shuffle: bool = True
    seed: int = 0
    epochs: list[EpochCoverage] = field(default_factory=list)
    """Those that were begun."""
    compared: list[Comparison] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Names of the sources, in the order of their rows."""
    skipped_rows: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, row) of the first that were skipped, and those that were finished twice."""
    repeated_rows: list[tuple[int, int]] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        return sum(e.skipped for e in self.epochs)

    @property
    def twice(self) -> int:
        return sum(e.twice for e in self.epochs)

    def problems(self) -> Iterator[str]:
        for many, what, named in (
            (self.skipped, "skipped", self.skipped_rows),
            (self.twice, "counted twice", self.repeated_rows),
        ):
            rows = ", ".join(f"row {row} of epoch {epoch}" for epoch, row in named[:5])
            if many:
                named_or_not = (
                    f": {rows}" if rows else ", under a release that did not record which"
                )
                yield f"{many} rows were {what}{named_or_not}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": self.skipped, "twice": self.twice}


def coverage_of(state: State) -> CoverageReport:
    """The report, from the ledger's memory and the row sampler. Linear in tasks in memory and in
    drops."""
    if state.run_spec is None:
        return CoverageReport()
    run = state.run
    report = CoverageReport(run.dataset_rows, run.shuffle, run.seed)
    spans = sorted(_spans(state))
    end = max([state.tasks.cursor, *(stop for _, stop, _ in spans)])
    begun = _Begun(run.order, end)
    report.epochs = [begun.epochs[key] for key in sorted(begun.epochs)]
    report.sources = [source.name for source in run.sources]
    unrecorded = _unrecorded(state)
    position = 0
    for start, stop, outcome in [*spans, (end, end, "")]:
        if start > position:
            unrecorded -= _gap(begun, state, report, position, start, unrecorded)
        again = min(stop, position)
        if start < again:
            _repeated(begun, report, start, again)
        for epoch, many in begun.split(max(start, position), stop):
            if outcome == TRAINED:
                epoch.trained += many
            elif outcome in _IN_FLIGHT:
                epoch.in_flight[outcome] += many
            else:
                epoch.dropped[outcome] += many
        position = max(position, stop)
    for ordinal in state.tasks.coverage.repeated:
        _repeated(begun, report, ordinal, ordinal + 1)
    for key, many in state.tasks.coverage.passed.items():
        epoch = begun.of(key)
        epoch.trained -= many
        epoch.passed_over += many
    report.compared = list(_compared(state))
    return report


class _Begun:
    """The epochs of each source that were begun by the task before ``end``."""

    def __init__(self, order: DataOrder, end: int) -> None:
        self.order = order
        self.epochs: dict[tuple[int, int], EpochCoverage] = {}
        for (epoch, number), many in order.count(0, end).items():
            rows = order.rows_of(number)
            found = EpochCoverage(epoch, rows, order.names[number], to_come=rows - many)
            self.epochs[epoch, number] = found

    def split(self, start: int, stop: int) -> Iterator[tuple[EpochCoverage, int]]:
        """The tasks of the span, by epoch."""
        if start < stop:
            for key, many in self.order.count(start, stop).items():
                yield self.epochs[key], many

    def of(self, key: str) -> EpochCoverage:
        """``key``: as passed_key writes it."""
        epoch, number = map(int, key.split("."))
        return self.epochs[epoch, number]


def _spans(state: State) -> Iterator[tuple[int, int, str]]:
    yield from state.tasks.coverage.finished()
    for task in state.tasks.records.values():
        if task.kind is Kind.TRAIN and task.state is not None:
            ordinal = ordinal_of(task.task_id)
            yield ordinal, ordinal + 1, str(task.state)


def _unrecorded(state: State) -> int:
    """Finished tasks of which only the number is known."""
    tasks = state.tasks
    covered = tasks.trained - sum(len(groups) for groups in state.steps.history.values())
    covered += tasks.passed_over
    recorded = tasks.coverage.count() + len(tasks.coverage.repeated)
    return covered + tasks.dropped.total() - recorded


def _gap(
    begun: _Begun, state: State, report: CoverageReport, start: int, stop: int, unrecorded: int
) -> int:
    """Rows without an outcome are skipped, but for ``unrecorded`` ones that an earlier release has
    finished. How many of those are here."""
    upgrade = min(max(start, state.tasks.coverage.recorded_from), stop)
    known = min(upgrade - start, max(0, unrecorded))
    for epoch, many in begun.split(start, start + known):
        epoch.unrecorded += many
    for epoch, many in begun.split(start + known, stop):
        epoch.skipped += many
    _name(begun.order, report.skipped_rows, upgrade, stop)
    return known


def _repeated(begun: _Begun, report: CoverageReport, start: int, stop: int) -> None:
    for epoch, many in begun.split(start, stop):
        epoch.twice += many
    _name(begun.order, report.repeated_rows, start, stop)


def _name(order: DataOrder, named: list[tuple[int, int]], start: int, stop: int) -> None:
    for ordinal in range(start, min(stop, start + ROWS_NAMED - len(named))):
        named.append(order.place(ordinal))


def _compared(state: State) -> Iterator[Comparison]:
    book = state.tasks
    coverage = book.coverage
    trained = Tally(**asdict(coverage.trained_tally))
    for task in book.records.values():
        if task.kind is Kind.TRAIN and task.state is TaskState.TRAINED and task.group is not None:
            trained.add(task.group)
    total = book.trained + book.dropped.total()
    if total:
        yield _comparison(TRAINED, book.trained, total, trained)
    masked, tokens = Tally(**asdict(coverage.masked_tally)), coverage.masked_tokens
    for group, lost in masked_groups(state, state.versions.step):
        masked.add(group)
        tokens += lost
    if masked.groups:
        outcome = f"{MASKED}, {tokens / trained.tokens:.1%} of the tokens"
        yield _comparison(outcome, masked.groups, total, masked)
    for reason, groups in sorted(book.dropped.items()):
        yield _comparison(reason, groups, total, coverage.dropped_tally.get(reason, Tally()))


def _comparison(outcome: str, groups: int, total: int, tally: Tally) -> Comparison:
    means: tuple[float | None, float | None] = None, None
    if tally.sequences:
        means = tally.tokens / tally.sequences, tally.reward_sum / tally.sequences
    return Comparison(outcome, groups, groups / total, tally.groups, *means)
