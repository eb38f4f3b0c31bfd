"""Settings that change while a run runs, when it is continued, and after its end."""

import math
from dataclasses import replace
from typing import Any

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.enums import GroupFault
from controller.ledger.specs import LearningRate, LiveSpec
from controller.ledger.state.settings import Settings
from paceline.ids import Step
from tests.fixtures.ledgers import Driven

FILE = {"train.optimizer.lr": 1e-3, "train.steps": 10, "rollout.top_p": 1.0}


@pytest.fixture
def run() -> Driven:
    driven = Driven(lr=LearningRate(1e-3))
    driven.do(cmd.start_run(driven.state.run, FILE))
    driven.policy("p0")
    driven.rollout("r0")
    return driven


def spec(run: Driven, **changes: Any) -> LiveSpec:
    return replace(run.state.run.live, **changes)


def set_lr(run: Driven, peak: float, request_id: str = "set-1") -> str:
    changed = spec(run, lr=LearningRate(peak))
    return str(run.do(cmd.change_settings(request_id, {"train.optimizer.lr": peak}, changed)))


def lr_of_plan(run: Driven) -> float:
    return run.ask("p0")[1].lr


def test_the_next_step_has_the_new_learning_rate_and_the_open_one_keeps_its_own(
    run: Driven,
) -> None:
    run.fill("r0", 4)
    assert lr_of_plan(run) == 1e-3
    reply = set_lr(run, 5e-4)
    assert reply == "settings changed from step 2: train.optimizer.lr 0.001 -> 0.0005"
    assert lr_of_plan(run) == 1e-3
    run.train()
    run.fill("r0", 4)
    assert lr_of_plan(run) == 5e-4


def test_a_replay_of_a_step_has_the_learning_rate_that_the_step_had(run: Driven) -> None:
    run.train()
    run.checkpoint(digest="")
    run.train()
    set_lr(run, 5e-4)
    run.die("p0")
    run.policy("p0")
    assert run.state.steps.open.replay and run.state.steps.open.step == 2
    assert lr_of_plan(run) == 1e-3
    run.failover()
    assert lr_of_plan(run) == 1e-3
    run.train()
    run.fill("r0", 4)
    assert lr_of_plan(run) == 5e-4


def test_a_step_without_a_rejected_group_keeps_its_settings_and_its_other_groups() -> None:
    run = Driven.fleet("p0", "p1", "r0", max_staleness=4)
    early = run.lease("r0", 7).leases
    run.train()
    for lease in early:
        run.submit("r0", lease, 0)
    opened = run.state.steps.open
    bad = opened.shard("p0")[0]
    set_lr(run, 5e-4)
    strict = {"train.max_staleness": 0}
    run.do(cmd.change_settings("strict", strict, spec(run, max_staleness=0)))
    who = ("p0", run.current["p0"])
    run.do(cmd.reject(*who, opened.step, {bad: 1}, GroupFault.PAYLOAD_LOST, "why"))
    run.failover()
    assert run.state.steps.open is None and len(run.state.steps.replay[opened.step]) == 3
    run.fill("r0", 1)
    again = run.state.steps.open
    others = tuple(task_id for task_id in opened.groups if task_id != bad)
    assert (again.step, again.groups[:3], again.settings) == (opened.step, others, opened.settings)
    assert run.state.settings.changed["train.optimizer.lr"].step == opened.step + 1


def test_a_repeated_request_changes_once_and_a_second_one_without_effect_is_refused(
    run: Driven,
) -> None:
    first = set_lr(run, 5e-4)
    run.failover()
    assert set_lr(run, 5e-4) == first and run.names() == []
    with pytest.raises(cmd.CommandRefused, match="these settings already"):
        set_lr(run, 5e-4, "set-2")


def test_a_new_leader_with_the_old_file_keeps_what_was_set(run: Driven) -> None:
    set_lr(run, 5e-4)
    run.failover()
    kept = replace(run.state.run)
    run.do(cmd.start_run(kept, FILE))
    assert run.names() == []
    assert run.state.settings.values["train.optimizer.lr"] == 5e-4


def test_an_edited_file_is_taken_over_when_the_run_is_continued(run: Driven) -> None:
    run.failover()
    edited = replace(run.state.run, lr=LearningRate(2e-3), max_staleness=3)
    file = {**FILE, "train.optimizer.lr": 2e-3, "train.max_staleness": 3}
    run.do(cmd.start_run(edited, file))
    event = run.event(ev.SettingsChanged)
    assert event.changes == {
        "train.optimizer.lr": (1e-3, 2e-3)
    }  # the other was not known to the journal
    assert run.state.run.max_staleness == 3
    assert run.state.settings.changed["train.optimizer.lr"].old == 1e-3
    run.failover()
    run.do(cmd.start_run(edited, file))
    assert run.names() == []


def test_back_to_the_first_value_is_no_difference_any_more(run: Driven) -> None:
    set_lr(run, 5e-4)
    assert run.state.settings.changed["train.optimizer.lr"].new == 5e-4
    set_lr(run, 1e-3, "set-2")
    assert run.state.settings.changed == {}


def test_steps_that_are_trained_are_not_taken_away(run: Driven) -> None:
    for _ in range(3):
        run.train()
    run.fill("r0", 4)
    with pytest.raises(cmd.CommandRefused, match="step 4 is under way or trained already"):
        run.do(cmd.change_settings("a", {"train.steps": 3}, spec(run, steps=3)))
    run.do(cmd.change_settings("b", {"train.steps": 4}, spec(run, steps=4)))
    run.train()
    run.checkpoint(digest="")
    assert run.state.phase == "finished"


def finish(run: Driven) -> None:
    while run.state.versions.step < run.state.run.steps:
        run.train()
    run.lease("r0")
    run.checkpoint(digest="")
    assert run.state.phase == "finished"


def test_a_finished_run_with_as_many_steps_stays_finished_and_refuses_a_change(
    run: Driven,
) -> None:
    finish(run)
    run.failover()
    run.do(cmd.start_run(replace(run.state.run), {**FILE, "train.optimizer.lr": 1.0}))
    assert run.names() == [] and run.state.phase == "finished"
    with pytest.raises(cmd.CommandRefused, match="the run has finished"):
        set_lr(run, 1.0)


def test_a_file_that_sets_another_length_takes_back_the_one_that_was_set_meanwhile() -> None:
    """Of steps, epochs and samples one is set. A file whose steps are edited must not leave two of
    them in force."""
    lengths = ("train.steps", "train.epochs", "train.max_samples")
    known = Settings(configured=dict(zip(lengths, (100, None, None), strict=True)))
    known.values = dict(zip(lengths, (None, 3.0, None), strict=True))
    assert known.edited(dict(known.configured)) == {}
    file = dict(zip(lengths, (200, None, None), strict=True))
    assert known.edited(file) == file


# ---- learning rates of steps, by hand ---------------------------------------------------------


def rates(**settings: Any) -> list[float]:
    rate = LearningRate(1.0, **settings)
    return [rate.at(Step(step), 8) for step in range(1, 9)]


def test_schedules_by_hand() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    linear = rates(warmup_steps=4, schedule="linear")
    assert linear == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])
    cosine = rates(warmup_steps=4, schedule="cosine", min_ratio=0.1)
    assert cosine[3] == cosine[4] == 1
    assert cosine[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine[7] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi)))
    assert rates(warmup_steps=8, schedule="cosine")[-1] == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 8])
def test_no_step_of_a_run_has_a_learning_rate_of_zero(schedule: str, warmup: int) -> None:
    assert min(rates(schedule=schedule, warmup_steps=warmup)) > 0
    assert LearningRate(1.0, schedule).at(Step(1), 1) > 0
