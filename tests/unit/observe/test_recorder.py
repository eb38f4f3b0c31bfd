"""The run files: complete after every handover, never a line twice."""

import json
from pathlib import Path

import pytest

from paceline.observe.run_files import RunFileWriter


def journal(steps: int) -> list[tuple[str, float, dict]]:
    """A run's events, several to a journal position, as the leader would hand them over."""
    entries: list[tuple[str, float, dict]] = [
        ("1-0", 1.0, {"type": "RunStarted"}),
        ("1-0", 1.0, {"type": "TermBegun", "term": 1}),
        (
            "2-0",
            2.0,
            {"type": "EvalRecorded", "step": 0, "version": 0, "reward_mean": 0.25, "count": 4},
        ),
    ]
    for step in range(1, steps + 1):
        at = 10.0 * step
        entries += [
            (f"{int(at)}-0", at, {"type": "TasksLeased", "worker": "rollout-0"}),
            (f"{int(at)}-0", at, {"type": "GroupAccepted", "task": f"t{step}"}),
            (f"{int(at)}-1", at, {"type": "VoteCast", "step": step}),
            (f"{int(at)}-1", at, {"type": "StepCommitted", "step": step, "version": step, "metrics": {"reward_mean": step / 10, "loss": float("nan")}}),  # noqa: E501
            (f"{int(at)}-1", at, {"type": "CheckpointRecorded", "step": step, "path": f"checkpoints/step-{step:06d}"}),  # noqa: E501
        ]  # fmt: skip
    routine = ("TasksLeased", "GroupAccepted", "VoteCast")
    for _, _, event in entries:
        if event["type"] not in routine:
            event |= {"severity": "info", "text": "words"}
    return entries


def replay(recorder: RunFileWriter, entries: list[tuple[str, float, dict]]) -> None:
    """Hands over every entry whose position comes after ``last_position``."""

    def key(position: str) -> tuple[int, ...]:
        return tuple(int(part) for part in position.split("-"))

    after = recorder.last_position
    for position, t, event in entries:
        if after is None or key(position) > key(after):
            recorder.record(position, t, event)


@pytest.mark.parametrize("cut", range(24))
def test_a_new_leader_continues_the_files_without_gap_or_repeat(tmp_path: Path, cut: int) -> None:
    entries = journal(4)
    whole = RunFileWriter(tmp_path / "whole")
    replay(whole, entries)
    whole.close()

    first = RunFileWriter(tmp_path / "split")
    replay(first, entries[:cut])
    second = RunFileWriter(tmp_path / "split")
    replay(second, entries)
    second.close()

    for name in ("events.jsonl", "metrics.jsonl"):
        expected = (tmp_path / "whole" / name).read_text()
        assert (tmp_path / "split" / name).read_text() == expected


def test_a_torn_last_line_is_written_again_whole(tmp_path: Path) -> None:
    entries = journal(3)
    recorder = RunFileWriter(tmp_path)
    replay(recorder, entries)
    recorder.close()
    whole = {n: (tmp_path / n).read_bytes() for n in ("events.jsonl", "metrics.jsonl")}
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data[:-7])

    again = RunFileWriter(tmp_path)
    replay(again, entries)
    again.close()
    assert {n: (tmp_path / n).read_bytes() for n in whole} == whole


def test_a_deposed_leader_that_wakes_up_writes_nothing(tmp_path: Path) -> None:
    entries = journal(2)
    deposed = RunFileWriter(tmp_path)
    replay(deposed, entries[:6])
    leader = RunFileWriter(tmp_path)
    replay(leader, entries)
    before = (tmp_path / "events.jsonl").read_bytes()
    for position, t, event in entries[6:]:
        deposed.record(position, t, event)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_one_metrics_row_a_step_and_one_an_evaluation(tmp_path: Path) -> None:
    recorder = RunFileWriter(tmp_path)
    replay(recorder, journal(3))
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in rows] == [
        ("eval", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
    ]
    assert rows[0]["eval_reward_mean"] == 0.25
    assert rows[1]["loss"] is None, "NaN is not JSON"
