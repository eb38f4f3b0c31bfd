"""Curves as an MLflow run: on a tracking server, or in a store on disk.

The run is found by a tag with the run's id. The place of the last point is a tag too, set after each
batch; MLflow writes a batch's values one by one, so whatever lies behind that tag is looked up when
the sink opens, and a batch that was cut short is completed without a value twice.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from paceline.sinks.base import ExternalRun, Point

ID_TAG = "paceline.run"
PLACE_TAG = "paceline.place"
TIME_TAG = "paceline.place_ms"
MOST_VALUES = 1000
"""Metrics that MLflow takes in one batch."""
MOST_SETTINGS = 100
LONGEST_SETTING = 500
OUTCOMES = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowSink:
    def __init__(self, run: ExternalRun) -> None:
        from mlflow.tracking import MlflowClient

        uri = run.options.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            path = (run.directory / "mlflow").resolve()
            path.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{path / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._run = run
        self._run_id = ""
        self._behind: dict[str, set[tuple[int, int]]] = {}
        """Metric to (step, time) of values behind the tagged place."""

    def open(self) -> str | None:
        found = self._find()
        if found is None:
            self._run_id = self._create()
            return None
        self._run_id = found.info.run_id
        if found.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        tags = found.data.tags
        since = int(tags.get(TIME_TAG, -1))
        self._behind = defaultdict(set)
        for name in found.data.metrics:
            for value in self._client.get_metric_history(self._run_id, name):
                if value.timestamp >= since:
                    self._behind[name].add((value.step, value.timestamp))
        place: str | None = tags.get(PLACE_TAG)
        return place

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, RunTag

        values = [
            Metric(name, value, _ms(point), point.step)
            for point in points
            for name, value in point.curves.items()
            if (point.step, _ms(point)) not in self._behind.get(name, ())
        ]
        for start in range(0, len(values), MOST_VALUES):
            self._client.log_batch(self._run_id, metrics=values[start : start + MOST_VALUES])
        last = points[-1]
        tags = [RunTag(PLACE_TAG, last.place), RunTag(TIME_TAG, str(_ms(last)))]
        self._client.log_batch(self._run_id, tags=tags)

    def close(self, outcome: str | None) -> None:
        if outcome is not None and self._run_id:
            self._client.set_terminated(self._run_id, OUTCOMES.get(outcome, "FINISHED"))

    def _find(self) -> Any:
        experiment = self._client.get_experiment_by_name(self._run.options.project)
        if experiment is None:
            return None
        found = self._client.search_runs(
            [experiment.experiment_id],
            f"tags.`{ID_TAG}` = '{self._run.id}'",
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        return found[0] if found else None

    def _create(self) -> str:
        from mlflow.entities import Param

        project = self._run.options.project
        experiment = self._client.get_experiment_by_name(project)
        number = (
            self._client.create_experiment(project)
            if experiment is None
            else experiment.experiment_id
        )
        made = self._client.create_run(number, tags={ID_TAG: self._run.id}, run_name=self._run.name)
        run_id: str = made.info.run_id
        settings = [
            Param(name, str(value)[:LONGEST_SETTING]) for name, value in self._run.settings.items()
        ]
        for start in range(0, len(settings), MOST_SETTINGS):
            self._client.log_batch(run_id, params=settings[start : start + MOST_SETTINGS])
        return run_id


def _ms(point: Point) -> int:
    return round(point.t * 1000)
