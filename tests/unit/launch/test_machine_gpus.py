"""GPUs of one machine: how many there are, who gets which, and when they are free again."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from paceline import memory_plan, model_shape
from paceline.config.schema import Config
from paceline_launcher.node_placement import VARIABLE, MachineGpus, machine_gpus, visible_gpus
from paceline_launcher.preflight.findings import Finding, Start
from paceline_launcher.preflight.machine import gpu_placement, turns_needed
from tests.fixtures import configs


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


def test_workers_are_dealt_round_if_there_are_fewer_gpus() -> None:
    gpus = MachineGpus(config_of(policy=2, rollout=3), ("0", "1"))
    running = ["policy-0", "policy-1", "rollout-0", "rollout-1", "rollout-2"]
    dealt = {name: gpus.take(name, running) for name in running}
    assert sorted(dealt.values()) == [("0",)] * 3 + [("1",)] * 2
    assert gpus.take("policy-1", running) == dealt["policy-1"], "it keeps its GPU over a restart"
    assert gpus.take("rollout-3", [*running, "rollout-3"]) == ("1",)


def test_a_scorer_at_the_devices_of_a_pair_needs_no_gpu_and_has_one_of_theirs() -> None:
    scorers = {"rm": {"kind": "reward_model", "path": "m"}}
    fleet = {"policy": 2, "policy_ranks": 2, "rollout": 2, "scorers": 3, "sharing": "turns"}
    engine = {"engine": "vllm", "tensor_parallel": 2}
    names = ("0", "1", "2", "3")
    config = configs.config_of(fleet=fleet, scorers=scorers, rollout=engine)
    gpus, running = MachineGpus(config, names), ["policy-0", "policy-1", "rollout-0", "rollout-1"]
    assert not gpus.shared
    for name in running:
        gpus.take(name, running)
    running += [f"scorer-rm-{n}" for n in range(3)]
    assert [gpus.take(name, running) for name in running[4:]] == [("0",), ("2",), ("0",)]
    assert gpus.take("policy-0", running) == ("0", "1")
    apart = {"rm": scorers["rm"] | {"takes_turns": False}}
    assert MachineGpus(configs.config_of(fleet=fleet, scorers=apart, rollout=engine), names).shared


def test_a_pair_that_takes_turns_is_on_the_same_gpus_whoever_comes_first() -> None:
    gpus = MachineGpus(config_of(policy=2, rollout=2, sharing="turns"), ("0", "1"))
    running = ["policy-0", "rollout-1", "rollout-0", "policy-1"]
    assert not gpus.shared
    assert [gpus.take(name, running) for name in running] == [("0",), ("1",), ("0",), ("1",)]
    assert gpus.take("policy-0", running) == ("0",), "it comes back to its partner"
    start = Start(config_of(rollout=1, policy_ranks=2, sharing="turns"), Path(), here=True)
    ((state, found),) = [(f.state, f.found) for f in gpu_placement(start, {VARIABLE: "0,1"})]
    assert state == "fail" and "computes on 2 GPUs and an engine on 1" in found


@pytest.mark.parametrize(
    ("fits", "seen", "settings", "wanted"),
    [
        (False, "0", {}, True),
        (True, "0", {}, False),
        (False, "0,1", {}, False),
        (False, "0", {"fleet": {"sharing": "none"}}, False),
        (False, "0", {"fleet": {"policy": 2, "rollout": 2}}, False),
        (False, "0", {"rollout": {"vllm": {"gpu_memory_utilization": 0.4}}}, False),
    ],
)
def test_a_pair_takes_turns_where_one_gpu_has_no_room_for_both_and_nobody_has_chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fits: bool,
    seen: str,
    settings: Any,
    wanted: bool,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(memory_plan, "found_gpu", lambda: memory_plan.Gpu("a GPU", 1 << 34))
    monkeypatch.setattr(memory_plan, "fits_side_by_side", lambda *_: fits)
    monkeypatch.setattr(model_shape, "read_shape", lambda config: None)
    sections = {"model": {"path": str(tmp_path)}, "data": {"path": "d"}, **settings}
    config = Config.model_validate(sections)
    turns, why = turns_needed(config, {VARIABLE: seen})
    assert turns == wanted == ("side by side" in why)
    # One of a hub: its copy on this machine says the same, and without one nothing is decided.
    hub = {**sections, "model": {"path": "me/m"}}
    for copy in (str(tmp_path / "config.json"), None):
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, at=copy: at)
        turns, why = turns_needed(Config.model_validate(hub), {VARIABLE: seen})
        assert turns == (wanted and copy is not None)
        assert ("is not known" in why) == (copy is None and (wanted or fits))


@pytest.mark.parametrize(
    ("device", "seen", "given"),
    [("auto", "0,1", True), ("auto", "0,1,2", True), ("cpu", "0,1,2", False), ("auto", "", False)],
)
def test_gpus_are_given_out_if_workers_compute_on_them(device: str, seen: str, given: bool) -> None:
    config = config_of()
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    assert (machine_gpus(config, {"CUDA_VISIBLE_DEVICES": seen}) is not None) == given


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("2,3", ("2", "3")),
        ("GPU-8d1c, GPU-77aa", ("GPU-8d1c", "GPU-77aa")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_the_variable_names_those_that_a_process_may_use(
    named: str, seen: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}, tmp_path) == seen


def test_without_the_variable_the_device_files_are_counted(tmp_path: Path) -> None:
    # Those of a container that got the third and the eighth GPU of its machine.
    for name in ("nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


def placement(config: Config, seen: str, **start: Any) -> list[Finding]:
    here = Start(config, Path("runs/r"), **{"here": True, **start})
    return list(gpu_placement(here, {"CUDA_VISIBLE_DEVICES": seen}))


@pytest.mark.parametrize(
    ("seen", "state", "found", "remedy"),
    [
        ("1,3,5,7", "ok", "policy-0 1,3; rollout-0 5; rollout-1 7", ""),
        ("0,1,2", "warn", "policy-0 0,1; rollout-0 2; rollout-1 0", "paceline node"),
    ],
)
def test_each_worker_is_named_with_its_gpus_and_too_few_are_a_warning(
    seen: str, state: str, found: str, remedy: str
) -> None:
    (check,) = placement(config_of(policy_ranks=2), seen)
    assert check.state == state and check.found.endswith(found) and remedy in check.remedy


def test_more_pairs_than_gpus_are_refused_because_each_plans_a_whole_one() -> None:
    (check,) = placement(config_of(policy=2, rollout=2, sharing="turns"), "0")
    assert check.state == "fail" and "fleet.policy" in check.remedy
    assert 'fleet.sharing = "turns"' in check.found and "2 pairs" in check.found
    (check,) = placement(config_of(policy=2, rollout=2, sharing="turns"), "0,1")
    assert check.state == "ok"


@pytest.mark.parametrize("seen", ["", "0,1,2"])
def test_nothing_is_said_about_machines_whose_gpus_do_not_matter(seen: str) -> None:
    config = config_of(provider="none") if seen else config_of()
    assert placement(config, seen) == []
    assert placement(config_of(), "0,1,2,3", placed=("policy-0",)) == []
    on_cpus = config.model.model_copy(update={"device": "cpu"})
    assert not placement(config_of().model_copy(update={"model": on_cpus}), seen)
    on_gpus = config.model.model_copy(update={"device": "cuda"})
    if not seen:
        (check,) = placement(config.model_copy(update={"model": on_gpus}), seen)
        assert check.state == "fail" and "model.device is cuda" in check.found
