"""A run of recorded data through all real processes: no engine, every row once, and a held-out loss
that falls."""

from pathlib import Path

import pytest

from testbed.fleets.local_run import write_run
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 80


def test_supervised_fine_tuning_survives_the_deaths_of_both_kinds_of_workers(
    start: Start, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        data={"completion_field": "answer"},
        reward={},
        train={
            "algorithm": "sft",
            "steps": STEPS,
            "groups_per_step": 4,
            "lr": 3e-3,
            "checkpoint_every": 20,
            "eval_every": 20,
        },
        rollout={"source": "recorded"},
        fleet={"controllers": 1, "policy": 2, "rollout": 1},
    )
    text = config.read_text().replace("group_size = 4\n", "")
    config.write_text(text)
    up = start()
    # A worker that dies before it has registered is nobody's death.
    up.until(
        lambda: {"policy-0", "rollout-0"} <= {e["worker_id"] for e in up.events("WorkerRegistered")}
    )
    up.until(lambda: up.step() >= 10)
    for name in ("policy-0", "rollout-0"):
        up.kill(name)
    assert up.wait() == 0, up.said()
    assert up.assert_sound(steps=STEPS)["samples_trained"] == STEPS * 4
    assert {e["worker_id"] for e in up.events("WorkerDied")} == {"policy-0", "rollout-0"}
    up.command("ledger", "verify")

    evals = [row for row in up.metrics() if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == list(range(0, STEPS + 1, 20))
    losses = [row["eval_loss"] for row in evals]
    assert losses[-1] < 0.7 * losses[0]
    assert all(row["eval_count"] == 8 for row in evals)
    best = up.events("BestCheckpointChosen")[-1]
    assert -best["reward_mean"] == pytest.approx(min(losses[1:]))
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    # Nothing was sampled, so there is nothing to compare with it.
    assert not any(name.startswith(("logprob_gap", "staleness", "reward")) for name in steps[-1])
    assert up.events("LinkAssigned") == []
