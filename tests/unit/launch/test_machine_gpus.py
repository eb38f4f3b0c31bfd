"""GPUs of one machine: who gets which, and when they are free again."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.schema import Config
from paceline_launcher.node_placement import MachineGpus, machine_gpus, shown


def config_of(**fleet: Any) -> Config:
    sections = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}}
    return Config.model_validate({**sections, "fleet": {"policy": 1, "rollout": 2} | fleet})


def test_workers_get_the_first_free_gpus_and_keep_them_over_a_restart() -> None:
    gpus = MachineGpus(config_of(policy_ranks=2), ("0", "1", "2", "GPU-3"))
    running = ["policy-0", "rollout-0", "rollout-1"]
    assert [gpus.take(name, running) for name in running] == [("0", "1"), ("2",), ("GPU-3",)]
    assert gpus.take("policy-0", running) == ("0", "1")


def test_no_two_running_workers_share_a_gpu_whatever_grows() -> None:
    gpus = MachineGpus(config_of(), ("0", "1", "2", "3"))
    running = ["policy-0", "rollout-0", "rollout-1"]
    for name in running:
        gpus.take(name, running)
    assert gpus.take("policy-1", running) == ("3",)
    assert gpus.take("rollout-2", [*running, "policy-1"]) is None
    # One that has ended leaves its GPU to the next, and finds another one if it comes back.
    running = ["policy-0", "rollout-0", "policy-1"]
    assert gpus.take("rollout-2", running) == ("2",)
    assert gpus.take("rollout-1", ["policy-0", "policy-1", "rollout-2"]) == ("1",)


def test_workers_that_run_already_keep_what_they_see() -> None:
    gpus = MachineGpus(config_of(), ("0", "1", "2"))
    gpus.keep("rollout-0", {"CUDA_VISIBLE_DEVICES": "0"})
    gpus.keep("rollout-1", {"CUDA_VISIBLE_DEVICES": "7"})  # of an earlier time with other GPUs
    assert gpus.take("policy-0", ["rollout-0"]) == ("1",)
    assert gpus.take("rollout-0", ["policy-0"]) == ("0",)
    assert gpus.take("rollout-1", ["policy-0", "rollout-0"]) == ("2",)


def test_workers_are_dealt_round_if_there_are_fewer_gpus() -> None:
    gpus = MachineGpus(config_of(policy=2, rollout=3), ("0", "1"))
    running = ["policy-0", "policy-1", "rollout-0", "rollout-1", "rollout-2"]
    dealt = {name: gpus.take(name, running) for name in running}
    assert sorted(dealt.values()) == [("0",)] * 3 + [("1",)] * 2
    assert gpus.take("policy-1", running) == dealt["policy-1"], "it keeps its GPU over a restart"
    assert gpus.take("rollout-3", [*running, "rollout-3"]) == ("1",)


@pytest.mark.parametrize(
    ("device", "seen", "given"),
    [("auto", "0,1", True), ("auto", "0,1,2", True), ("cpu", "0,1,2", False), ("auto", "", False)],
)
def test_gpus_are_given_out_if_workers_compute_on_them(device: str, seen: str, given: bool) -> None:
    config = config_of()
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    assert (machine_gpus(config, {"CUDA_VISIBLE_DEVICES": seen}) is not None) == given


def test_a_worker_without_need_of_a_gpu_sees_what_the_machine_has() -> None:
    assert shown(()) == {}
    assert shown(("4", "GPU-7")) == {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
