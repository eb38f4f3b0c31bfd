"""Runs of several kinds whose weights go through a store: every version is swapped from there."""

import re
from pathlib import Path
from typing import Any

import pytest

from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import needs_vllm
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 3
ALONE = {"controllers": 1, "policy": 1, "rollout": 1}
"""One replica and one worker: with max_staleness = 0 each step waits for the version before it."""
LORA = {"model": {"lora": {"rank": 4}}}
TURNS = {"fleet": {"sharing": "turns"}}
VLLM = {"rollout": {"engine": "vllm"}}
BFLOAT16 = {"rollout": {"dtype": "bfloat16"}}
"""So that what changed is read, too."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(LORA, id="lora", marks=pytest.mark.slow),
        pytest.param({"fleet": {"policy_ranks": 2}}, id="ranks", marks=pytest.mark.long),
        pytest.param(TURNS, id="turns", marks=pytest.mark.slow),
        pytest.param(TURNS | LORA, id="turns-lora", marks=pytest.mark.slow),
        pytest.param(TURNS | BFLOAT16, id="turns-deltas", marks=pytest.mark.slow),
        pytest.param(VLLM, id="vllm", marks=[pytest.mark.slow, needs_vllm]),
        pytest.param(VLLM | LORA, id="vllm-lora", marks=[pytest.mark.slow, needs_vllm]),
    ],
)
def test_each_version_is_swapped_from_the_store(
    start: Start, tmp_path: Path, kind: dict[str, dict[str, Any]]
) -> None:
    up = start(
        weights={"url": (tmp_path / "stored").as_uri()},
        fleet=ALONE | kind.get("fleet", {}),
        # Two buckets of 16 MiB: each of two ranks writes one.
        model={"path": str(make_tiny_model(tmp_path / "wide", hidden=512))} | kind.get("model", {}),
        rollout=kind.get("rollout", {}),
        train={"steps": STEPS, "max_staleness": 0, "eval_every": STEPS, "checkpoint_every": STEPS},
    )
    assert up.wait(500) == 0, up.said()
    up.assert_sound(steps=STEPS)
    logs = [(up.run_dir / "logs" / f"{n}-0.log").read_text() for n in ("policy", "rollout")]
    stored, loaded = (
        {int(version) for version in re.findall(f" weights {did} version=([0-9]+)", log)}
        for did, log in zip(("stored", "loaded"), logs, strict=True)
    )
    assert set(range(STEPS)) <= loaded <= stored
    assert " weights sent " not in logs[0]
