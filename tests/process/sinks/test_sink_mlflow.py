"""A real MLflow store: one run for all leaders, and no point is lost."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'paceline[mlflow]'")

from mlflow.tracking import MlflowClient

from paceline.observe.sinks.mlflow import MlflowSink
from tests.fixtures.run_points import RunPoints, external_run, points_of


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def client(directory: Path) -> MlflowClient:
    """Of the store that a sink without any setting makes."""
    return MlflowClient(tracking_uri=f"sqlite:///{(directory / 'mlflow' / 'mlflow.db').resolve()}")


def the_run(directory: Path) -> Any:
    found = client(directory)
    (experiment,) = [e for e in found.search_experiments() if e.name == "arithmetic-runs"]
    (run,) = found.search_runs([experiment.experiment_id])
    return run


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    run_id = the_run(directory).info.run_id
    history = client(directory).get_metric_history(run_id, name)
    return [(v.step, v.value) for v in sorted(history, key=lambda v: v.timestamp)]


def sink(directory: Path) -> MlflowSink:
    return MlflowSink(external_run(directory, project="arithmetic-runs"))


def rest(run: RunPoints, last: int | None) -> list[Any]:
    return points_of(run.path, last)


def test_one_run_is_continued_by_the_next_leader_without_a_gap(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(4)
    first = sink(tmp_path)
    assert first.open() is None
    first.write(rest(run, None)[:3])
    run.write(3)
    second = sink(tmp_path)
    second.write(rest(run, second.open()))
    second.close("finished")
    assert curve(tmp_path, "train/reward_mean") == [(n, n / 100) for n in range(1, 8)]
    assert curve(tmp_path, "eval/reward_mean") == [(2, 0.75), (5, 0.75)]
    found = the_run(tmp_path)
    assert found.info.status == "FINISHED" and found.info.run_name == "arithmetic"
    assert found.data.params["train.optimizer.lr"] == "0.0001"


def test_a_batch_that_was_cut_short_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunPoints(tmp_path)
    run.write(2)
    first = sink(tmp_path)
    first.open()

    def killed(*_: object) -> None:
        raise ConnectionError("killed")

    monkeypatch.setattr(first._client, "set_tag", killed)
    with pytest.raises(ConnectionError):
        first.write(rest(run, None))
    second = sink(tmp_path)
    second.write(rest(run, second.open()))
    found = curve(tmp_path, "train/reward_mean")
    assert sorted(set(found)) == [(1, 0.01), (2, 0.02)], "repeated, and none is lost"


def test_a_finished_run_that_goes_on_is_running_again(tmp_path: Path) -> None:
    run = RunPoints(tmp_path)
    run.write(1)
    first = sink(tmp_path)
    first.open()
    first.write(rest(run, None))
    first.close("failed")
    assert the_run(tmp_path).info.status == "FAILED"
    second = sink(tmp_path)
    assert rest(run, second.open()) == []
    assert the_run(tmp_path).info.status == "RUNNING"
