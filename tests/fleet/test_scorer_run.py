"""Scorers in a real run: what they score is trained, and no fault of theirs is a fault of a
task."""

import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, paceline
from testbed.tiny_model import make_tiny_model, make_tiny_reward_model
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEPS = 30


def test_a_run_survives_the_loss_of_all_its_scorers(start: Start, tmp_path: Path) -> None:
    """Both are stopped: groups wait, and `paceline why` says for what. Then one is killed and comes
    back as another process, and the other one goes on. No attempt fails, and nothing is lost."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    make_tiny_reward_model(tmp_path / "rm", model)
    up = start(
        rows=256,
        reward={
            "functions": {"scorer:helpful": 1.0, "testbed.rewards:digit_first": 0.1},
            "processes": 0,
        },
        scorers={"helpful": {"kind": "reward_model", "path": str(tmp_path / "rm")}},
        train={"steps": STEPS, "eval_every": 15, "checkpoint_every": 15},
        fleet={"controllers": 1, "policy": 1, "rollout": 1, "scorers": 2, "lease_ttl_s": 2.0},
    )
    scorers = ("scorer-helpful-0", "scorer-helpful-1")
    up.until(lambda: up.step() >= 2 and len(_of(up, "WorkerRegistered")) == 2)
    for name in scorers:
        up.kill(name, signal.SIGSTOP)
    up.until(lambda: set(scorers) <= {event["worker_id"] for event in _of(up, "WorkerDied")})
    why = ("why", "--run-dir", str(up.run_dir))
    up.until(lambda: "0 of 2 scorers helpful" in paceline(*why).stdout)
    before = up.step()
    assert before < STEPS
    up.kill(scorers[0])
    up.until(lambda: up.step() > before)
    up.kill(scorers[1], signal.SIGCONT)
    assert up.wait() == 0, up.said()
    up.assert_sound(steps=STEPS)
    assert not [event for event in up.events("TaskReleased") if event["counts"]]


def _of(up: Up, kind: str) -> list[dict[str, str]]:
    return [event for event in up.events(kind) if event["worker_id"].startswith("scorer")]
