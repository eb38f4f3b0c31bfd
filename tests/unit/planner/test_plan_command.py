"""The planner's command: bad input at the door, measured files and runs, JSON and picture."""

import json
import shlex
import socket

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline_launcher.cli import app
from testbed.planner.__main__ import app as planner
from tests.fixtures.event_files import write_events
from tests.fixtures.golden import Golden
from tests.unit.memory_plan.test_memory_plan import QWEN3_06B

GOLDEN = Golden("plans")
TIMES = """
mean_tokens = 100
[[measured]]
gpus = 4
generation_s = 40.0
update_s = 30.0
[[measured]]
gpus = 8
generation_s = 30.0
update_s = 20.0
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen3", **QWEN3_06B}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        """
        [model]
        path = "model"
        [data]
        path = "rows.jsonl"
        [reward]
        functions = ["exact_match"]
        [rollout]
        group_size = 4
        max_tokens = 512
        [train]
        steps = 10
        groups_per_step = 8
        """
    )
    (tmp_path / "times.toml").write_text(TIMES)

    def run(*arguments):
        result = CliRunner().invoke(planner, ["run.toml", *arguments])
        if isinstance(result.exception, BadInput):
            return str(result.exception)
        assert result.exit_code == 0, result.output
        return result

    return run


def test_a_plan_of_measured_times_is_one_number_and_draws_a_picture(plan, tmp_path):
    result = plan("--gpus", "4", "--gpu", "h100", "--times", "times.toml", "--json")
    found = json.loads(result.stdout)
    (size,) = found["sizes"]
    assert size["policy_gpus"] + size["rollout_gpus"] == 4
    assert size["ratio"]["low"] == size["ratio"]["high"] > 0.5
    assert "4 and 8 GPUs" in found["basis"]
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_of_ones_own_gives_the_times(plan, tmp_path):
    run = tmp_path / "earlier"
    run.mkdir()
    (run / "config.toml").write_text((tmp_path / "run.toml").read_text())
    row = {
        "replicas": 1, "time_compute_s": 3.0, "time_reduce_s": 0.1, "time_commit_s": 0.1,
        "time_publish_s": 0.4, "time_generate_s": 6.0, "response_tokens_mean": 100, "step_s": 3.5,
    }  # fmt: skip
    commit = {"type": "StepCommitted", "metrics": row}
    write_events(run, *({**commit, "step": n} for n in range(1, 31)))
    result = plan("--gpus", "2", "--gpu", "h100", "--from-run", "earlier")
    assert "took 3.5 s; this model says" in result.stdout
    assert "A measurement at a second size removes it" in result.stdout


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_bad_input_is_named_at_the_door(plan, case):
    GOLDEN.check(case, plan(*shlex.split(case)))


@pytest.fixture
def no_hub(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


def test_a_mistyped_model_is_named_without_the_long_wait_of_the_hubs_client(plan, no_hub, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "other").mkdir()
    config = tmp_path / "run.toml"
    whole = config.read_text()
    for path, said in (
        ("modle", "nor in the hub's cache, and the hub"),
        ("models/none", "no such directory, though models is one"),
    ):
        config.write_text(whole.replace('path = "model"', f'path = "{path}"'))
        assert f"model.path: {path}" in (found := plan("--gpu", "h100", "--gpus", "8"))
        assert said in found
        assert said in str(
            CliRunner().invoke(app, ["plan", "memory", "run.toml", "--gpu", "h100"]).exception
        )
        # What was typed here is looked at first.
        assert "cannot be read" in plan("--gpu", "h100", "--times", "none.toml")
