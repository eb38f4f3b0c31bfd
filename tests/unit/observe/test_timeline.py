"""Timelines of recorded journals are valid traces, and say who did what, and waited for whom."""

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.ledger import events as ev
from controller.ledger.specs import StatValue
from paceline.errors import BadInput
from paceline.observe.projection import Projection
from paceline.observe.run_files import RunFileWriter
from paceline.observe.swim_lanes import SwimLanes
from paceline.observe.timeline import MOST_DOWN, Flow, Item, Mark, Slice, Timeline
from paceline.observe.trace_file import TraceWriter
from paceline_launcher.cli import app
from paceline_launcher.cli import timeline as timeline_command
from tests.fixtures.ledgers import Driven
from tests.unit.rest.test_recorded_journals import JOURNALS, entries_of

Trace = list[dict[str, Any]]


def folded(name: str) -> list[Item]:
    """Complete items of a recorded journal, then those that are open at its end."""
    found: list[Item] = []
    timeline = Timeline(found.append)
    for entry in entries_of(name):
        for record in entry.records:
            timeline.take(entry.t, record)
    return [*found, *timeline.open()]


def traced(path: Path, name: str, since: float = 0.0) -> Trace:
    entries = entries_of(name)
    with TraceWriter(path) as writer:
        timeline = Timeline(writer.write)
        writer.begin(max(since, entries[0].t), timeline.roles)
        for entry in entries:
            for record in entry.records:
                timeline.take(entry.t, record)
        for item in timeline.open():
            writer.write(item)
    whole = json.loads(path.read_text())
    assert whole["otherData"]["start_unix_s"] == max(since, entries[0].t)
    events: Trace = whole["traceEvents"]
    return events


def rows_of(trace: Trace) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Begin and end of the slices of each row, in their order."""
    rows = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return {place: sorted(slices) for place, slices in rows.items()}


def check(trace: Trace) -> None:
    """What viewers need: every event in a named row, no slice over another of its row, every flow
    with both ends, each within a slice."""
    named = {(e["pid"], e.get("tid")) for e in trace if e["ph"] == "M"}
    rows = rows_of(trace)
    for event in trace:
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in named and (event["pid"], None) in named
            assert isinstance(event["ts"], int) and event["ts"] >= 0
    for place, slices in rows.items():
        for (_, end), (start, _) in pairwise(slices):
            assert end <= start, (place, end, start)
    ends: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            around = rows[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in around), event
    for start, end in ends.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["name"] == end["name"] and start["ts"] <= end["ts"]


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_a_timeline_is_a_valid_trace(name, tmp_path):
    trace = traced(tmp_path / "trace.json", name)
    check(trace)
    assert any(event["ph"] == "s" for event in trace)


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_a_timeline_that_is_cut_is_valid_too(name, tmp_path):
    entries = entries_of(name)
    half = (entries[0].t + entries[-1].t) / 2
    trace = traced(tmp_path / "trace.json", name, since=half)
    check(trace)
    assert max(event.get("ts", 0) for event in trace) <= (entries[-1].t - half) * 1e6 + 1


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_every_group_has_a_flow_or_a_reason(name):
    items = folded(name)
    flows = {item.name.removeprefix("group ") for item in items if isinstance(item, Flow)}
    groups = [item for item in items if isinstance(item, Slice) and item.kind == "group"]
    leased = sum(
        len(record["leases"])
        for entry in entries_of(name)
        for record in entry.events
        if record["type"] == "TasksLeased"
    )
    assert len(groups) == leased
    for group in groups:
        assert group.about["outcome"]
        if group.about["outcome"].startswith("trained"):
            assert group.name in flows


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_every_warning_is_a_mark(name):
    records = [record for entry in entries_of(name) for record in entry.records]
    warnings = [r["text"] for r in records if r.get("severity") in ("warning", "error")]
    marks = [item.text for item in folded(name) if isinstance(item, Mark)]
    assert sorted(marks) == sorted(warnings)


def test_a_journal_that_lacks_its_beginning_is_folded():
    found: list[Item] = []
    name = sorted(JOURNALS)[0]
    entries = entries_of(name)
    for first in range(0, len(entries), 7):
        timeline = Timeline(found.append)
        for entry in entries[first : first + 200]:
            for record in entry.records:
                timeline.take(entry.t, record)
    assert found


def test_the_run_files_alone_give_processes_steps_and_marks():
    found: list[Item] = []
    timeline = Timeline(found.append)
    for entry in entries_of(sorted(JOURNALS)[0]):
        for record in entry.records:
            if "text" in record:
                timeline.take(entry.t, record)
    kinds = {item.kind for item in found if isinstance(item, Slice)}
    assert {"step", "version", "down"} <= kinds
    assert not any(isinstance(item, Flow) and item.name.startswith("group") for item in found)


class Watched(Driven):
    """A ledger whose events a timeline takes, at the time that the test sets."""

    def __init__(self, **changes: Any) -> None:
        self.lanes = SwimLanes()
        self.items: list[Item] = []
        self.timeline = Timeline(self.items.append)
        super().__init__(**changes)

    def do(self, command: Any) -> Any:
        reply = super().do(command)
        for event in self.last:
            record = ev.to_json(event)
            if event.listed:
                record |= {"severity": event.severity, "text": event.text()}
            self.timeline.take(self.now, record)
            self.lanes.timeline.take(self.now, record)
        return reply

    def trained(self) -> None:
        """One step: r0 takes 3 s for its groups, p1 votes 2 s later than p0."""
        start = self.now
        leases = self.lease("r0", 4).leases
        self.now = start + 3
        for lease in leases:
            self.submit("r0", lease)
        self.now = start + 5
        self.vote("p0", stats=seconds(wait=3.0, compute=1.5, reduce=0.5))
        self.now = start + 7
        self.vote("p1", stats=seconds(wait=3.0, compute=3.5, reduce=0.5))

    def slices(self, lane: str, row: str = "work") -> list[tuple[str, float, float, str]]:
        items = [*self.items, *self.timeline.open()]
        found = [i for i in items if isinstance(i, Slice) and (i.lane, i.row) == (lane, row)]
        return [(i.name, i.start - 1000, i.end - 1000, i.owner) for i in found]


def seconds(**parts: float) -> dict[str, StatValue]:
    return {f"time_{part}_s": StatValue(value, 1.0, value) for part, value in parts.items()}


def test_waits_name_whom_a_process_waits_for():
    run = Watched.fleet("p0", "p1", "r0")
    run.trained()
    assert run.slices("p0") == [
        ("waits for groups: r0", 0.0, 3.0, "r0"),
        ("computes step 1", 3.0, 4.5, ""),
        ("reduces", 4.5, 5.0, ""),
        ("waits for the vote of p1", 5.0, 7.0, "p1"),
    ]
    assert run.slices("p1")[-2:] == [("computes step 1", 3.0, 6.5, ""), ("reduces", 6.5, 7.0, "")]
    run.now += 1
    run.lease("r0", 1, version=0)
    assert run.slices("r0") == [
        ("generates", 0.0, 3.0, ""),
        ("waits for tasks: the trainers", 3.0, 7.0, "the trainers"),
        ("waits for tasks: the leader", 7.0, 8.0, "the leader"),
        ("generates", 8.0, 8.0, ""),
    ]


def test_a_group_flows_from_its_lease_to_the_replica_that_trained_it():
    run = Watched.fleet("p0", "p1", "r0")
    run.trained()
    flows = [i for i in run.items if isinstance(i, Flow) and i.name.startswith("group")]
    assert {flow.start.lane for flow in flows} == {"r0"}
    assert {flow.start.t for flow in flows} == {1000.0}
    assert {flow.end.lane for flow in flows} == {"p0", "p1"}


def test_weights_flow_from_their_commit_to_each_swap():
    run = Watched.fleet("p0", "p1", "r0", "r1")
    run.trained()
    run.now += 2
    run.observe("r1", loaded=1)
    (flow,) = (i for i in run.items if isinstance(i, Flow) and i.name == "version 1")
    assert (flow.start.row, flow.start.t) == ("newest version", 1007.0)
    assert (flow.end.lane, flow.end.t) == ("r1", 1009.0)
    assert run.slices("r1", "weights")[-1][0] == "version 1"


def test_a_dead_worker_is_down_until_it_comes_back_and_its_groups_say_why():
    run = Watched.fleet("p0", "r0")
    run.now += 1
    run.lease("r0", 2)
    run.now += 2
    run.die("r0")
    run.now += 3
    run.rollout("r0")
    assert ("down (unattributed)", 3.0, 6.0, "its launcher") in run.slices("r0", "process")
    groups = [i for i in run.items if isinstance(i, Slice) and i.kind == "group"]
    assert [g.about["outcome"] for g in groups] == ["released: owner died"] * 2
    assert [m.text for m in run.items if isinstance(m, Mark)] == ["r0 died (exit)"]


def test_a_large_fleet_with_many_groups_in_hand_is_shown_at_once():
    lanes, workers = SwimLanes(), [f"r{n}" for n in range(500)]
    for n, worker in enumerate(workers):
        leases = [[f"t{n}.{m}", 1] for m in range(16)]
        lanes.timeline.take(1.0, {"type": "TasksLeased", "worker_id": worker, "leases": leases})
    groups = [f"t{n}.0" for n in range(500)]
    opened = {"type": "StepOpened", "step": 1, "groups": groups, "shards": {}}
    lanes.timeline.take(2.0, opened)
    begun = time.process_time()
    shown = lanes.window(10.0, 10.0, 300)
    assert len(shown["lanes"]) == 500 and time.process_time() - begun < 0.5


def test_seats_have_a_lane_with_their_holders():
    found: list[Item] = []
    timeline = Timeline(found.append)
    names = {"type": "SeatGranted", "seat": "a", "grant": 1}
    timeline.take(1.0, {**names, "worker_id": "policy-0"})
    timeline.take(3.0, {**names, "type": "SeatReturned", "worker_id": "policy-0"})
    timeline.take(3.5, {**names, "worker_id": "rollout-0"})
    first, second = (i for i in (*found, *timeline.open()) if isinstance(i, Slice))
    assert (first.lane, first.row, first.name) == ("seats", "a", "policy-0")
    assert (first.start, first.end, second.name) == (1.0, 3.0, "rollout-0")


def test_evaluations_side_by_side_have_a_row_each_and_their_own_ends():
    found: list[Item] = []
    timeline = Timeline(found.append)
    for t, kind, step in [(1, "Scheduled", 0), (2, "Scheduled", 5), (4, "Recorded", 0)]:
        timeline.take(t, {"type": f"Eval{kind}", "step": step})
    timeline.take(5, {"type": "EvalScheduled", "step": 10})
    timeline.take(6, {"type": "EvalRecorded", "step": 5})
    shown = {(i.name, i.row, i.start, i.end) for i in [*found, *timeline.open()]}
    assert shown == {
        ("evaluates step 0", "evaluations 1", 1.0, 4.0),
        ("evaluates step 5", "evaluations 2", 2.0, 6.0),
        ("evaluates step 10", "evaluations 1", 5.0, 6.0),
    }


def test_swim_lanes_show_the_last_part_and_the_shares_of_it():
    run = Watched.fleet("p0", "p1", "r0")
    run.trained()
    shown = run.lanes.window(1010.0, 10.0, cells=10)
    lanes = {lane["name"]: lane for lane in shown["lanes"]}
    assert list(lanes) == ["controller-0", "p0", "p1", "r0"]
    assert lanes["p0"]["cells"] == "wwwcrww..."
    assert lanes["r0"]["cells"] == "gggwwwwwww"
    assert lanes["p0"]["waits"] == {"r0": 3.0, "p1": 2.0}
    assert lanes["p0"]["busy"] == pytest.approx(2 / 7, abs=1e-3)
    assert shown["commits"] == [1007.0] and shown["marks"] == []
    # A process that is gone has no lane in a later window.
    run.die("r0")
    later = run.lanes.window(1100.0, 10.0, cells=10)
    assert {lane["name"]: lane["cells"] for lane in later["lanes"]}["r0"] == "d" * 10


def test_lanes_of_a_young_run_begin_with_it():
    run = Watched.fleet("p0", "p1", "r0")
    run.trained()
    shown = run.lanes.window(1020.0, 3600.0, cells=60)
    assert 990.0 < shown["since"] <= 1000.0, "an hour of nothing was drawn beside it"
    assert SwimLanes().window(1020.0, 300.0, cells=60)["since"] == 720.0


def command(*words: object) -> Any:
    return CliRunner().invoke(app, ["timeline", *map(str, words)])


def run_files(path: Path) -> Path:
    path.mkdir()
    writer = RunFileWriter(path)
    for entry in entries_of(sorted(JOURNALS)[0]):
        for record in entry.records:
            writer.record(entry.at.entry, entry.t, record)
    writer.close()
    return path


def test_a_run_whose_journal_is_gone_has_a_trace_of_its_files(tmp_path):
    out = tmp_path / "trace.json"
    done = command(run_files(tmp_path / "run"), "--out", out)
    assert done.exit_code == 0, done.output
    check(json.loads(out.read_text())["traceEvents"])
    assert "are not there: it cannot be read" in done.stdout


def test_the_last_seconds_of_a_run_are_cut_out_and_compressed(tmp_path):
    run, out = run_files(tmp_path / "run"), tmp_path / "trace.json.gz"
    assert command(run, "--out", out, "--last", 20).exit_code == 0
    trace = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    check(trace)
    assert 0 < max(event.get("ts", 0) for event in trace) <= 20e6


def test_a_suffix_in_capitals_is_compressed_too(tmp_path):
    with TraceWriter(tmp_path / "trace.JSON.GZ"):
        pass
    assert json.loads(gzip.decompress((tmp_path / "trace.JSON.GZ").read_bytes()))


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(IsADirectoryError), TraceWriter(tmp_path):
        pass
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))
    with (
        Path("/dev/full").open("w") as full,
        pytest.raises(OSError, match="No space left"),
        TraceWriter(tmp_path / "trace.json") as writer,
    ):
        monkeypatch.setattr(writer, "_file", full)
    assert not list(tmp_path.iterdir())


def test_the_begin_of_the_journal_is_said_only_if_it_is_in_the_window(tmp_path, monkeypatch):
    run, out = run_files(tmp_path / "run"), tmp_path / "trace.json"
    first, feed = entries_of(sorted(JOURNALS)[0])[0].t, timeline_command._feed
    monkeypatch.setattr(timeline_command, "_feed", lambda run, take: feed(run, take) or first)
    assert "groups and waits of the journal begin at 20" in command(run, "--out", out).stdout
    assert "groups and waits" not in command(run, "--out", out, "--last", 5).stdout


def test_a_window_without_events_is_refused_with_the_time_of_the_last_one(tmp_path):
    run, out = run_files(tmp_path / "run"), tmp_path / "trace.json"
    done = command(run, "--out", out, "--since", "2100-01-01")
    assert isinstance(done.exception, BadInput) and not out.exists()
    assert "nothing from 2100-01-01 00:00:00 on: its last event was at 20" in str(done.exception)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("-", "--out: - is no file"),
        (".", "--out: . is no file"),
        ("/dev/null", "--out: /dev/null is no file"),
        ("nodir/t.json", "--out: nodir/t.json: there is no directory nodir"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(out, said, monkeypatch):
    monkeypatch.setattr(timeline_command, "given_or_default", None)
    done = command("--out", out)
    assert isinstance(done.exception, BadInput) and said in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "paceline runs DIR"),
        (["--last", "5", "--since", "2026-01-01"], "either --last"),
        (["RUN", "--since", "yesterday"], "no time such as"),
        (["RUN"], "has no events yet"),
    ],
)
def test_what_cannot_be_drawn_is_said_with_what_to_do(words, said, tmp_path):
    (tmp_path / "events.jsonl").touch()
    out = tmp_path / "trace.json"
    done = command(*(tmp_path if word == "RUN" else word for word in words), "--out", out)
    assert said in str(done.exception) and not out.exists()


def test_a_clock_that_was_set_back_is_followed():
    lanes, now = SwimLanes(), 1e9
    take, worker = lanes.timeline.take, {"worker_id": "rollout-0"}
    begun = {"type": "WorkerRegistered", **worker, "role": "rollout", "pid": 1, "host": "host"}
    take(now + 3600, begun)
    changed = {"type": "WorkerChanged", **worker, "state_version": -1, "loaded_version": 0}
    take(now + 3601, changed | {"lifecycle": "running"})
    for n in range(10):
        task = f"t{n}"
        take(now + 10 * n, {"type": "TasksLeased", **worker, "leases": [[task, 1]]})
        take(now + 10 * n + 8, {"type": "GroupAccepted", **worker, "group": {"task_id": task}})
    (lane,) = lanes.window(now + 100, 100.0, 50)["lanes"]
    assert lane["busy"] == pytest.approx(0.8) and set(lane["cells"]) == {"g", "w"}


def test_processes_that_are_gone_for_good_leave_the_lanes():
    lanes = SwimLanes()
    for n in range(1000):
        worker = {"worker_id": f"spot-{n}", "role": "rollout", "pid": 1, "host": "host"}
        lanes.timeline.take(float(n), {"type": "WorkerRegistered", **worker})
        cause = "asked_to_leave" if n % 2 else "killed"
        died = {"type": "WorkerDied", **worker, "cause": cause, "how": "exit"}
        lanes.timeline.take(n + 0.5, died)
    names = {lane["name"] for lane in lanes.window(2000.0, 100.0, 50)["lanes"]}
    assert len(names) == MOST_DOWN and names <= {f"spot-{n}" for n in range(0, 1000, 2)}


@pytest.mark.parametrize("total", [-1.0, 1.0])
def test_absurd_seconds_of_a_replica_leave_the_lanes_readable(total: float):
    lanes = SwimLanes()
    take = lanes.timeline.take
    parts = ("wait", "compute", "reduce", "commit")
    stats = {f"time_{part}_s": [total, 1e-320, total] for part in parts}
    take(1e9, {"type": "StepOpened", "step": 1, "groups": [], "shards": {"policy-0": []}})
    take(1e9 + 1, {"type": "VoteCast", "worker_id": "policy-0", "step": 1, "stats": stats})
    take(1e9 + 2, {"type": "StepCommitted", "step": 1, "version": 1, "metrics": {}})
    (lane,) = lanes.window(1e9 + 3, 60.0, 30)["lanes"]
    assert 0.0 <= lane["busy"] <= 1.0


def test_a_record_that_the_timeline_cannot_draw_costs_no_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Projection()

    def broken(t: float, record: Mapping[str, Any]) -> None:
        raise KeyError("pid")

    monkeypatch.setattr(run.lanes.timeline, "take", broken)
    run.take("1-0", 1.0, [{"type": "VoteCast", "step": 1}])
    assert run.lanes.timeline.take is not broken
