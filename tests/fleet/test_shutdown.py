"""A run ends although a process is missing at that very moment, or in the middle of a long step."""

import signal

import pytest

from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("missing", ["policy-1", "rollout-1", "controller-1"])
def test_a_stop_does_not_wait_for_a_process_that_hangs(start: Start, missing: str) -> None:
    up = start(train={"steps": 100_000})
    up.until(lambda: up.step() >= 2)
    up.kill(missing, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    assert up.wait(60) == 130, up.said()
    up.assert_sound("interrupted")


def test_a_run_finishes_although_a_replica_hangs_in_its_last_steps(start: Start) -> None:
    up = start(train={"steps": 25}, fleet={"lease_ttl_s": 3.0})
    up.until(lambda: up.step() >= 20)
    up.kill("policy-1", signal.SIGSTOP)
    assert up.wait(150) == 0, up.said()
    up.assert_sound(steps=25)


def test_a_step_that_takes_longer_than_a_stop_is_left_for_a_checkpoint(start: Start) -> None:
    up = start(
        # Some thousand micro-batches of one short row each.
        train={"steps": 1000, "groups_per_step": 256, "tokens_per_microbatch": 16}
        | {"checkpoint_every": 1000, "eval_every": 1000, "skip_zero_advantage": False},
        fleet={"policy": 2, "rollout": 1, "stop_s": 8.0},
        rollout={"group_size": 16},
    )
    up.until(lambda: up.step() >= 1, 300)
    up.until(lambda: any("computing" in w["activity"] for w in up.status()["workers"]), 200)
    before = up.step()
    up.process.send_signal(signal.SIGINT)
    assert up.wait(120) == 130, up.said()
    assert up.alive() == []
    faults = [e["text"] for e in up.events() if e.get("severity") in ("warning", "error")]
    assert faults == []
    saved = [e["step"] for e in up.events("CheckpointRecorded")]
    assert saved and saved[-1] >= before
    assert up.events("RunSuspended")[-1]["checkpoint_step"] == saved[-1]
