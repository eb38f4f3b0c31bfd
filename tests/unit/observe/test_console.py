"""What a person sees: a live table on a terminal, plain lines in a file."""

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from paceline.errors import plural
from paceline.rpc.auth import dashboard_link
from paceline.v1 import admin_pb2, common_pb2
from paceline_launcher.cli.admin import _show_fleet
from paceline_launcher.cli.samples import _text
from paceline_launcher.cli.up import print_outcome
from paceline_launcher.live_view import Console


def status(step: int) -> admin_pb2.StatusReply:
    reply = admin_pb2.StatusReply(
        run_name="demo", phase="running", leader="controller-0", term=1795234359712, step=step
    )
    reply.total_steps = 10
    reply.metrics.update({"reward_mean": 0.5, "loss": 0.1, "samples_per_s": 1650.0})
    reply.workers.add(worker_id="policy-0", role=common_pb2.ROLE_POLICY, state="running", version=3)
    reply.workers.add(worker_id="rollout-9", role=common_pb2.ROLE_ROLLOUT, state="dead")
    reply.controllers.add(controller_id="controller-0", state="leader")
    return reply


def test_live_table_shows_progress_fleet_and_events() -> None:
    out = io.StringIO()
    console = Console(RichConsole(file=out, force_terminal=True, width=120, height=50))
    console.show(status(3))
    console.note("controller-0 leads")
    console.close()
    shown = out.getvalue()
    for part in ("step 3/10", "1,650 samples/s", "policy-0", "controller-0 leads"):
        assert part in shown
    assert "rollout-9" not in shown, "the dead are not part of the fleet"


@pytest.mark.parametrize(("height", "workers"), [(24, 4), (24, 1000), (50, 1000)])
def test_the_newest_event_is_in_sight_however_low_the_terminal(height: int, workers: int) -> None:
    reply = status(3)
    for n in range(workers):
        state = "suspect" if n == workers - 1 else "running"
        doing = f"step {n}: waiting for groups of other replicas, which compute"
        reply.workers.add(worker_id=f"rollout-{n + 10}", state=state, version=3, activity=doing)
    out = io.StringIO()
    console = Console(RichConsole(file=out, force_terminal=True, width=80, height=height))
    for n in range(20):
        console.note(f"event number {n}.", float(n))
    before = out.tell()
    console.show(reply)
    lines = out.getvalue()[before:].split("\n")
    console.close()
    assert len(lines) <= height - 2, "events are in sight above it"
    assert any("suspect" in line for line in lines), "who does not just run is shown first"
    assert "event number 19." in out.getvalue()[:before]


def test_words_of_processes_are_neither_markup_nor_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "wants [batch, seq] of [/tmp/x] \x1b[31mred"
    shown = "wants [batch, seq] of [/tmp/x] \\x1b[31mred"
    reply = status(3)
    reply.provider_trouble = reply.proposed_why = reply.reason = reply.reward_trouble = said
    reply.proposed["policy"] = 2
    reply.workers[0].activity = said
    out = io.StringIO()
    live = Console(RichConsole(file=out, force_terminal=True, width=240, height=50))
    live.show(reply)
    live.note(said)
    plain = Console(RichConsole(file=out, width=240))
    plain.note(said)
    live.close()
    sets = {"held_out": {"step": 5, "reward": 0.5}}
    print_outcome({"status": "failed", "reason": said, "eval_sets": sets}, Path("run"))
    printed = capsys.readouterr()
    assert shown in printed.out
    assert shown in printed.err
    text = out.getvalue()
    assert "31mred" in text
    assert "\x1b[31mred" not in text
    assert sum(line.count(shown) for line in text.splitlines()) >= 7


def test_samples_that_no_controller_counted_are_not_said_to_be_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcome({"status": "interrupted", "ledger_ok": None, "samples_lost": None}, Path("run"))
    printed = capsys.readouterr().out
    assert "not counted" in printed
    assert "None" not in printed.replace("from step None", "")


def test_plain_lines_are_few_and_include_the_last_step() -> None:
    out = io.StringIO()
    console = Console(RichConsole(file=out, width=80))
    for step in range(11):
        console.show(status(step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "step 10/10" in lines[-1]


def test_what_no_step_shows_is_said_once_in_a_while() -> None:
    """An evaluation, and that nothing is learned: the view was silent."""
    out = io.StringIO()
    console = Console(RichConsole(file=out, width=80))
    for step in range(4):
        reply = status(step)
        reply.reason = "evaluation after step 0 (64 prompts, 12 done)"
        reply.reward_trouble = f"the run learns next to nothing: 100% of the last {step} steps"
        console.show(reply)
    told = out.getvalue()
    assert told.count("evaluation after step 0") == told.count("learns next to nothing") == 1


def test_the_desired_numbers_are_shown_with_the_pairs_that_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lent = admin_pb2.StatusReply(desired={"policy": 3, "rollout": 3}, training_seats=2)
    _show_fleet(lent)
    assert "training=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "noun", "told"),
    [(0, "row", "0 rows"), (1, "controller", "1 controller"), (2000, "process", "2,000 processes")],
)
def test_one_is_no_plural(count: int, noun: str, told: str) -> None:
    assert plural(count, noun) == told


def test_the_token_is_shown_to_a_terminal_whole_and_never_to_a_log() -> None:
    link = dashboard_link("http://127.0.0.1:40001", "0123456789abcdef" * 3)
    assert link == f"http://127.0.0.1:40001/#token={'0123456789abcdef' * 3}"
    assert dashboard_link("http://127.0.0.1:40001", None) == "http://127.0.0.1:40001"
    out = io.StringIO()
    console = Console(RichConsole(file=out, force_terminal=True, width=40, height=20))
    assert console.private
    console.note(f"dashboard: {link}")
    console.close()
    assert link in out.getvalue()
    assert not Console(RichConsole(file=io.StringIO())).private


def test_control_sequences_of_samples_reach_no_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
    completion = {
        "reward": 1.0,
        "reward_components": {},
        "versions": [],
        "token_count": 1,
        "finish_reason": "stop",
        "text": hostile,
    }
    counts = {"reward_mean": 1.0, "reward_std": 0.0, "tokens": 1, "staleness": 0, "step": 1}
    counts |= {"dataset_row": 0, "epoch": 0, "attempt": 1, "min_version": 0, "max_version": 0}
    names = {"group_id": "t1", "state": "ready", "owner": "rollout-0", "prompt": hostile}
    shown = _text({**counts, **names, "completions": [completion]})
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert "owned" in shown, "it is shown, and does nothing"
