"""Whatever a sink does, every point reaches it, in order, and nobody waits for it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config.load import ConfigError
from paceline.config.schema import Config
from paceline.observe.sinks import sink_thread as feeds
from paceline.observe.sinks.base import Sink, check_sinks
from paceline.observe.sinks.base import external_run as run_of
from paceline.observe.sinks.sink_thread import SinkThread
from tests.fakes.scripted_sinks import BrokenSink, HangingSink, RecordingSink, recorded
from tests.fixtures.configs import config_of
from tests.fixtures.run_points import RunPoints, external_run, points_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "POLL_S", 0.02)


Start = Callable[..., SinkThread]


@pytest.fixture
def run(tmp_path: Path) -> RunPoints:
    return RunPoints(tmp_path)


@pytest.fixture
def start(run: RunPoints) -> Iterator[Start]:
    def start(make: Callable[[], Sink], may_write: Callable[[], bool] = lambda: True) -> SinkThread:
        feed = SinkThread("scripted", make, run.path, may_write=may_write, first_pause_s=0.02)
        feed.start()
        run.feeds.append(feed)
        return feed

    yield start
    for feed in run.feeds:
        feed.begin_close(None)


def until(true: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


def seen(directory: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in recorded(directory)]


def test_a_point_has_its_curves_by_group_and_no_value_that_is_none(tmp_path: Path) -> None:
    RunPoints(tmp_path).write(3)
    points = points_of(tmp_path / "metrics.jsonl")
    assert [p.step for p in points] == [1, 2, 3, 2]
    assert points[0].curves == {"train/reward_mean": 0.01, "time/wait_s": 0.5}
    assert points[3].curves == {"eval/reward_mean": 0.75, "eval/count": 8.0}


@pytest.mark.parametrize("cut", range(9))
def test_whoever_reads_from_wherever_gives_a_point_the_same_number(
    tmp_path: Path, run: RunPoints, cut: int
) -> None:
    run.write(4)
    run.roll_back(2)
    run.write(2)
    whole = points_of(run.path)
    assert [p.number for p in whole] == sorted({p.number for p in whole})
    after = whole[cut - 1].number if cut else None
    assert points_of(run.path, after) == whole[cut:]


def test_everything_arrives_once_also_what_comes_later_and_through_another_leaders_file(
    tmp_path: Path, run: RunPoints, start: Start
) -> None:
    run.write(2)
    feed = start(lambda: RecordingSink(external_run(tmp_path)))
    until(lambda: seen(tmp_path) == run.expected)
    run.hand_over()
    run.write(5)
    until(lambda: seen(tmp_path) == run.expected)
    assert feed.written == len(run.expected) and not feed.failing


def test_a_sink_that_breaks_off_in_a_batch_gets_the_rest_and_nothing_twice(
    tmp_path: Path, run: RunPoints, start: Start
) -> None:
    run.write(7)
    breaks = iter([3, 0, 1])

    def make() -> Sink:
        sink = RecordingSink(external_run(tmp_path))
        sink.points_until_failure = next(breaks, -1)
        return sink

    feed = start(make)
    until(lambda: seen(tmp_path) == run.expected)
    until(lambda: not feed.failing)


def test_a_sink_that_cannot_be_reached_is_tried_on_and_says_so_once(
    tmp_path: Path, run: RunPoints, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    run.write(2)
    tries = 0

    def make() -> Sink:
        nonlocal tries
        tries += 1
        return BrokenSink(external_run(tmp_path))

    feed = start(make)
    until(lambda: tries == 4)
    assert feed.failing and "sink.example" in feed.trouble
    assert sum("sink failed" in r.getMessage() for r in caplog.records) == 1


def test_a_sink_that_hangs_holds_up_only_itself_and_is_seen_to(
    tmp_path: Path, run: RunPoints, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(2)
    stuck = start(lambda: HangingSink(external_run(tmp_path)))
    healthy = start(lambda: RecordingSink(external_run(tmp_path)))
    until(lambda: (tmp_path / "hanging").exists())
    run.write(3)
    until(lambda: seen(tmp_path) == run.expected)
    assert not stuck.failing
    monkeypatch.setattr(feeds, "STUCK_S", 0.0)
    assert stuck.failing and not healthy.failing
    stuck.begin_close("finished")
    assert not stuck.join(0.05)


def test_a_leader_without_the_lease_writes_nothing_until_it_has_it_again(
    tmp_path: Path, run: RunPoints, start: Start
) -> None:
    run.write(2)
    looked = 0
    leads = False

    def may_write() -> bool:
        nonlocal looked
        looked += 1
        return leads

    start(lambda: RecordingSink(external_run(tmp_path)), may_write)
    until(lambda: looked > 2)
    assert seen(tmp_path) == []
    leads = True
    until(lambda: seen(tmp_path) == run.expected)


def test_at_the_end_of_the_run_the_last_points_leave_and_the_sink_is_told(
    tmp_path: Path, run: RunPoints, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "POLL_S", 600.0)
    run.write(7)
    feed = start(lambda: RecordingSink(external_run(tmp_path)))
    feed.begin_close("finished")
    feed.begin_close(None)
    assert feed.join(60)
    assert seen(tmp_path) == run.expected
    assert (tmp_path / "recorded.outcome").read_text() == "finished"


def config(**metrics: object) -> Config:
    return config_of(metrics=metrics, run={"name": "a.b"})


def test_all_leaders_of_a_run_know_it_by_one_id_and_a_fresh_run_by_another(tmp_path: Path) -> None:
    first, second = (run_of(config(), tmp_path / str(n), 12.5) for n in range(2))
    assert first.id == second.id != run_of(config(), tmp_path, 13.0).id
    assert first.settings["train.optimizer.lr"] == 1e-6
    assert not any("redis" in name or "auth" in name for name in first.settings), "no secrets"


def test_a_sink_that_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sinks(config(sinks=["tensorboard", "tests.fakes.scripted_sinks:BrokenSink"]))
    with pytest.raises(
        ConfigError, match=r"there is no sink 'tensorbored'\. Choose from tensorboard"
    ):
        check_sinks(config(sinks=["tensorbored"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[wandb\]'"):
        check_sinks(config(sinks=["wandb"]))
