"""GPUs that the workers of a fleet on one machine get, as the checks before a start say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline_launcher.preflight.findings import Finding, Start
from paceline_launcher.preflight.machine import gpu_placement


def config_of(**fleet: Any) -> Config:
    sections = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}}
    return Config.model_validate({**sections, "fleet": {"policy": 1, "rollout": 2} | fleet})


def placement(config: Config, seen: str, **start: bool) -> list[Finding]:
    here = Start(config, Path("runs/r"), **{"here": True, **start})
    return list(gpu_placement(here, {"CUDA_VISIBLE_DEVICES": seen}))


def test_each_worker_is_named_with_its_gpus() -> None:
    (check,) = placement(config_of(policy_ranks=2), "1,3,5,7")
    assert check.state == "ok"
    assert check.found.endswith("policy-0 1,3; rollout-0 5; rollout-1 7")


def test_too_few_gpus_are_a_warning_that_says_who_shares() -> None:
    (check,) = placement(config_of(policy_ranks=2), "0,1,2")
    assert check.state == "warn"
    assert check.found.endswith("policy-0 0,1; rollout-0 2; rollout-1 0")
    assert "paceline node" in check.remedy


@pytest.mark.parametrize("seen", ["", "0,1,2"])
def test_nothing_is_said_about_machines_whose_gpus_do_not_matter(seen: str) -> None:
    config = config_of(provider="none") if seen else config_of()
    assert placement(config, seen) == []
    assert placement(config_of(), "0,1,2,3", placed=True) == []
    on_cpus = config.model.model_copy(update={"device": "cpu"})
    assert not placement(config_of().model_copy(update={"model": on_cpus}), seen)
