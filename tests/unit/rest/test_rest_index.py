"""The projection of long runs: incremental, bounded and exact."""

from pathlib import Path
from typing import Any

from paceline.observe.curves import MetricStore
from paceline.observe.event_history import MOST_COMMITS, MOST_EVENTS
from paceline.observe.file_tail import FileTail
from paceline.observe.projection import Projection
from paceline.observe.run_files import JsonLinesFile


def rows(count: int) -> list[dict[str, Any]]:
    kind = {"kind": "step", "reward_mean": 0.5, "loss": 0.1}
    return [{**kind, "t": 1000.0 + n, "step": n, "version": n} for n in range(1, count + 1)]


def add(run: Projection, position: str, n: int, t: float, event: dict[str, Any]) -> None:
    severity = "warning" if event["type"] == "WorkerDied" else "info"
    run.add_line({"position": position, "n": n, "t": t, "severity": severity, **event})


def committed(run: Projection, position: str, n: int, t: float, step: int) -> None:
    metrics = {"reward_mean": 0.5}
    add(run, position, n, t, {"type": "StepCommitted", "step": step, "metrics": metrics})


def test_a_bucket_has_the_mean_and_the_extremes_of_its_steps() -> None:
    columns = MetricStore()
    for row in rows(10):
        columns.append({**row, "loss": float(row["step"]), "kl": None})
    curves = columns.curves(["loss", "kl"], since=0, until=100, points=5)
    assert curves["x"] == [2, 4, 6, 8, 10]
    assert curves["series"]["loss"] == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert curves["low"]["loss"] == [1, 3, 5, 7, 9] and curves["high"]["loss"][0] == 2
    assert curves["series"]["kl"] == [None] * 5
    assert columns.curves(["loss"], since=100, until=200, points=5)["x"] == []
    assert columns.curves(["loss"], since=8, until=2, points=5)["x"] == []
    columns.append({"step": 11, "late": 1.0})
    assert columns.rows(9, 5)[0]["late"] is None and columns.rows(9, 5)[1]["loss"] is None


def test_metrics_keep_the_order_in_which_they_were_measured() -> None:
    """Not the order of a set, which differs from process to process."""
    columns = MetricStore()
    names = [f"metric_{number}" for number in range(20)]
    columns.append({"step": 1, **dict.fromkeys(names, 1.0)})
    assert list(columns.rows(0, 1)[0])[3:] == names


def test_steps_that_were_rolled_back_are_replaced_by_those_that_came_after() -> None:
    columns = MetricStore()
    for row in rows(6):
        columns.append(row)
    columns.append({"step": 4, "version": 9, "t": 5.0, "late": 7.0})
    found = columns.rows(0, 100)
    assert [(r["step"], r["version"]) for r in found] == [(1, 1), (2, 2), (3, 3), (4, 9)]
    assert found[-1]["late"] == 7.0 and found[-1]["loss"] is None and found[0]["late"] is None


def test_a_file_that_a_new_leader_replaced_is_read_on_without_gap_or_repeat(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    first = JsonLinesFile(path)
    tail = FileTail(path)
    for n in range(3):
        first.append({"n": n})
    assert [line["n"] for line in tail.records()] == [0, 1, 2]
    with path.open("ab") as torn:
        torn.write(b'{"n": 3, "torn')
    assert tail.read() == []
    second = JsonLinesFile(path)
    second.append({"n": 3})
    first.append({"n": "a deposed leader's"})
    assert [line["n"] for line in tail.records()] == [3]
    path.unlink()
    third = JsonLinesFile(path)
    third.append({"n": "another run"})
    assert [line["n"] for line in tail.records()] == ["another run"]


def test_history_is_bounded_and_says_how_long_a_fault_lasted() -> None:
    run = Projection()
    add(run, "1-0", 0, 1.0, {"type": "TermBegun", "term": 1, "controller_id": "c"})
    committed(run, "2-0", 0, 2.0, 1)
    add(run, "3-0", 0, 3.0, {"type": "WorkerDied", "worker_id": "p", "how": "exit"})
    committed(run, "5-0", 0, 4.25, 2)
    died = run.history.after(None, limit=9, kinds="faults")
    assert [(e.type, e.step, e.commit_s) for e in died] == [("WorkerDied", 1, 1.25)]
    for n in range(MOST_EVENTS + 50):
        add(run, f"{10 + n}-0", 0, 5.0, {"type": "Paused", "paused": True})
        committed(run, f"{10 + n}-0", 1, 5.0, 3 + n)
    everything = run.history.after(None, limit=1 << 30)
    assert len(everything) == MOST_EVENTS + MOST_COMMITS
    assert [e.key for e in everything] == sorted(e.key for e in everything)
    assert len(run.history.after(everything[-3].key, limit=10)) == 2


def test_a_long_runs_checkpoints_push_out_no_other_mark() -> None:
    run = Projection()
    steered = {"type": "Scaled", "desired": {"rollout": 2}}
    died = {"type": "WorkerDied", "worker_id": "policy-0", "how": "exit"}
    left = {"type": "Drained", "worker_id": "rollout-1"}
    for n, event in enumerate((steered, died, left)):
        add(run, f"{n + 1}-0", 0, 1.0, event)
    for step in range(1, 3001):
        committed(run, f"{step + 9}-0", 0, 2.0, step)
        saved = {"type": "CheckpointRecorded", "step": step, "version": step, "path": "x"}
        add(run, f"{step + 9}-0", 1, 2.0, saved)
    marks = run.history.after(None, limit=100, kinds="marks", newest=True)
    assert [e.type for e in marks[:3]] == ["Scaled", "WorkerDied", "Drained"]
    assert [e.step for e in marks[3:]] == list(range(2904, 3001))
    near = run.history.after(None, limit=100, kinds="marks", newest=True, steps=(2001, 2010))
    assert [e.step for e in near] == list(range(2001, 2011))
    assert [e.type for e in run.history.after(None, limit=2, kinds="marks", newest=True)] == [
        *("WorkerDied", "Drained"),
    ]
    assert len(run.history.after(marks[2].key, limit=50, kinds="marks")) == 50
