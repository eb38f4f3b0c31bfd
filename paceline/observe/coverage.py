"""Coverage of the data: what became of every row in every pass over the data. Finished tasks are
kept as spans of their ordinals, so that every row can be accounted for after the journal was
trimmed. Neighbouring ordinals merge: a snapshot holds about 16 bytes for each drop, whatever the
number of trained tasks. A rollback takes the steps back that no checkpoint covers."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.dataset.data_order import DataOrder, DataSource
from paceline.errors import plural
from paceline.observe.vocabulary import EventType

Spans = list[int]
"""Ascending and flat: [start, end, start, end, ...]; an end is not part of its span."""
RUN_ENDED = "run_ended"
ROWS_NAMED = 20
_NOT_STORED = {"transient": True}
"""Part of the ledger's own snapshot, from which ``restore`` takes it."""


def add(spans: Spans, ordinal: int) -> bool:
    """Adds ``ordinal``; False, with nothing changed, if it is there already."""
    at = bisect_right(spans, ordinal)
    if at % 2:
        return False
    joins_left = at > 0 and spans[at - 1] == ordinal
    joins_right = at < len(spans) and spans[at] == ordinal + 1
    if joins_left and joins_right:
        del spans[at - 1 : at + 1]
    elif joins_left:
        spans[at - 1] += 1
    elif joins_right:
        spans[at] -= 1
    else:
        spans[at:at] = [ordinal, ordinal + 1]
    return True


def remove(spans: Spans, ordinal: int) -> None:
    at = bisect_right(spans, ordinal) - 1
    start, end = spans[at], spans[at + 1]
    left = [start, ordinal] if start < ordinal else []
    right = [ordinal + 1, end] if ordinal + 1 < end else []
    spans[at : at + 2] = left + right


def contains(spans: Spans, ordinal: int) -> bool:
    return bisect_right(spans, ordinal) % 2 == 1


def pairs(spans: Spans) -> Iterator[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)


def count(spans: Spans) -> int:
    return sum(end - start for start, end in pairs(spans))


def order_of(spec: Mapping[str, Any]) -> DataOrder:
    """``spec``: the run's, as it is journalled."""
    sources = tuple(DataSource(*source) for source in spec["sources"])
    return DataOrder(spec["seed"], spec["dataset_rows"], spec["shuffle"], sources)


@dataclass(slots=True)
class Coverage:
    trained: Spans = field(default_factory=list)  # On the surviving line
    dropped: dict[str, Spans] = field(default_factory=dict)  # By reason
    repeated: list[int] = field(default_factory=list)
    """Tasks that were finished more than once. Always empty unless a promise is broken."""
    order: DataOrder | None = field(default=None, metadata=_NOT_STORED)
    steps: dict[int, list[int]] = field(default_factory=dict, metadata=_NOT_STORED)
    """Ordinals of the committed steps that a rollback may undo, and of the open one."""
    open: int = field(default=0, metadata=_NOT_STORED)  # Number of the open step; 0: none
    checkpoints: list[int] = field(default_factory=list, metadata=_NOT_STORED)
    """Steps of the checkpoints that are not void."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what the ledger's state, as it is in a snapshot, says of tasks under way."""
        if state["run_spec"] is not None:
            self.order = order_of(state["run_spec"])
        book = state["steps"]
        for step, task_ids in book["history"]:
            self.steps[step] = [int(task_id[1:]) for task_id in task_ids]
        if (spec := book["open"]) is not None:
            self._open_step(spec)
        self.checkpoints = [checkpoint[0] for checkpoint in state["versions"]["checkpoints"]]

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == EventType.STEP_OPENED:
            self._open_step(event)
        elif kind == EventType.STEP_COMMITTED:
            for ordinal in self.steps.get(self.open, ()):
                self._finish(self.trained, ordinal)
            self.open = 0
        elif kind == EventType.STEP_ABORTED:
            if self.open == event["step"]:
                self.steps.pop(self.open, None)
                self.open = 0
        elif kind == EventType.TASK_DROPPED:
            if event["task_id"].startswith("t"):
                spans = self.dropped.setdefault(str(event["reason"]), [])
                self._finish(spans, int(event["task_id"][1:]))
        elif kind == EventType.ROLLED_BACK:
            for step in [n for n in self.steps if n > event["step"]]:
                undone = self.steps.pop(step)
                for ordinal in undone if step != self.open else ():
                    remove(self.trained, ordinal)
            self.open = 0
        elif kind == EventType.CHECKPOINT_RECORDED:
            # The replicas have agreed on the checkpoint before this one, so no rollback goes behind
            # that.
            step = int(event["step"])
            self.checkpoints = [*(n for n in self.checkpoints if n < step), step][-2:]
            covered = self.checkpoints[0] if len(self.checkpoints) > 1 else -1
            self.steps = {n: ordinals for n, ordinals in self.steps.items() if n > covered}
        elif kind == EventType.CHECKPOINT_VOIDED:
            self.checkpoints = [step for step in self.checkpoints if step != event["step"]]
        elif kind == EventType.RUN_EXTENDED:
            # They are leased again.
            self.dropped.pop(RUN_ENDED, None)
        elif kind == EventType.RUN_STARTED:
            self.order = order_of(event["spec"])

    def _open_step(self, spec: Mapping[str, Any]) -> None:
        self.open = spec["step"]
        self.steps[self.open] = [int(task_id[1:]) for task_id in spec["groups"]]

    def _finish(self, spans: Spans, ordinal: int) -> None:
        if not add(spans, ordinal):
            self.repeated.append(ordinal)

    def count(self) -> int:
        """Tasks that are finished."""
        return count(self.trained) + sum(map(count, self.dropped.values()))

    def report(self, cursor: int, in_flight: Iterable[int]) -> "CoverageReport":
        """``cursor``: number of tasks dispatched so far. ``in_flight``: ordinals of those on their
        way."""
        if self.order is None:
            return CoverageReport()
        report = CoverageReport(self.order.rows)
        known = [(ordinal, ordinal + 1) for ordinal in in_flight]
        for spans in (self.trained, *self.dropped.values()):
            known += pairs(spans)
        known.sort()
        end = max([cursor, *(stop for _, stop in known)])
        position = 0
        for start, stop in [*known, (end, end)]:
            report.skipped += self._named(report.skipped_rows, position, start)
            report.twice += self._named(report.repeated_rows, start, min(stop, position))
            position = max(position, stop)
        for ordinal in self.repeated:
            report.twice += self._named(report.repeated_rows, ordinal, ordinal + 1)
        return report

    def _named(self, rows: list[tuple[int, int]], start: int, stop: int) -> int:
        """The number of ordinals in the span, of which the first are named in ``rows``."""
        assert self.order is not None
        for ordinal in range(start, min(stop, start + ROWS_NAMED - len(rows))):
            rows.append(self.order.place(ordinal))
        return max(0, stop - start)


@dataclass(slots=True)
class CoverageReport:
    rows: int = 0
    skipped: int = 0  # Tasks that are passed by, and neither trained nor dropped nor on their way
    twice: int = 0  # Tasks that were finished or held more than once
    skipped_rows: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, row) of the first that were skipped, and those that were finished twice."""
    repeated_rows: list[tuple[int, int]] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        for many, what, named in (
            (self.skipped, "skipped", self.skipped_rows),
            (self.twice, "counted twice", self.repeated_rows),
        ):
            rows = ", ".join(f"row {row} of epoch {epoch}" for epoch, row in named[:5])
            if many:
                yield f"{plural(many, 'row')} {what}: {rows}"
