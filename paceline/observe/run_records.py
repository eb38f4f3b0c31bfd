"""Read model of one run: metrics, evaluations and events of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.observe.curves import MetricStore
from paceline.observe.event_history import EventHistory, is_listed
from paceline.observe.file_tail import FileTail
from paceline.observe.json_lines import read_lines
from paceline.observe.run_file_writer import metrics_row

MOST_EVALS = 20_000
_EVAL_COLUMNS = ("step", "version", "t", "eval_reward_mean", "eval_count")


class RunRecords:
    """``read`` takes the files as they are; ``refresh`` takes what was added since the last call.

    ``clean`` is applied to the words of events before they are kept.
    """

    def __init__(self, run_dir: Path, clean: Callable[[Any], Any] = lambda value: value) -> None:
        self._clean = clean
        self._metrics = FileTail(run_dir / "metrics.jsonl")
        self._events = FileTail(run_dir / "events.jsonl")
        self.reset()

    def reset(self) -> None:
        self._reset_metrics()
        self.history = EventHistory(self._clean)

    def _reset_metrics(self) -> None:
        self.metrics = MetricStore()
        self.evals: list[dict[str, Any]] = []
        """step, version, t, eval_reward_mean, eval_count and eval_SET/METRIC of each evaluation, by
        step."""

    @classmethod
    def read(cls, run_dir: Path) -> RunRecords:
        """The surviving line of a run. Raises DamagedFile."""
        records = cls(run_dir)
        for number, event in enumerate(read_lines(run_dir / "events.jsonl")):
            records.history.add({"position": "", "n": number, "t": 0.0, **event})
        for row in read_lines(run_dir / "metrics.jsonl"):
            records.add_row(row)
        records.metrics.cut(records.history.step)
        return records

    @property
    def names(self) -> set[str]:
        """Metrics of steps and evaluations that have a value."""
        evals = {n for e in self.evals for n, v in e.items() if n[:5] == "eval_" and v is not None}
        return evals.union(self.metrics.names)

    @property
    def has_files(self) -> bool:
        return self._metrics.exists or self._events.exists

    def refresh(self) -> None:
        for void, row in self._metrics.records():
            if void:
                self._reset_metrics()
            self.add_row(row)
        for void, event in self._events.records():
            if void:
                self.history = EventHistory(self._clean)
            if "position" in event:
                self.history.add(event)

    def add(self, position: str, n: int, t: float, event: Mapping[str, Any]) -> None:
        """Takes an event record of the journal, in place of the lines it has in the files."""
        head = {"position": position, "n": n, "t": t}
        if (row := metrics_row(event)) is not None:
            self.add_row({**head, **row})
        if is_listed(event):
            self.history.add({**head, **event})

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Takes a row of metrics.jsonl."""
        if row.get("kind", "step") == "step":
            self.metrics.append(row)
            return
        found = {name: row.get(name) for name in _EVAL_COLUMNS}
        found |= {name: value for name, value in row.items() if name.startswith("eval_")}
        if self.evals and self.evals[-1]["step"] >= row["step"]:
            self.evals = [e for e in self.evals if e["step"] != row["step"]]
        self.evals.append(found)
        self.evals.sort(key=lambda e: int(e["step"]))
        del self.evals[:-MOST_EVALS]
