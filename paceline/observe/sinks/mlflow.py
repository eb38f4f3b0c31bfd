"""Curves as an MLflow run: on a tracking server, or in a store on disk."""

import os
from collections.abc import Sequence

from paceline.observe.sinks.base import ExternalRun, Point

ID_TAG = "paceline.run"
LAST_TAG = "paceline.last_point"
METRICS_PER_BATCH = 1000
PARAMS_PER_BATCH = 100
PARAM_CHARACTERS = 500
OUTCOMES = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowSink:
    """MLflow run, found by a tag with the run's id. Another tag has the last point written."""

    def __init__(self, run: ExternalRun) -> None:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            store = (run.directory / "mlflow").resolve()
            store.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{store / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._run = run
        self._run_id = ""

    def open(self) -> int | None:
        project = self._run.options.project
        experiment = self._client.get_experiment_by_name(project)
        number = experiment and experiment.experiment_id
        number = number or self._client.create_experiment(project)
        found = self._client.search_runs([number], f"tags.`{ID_TAG}` = '{self._run.id}'")
        if not found:
            from mlflow.entities import Param

            tags = {ID_TAG: self._run.id}
            made = self._client.create_run(number, tags=tags, run_name=self._run.name)
            self._run_id = made.info.run_id
            params = [Param(n, str(v)[:PARAM_CHARACTERS]) for n, v in self._run.settings.items()]
            for start in range(0, len(params), PARAMS_PER_BATCH):
                batch = params[start : start + PARAMS_PER_BATCH]
                self._client.log_batch(self._run_id, params=batch)
            return None
        self._run_id = found[0].info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        last = found[0].data.tags.get(LAST_TAG)
        return None if last is None else int(last)

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        values = [
            Metric(name, value, round(point.t * 1000), point.step)
            for point in points
            for name, value in point.curves.items()
        ]
        for start in range(0, len(values), METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=values[start : start + METRICS_PER_BATCH])
        self._client.set_tag(self._run_id, LAST_TAG, points[-1].number)

    def close(self, outcome: str | None) -> None:
        if outcome is not None and self._run_id:
            self._client.set_terminated(self._run_id, OUTCOMES.get(outcome, "FINISHED"))
