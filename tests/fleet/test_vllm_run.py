"""A whole run on vLLM: digit sort for a few steps, with swaps under running requests."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from testbed.fleets.local_run import ROOT, Up
from tests.fixtures.engines import needs_vllm

pytestmark = [pytest.mark.long, needs_vllm, pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 4


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapters"])
def test_a_short_run_on_vllm(tmp_path: Path, lora: bool) -> None:
    settings = {
        "rollout.engine": "vllm",
        "rollout.max_sequences": 64,
        "train.steps": STEPS,
        # Small steps: what is left of the gap is the engine's, also for tokens of older weights.
        "train.optimizer.lr": 3e-5,
        "train.groups_per_step": 8,
        "train.optimizer.warmup_steps": 0,
        "train.eval_every": STEPS,
        "train.eval_limit": 16,
        "train.checkpoint_every": STEPS,
        "fleet.controllers": 1,
        "fleet.policy": 1,
        "fleet.rollout": 1,
    }
    if lora:
        settings |= {"model.lora.rank": 8, "train.optimizer.lr": 3e-4}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    up = Up(ROOT / "examples" / "digit_sort" / "digit_sort.toml", tmp_path / "run", *options)
    try:
        assert up.wait(limit_s=500) == 0, up.said()
    finally:
        up.close()
    summary = up.assert_sound(steps=STEPS)
    if lora:
        # No more travels than the adapters.
        adapters = load_file(Path(summary["export"]) / "adapter_model.safetensors").values()
        log = (tmp_path / "run" / "logs" / "policy-0.log").read_text()
        sent = [int(size) for size in re.findall(r" weights sent .* bytes=(\d+)", log)]
        assert sent and max(sent) <= 1.05 * sum(adapter.nbytes for adapter in adapters)
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    assert all(row["logprob_gap_mean"] < 0.05 for row in steps), steps
    fresh = [row for row in steps if row["staleness_max"] == 0]
    assert fresh and all(row["logprob_gap_mean"] < 1e-3 for row in fresh), steps
    assert summary["eval_last"] > 0.3, summary
