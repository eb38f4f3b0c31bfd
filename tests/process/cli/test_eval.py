"""``paceline eval``: the scores of a run, on a model or a checkpoint, and errors that name the
remedy."""

import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner, Result

from paceline.config.load import load_config
from paceline.config.sections.inputs import LoraConfig
from paceline.errors import UserError
from paceline.evaluation import pass_at_k
from paceline.lora import adapter_shapes, write_peft
from paceline_launcher.cli import app
from policy_worker.checkpoint.checkpoint import Checkpointer
from testbed.fleets.local_run import ROOT, write_run
from testbed.patience import patient
from testbed.tiny_model import make_tiny_reward_model
from tests.fixtures.train_states import synthetic_step, tiny_state

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
Evaluate = Callable[..., Result]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Evaluate]:
    """``paceline eval`` in this process, which has imported torch. What it changes of it ends with
    the test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads, bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    yield lambda *arguments: CliRunner().invoke(app, ["eval", *map(str, arguments)])
    torch.set_num_threads(threads)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint, as ``paceline up`` would leave it."""
    where = tmp_path_factory.mktemp("eval")
    run_dir = where / "run"
    run_dir.mkdir()
    path = write_run(where, train={"lr": 0.5})
    raw = tomllib.loads(path.read_text())
    (run_dir / "config.toml").write_text(tomli_w.dumps(raw))
    config = load_config(path)
    state = tiny_state(config)
    synthetic_step(state)
    checkpointer = Checkpointer(run_dir, config)
    checkpointer.save_async(state).result(60)
    checkpointer.close()
    make_tiny_reward_model(where / "scorer", where / "model")
    return run_dir


def test_a_model_and_a_checkpoint_of_it_are_judged_by_the_same_samples(
    evaluate: Evaluate, run_dir: Path
) -> None:
    data, out = run_dir.parent / "held_out.jsonl", run_dir.parent / "scores.json"
    reward = ("--reward", "testbed.rewards:digit_first", "--set", "fleet.rollout_threads=1")
    options = ("--data", data, "--k", 4, "--set", "rollout.max_tokens=8", "--json", out, *reward)
    done = evaluate(run_dir.parent / "model", *options)
    assert done.exit_code == 0, done.exception
    assert "8 of 8 prompts, reward" in done.stderr
    for name in ("reward", "pass@1", "pass@2", "pass@4", "maj@4", "tokens per", "truncated share"):
        assert name in done.stdout
    model = json.loads(out.read_text())
    check_report(model)
    done = evaluate(run_dir.parent / "model", *options, "--limit", 3)
    assert done.exit_code == 0, done.exception
    assert json.loads(out.read_text())["rows"] == model["rows"][:3], "the seed is the same"
    assert (model["prompts"], model["samples"], model["temperature"]) == (8, 4, 1.0)

    done = evaluate(run_dir, "--k", 4, "--json", out, *reward)
    assert done.exit_code == 0, done.exception
    checkpoint = json.loads(out.read_text())
    check_report(checkpoint)
    assert "step-" in checkpoint["checkpoint"] and checkpoint["data"] == str(data)
    assert checkpoint["max_tokens"] == 8, "of its run"
    assert checkpoint["rows"] != model["rows"], "the weights are those of the checkpoint"

    lora, path = LoraConfig(rank=2), run_dir.parent / "model"
    shapes = adapter_shapes(AutoConfig.from_pretrained(path), lora)
    for spread, same in (0.0, True), (0.5, False):
        adapters = run_dir.parent / f"adapters-{spread}"
        adapters.mkdir()
        drawn = {name: torch.randn(shape) * spread for name, shape in shapes.items()}
        write_peft(adapters, drawn, lora, str(path))
        done = evaluate(adapters, *options)
        assert done.exit_code == 0, done.exception
        assert (json.loads(out.read_text())["rows"] == model["rows"]) == same


def check_report(found: dict[str, Any]) -> None:
    """The means are those of the rows."""
    rows, k = found["rows"], found["samples"]
    assert [row["row"] for row in rows] == list(range(8)) and not found["failed"]
    for n in (1, 2, 4):
        mean = sum(pass_at_k(k, row["solved"], n) for row in rows) / len(rows)
        assert math.isclose(found["metrics"][f"pass@{n}"], mean)
    assert math.isclose(found["metrics"]["reward"], sum(r["reward"] for r in rows) / len(rows))
    assert found["metrics"]["tokens"] == sum(row["tokens"] for row in rows) / k / len(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere/at/all"], "no such directory, or"),
        (["{}/model", "--data", "missing.jsonl"], "missing.jsonl"),
        (["{}/model"], "--data is missing"),
        (["{}", "--data", "{}/held_out.jsonl"], "no config.json"),
        (
            ["{}/model", "--data", "{}/held_out.jsonl", "--reward", "nothing"],
            "nothing is not a reward",
        ),
        (["{}/scorer", "--data", "{}/held_out.jsonl"], "it scores text and writes none"),
        (["{}/run", "--json", "/no/such/place.json"], "--json"),
    ],
)
def test_bad_input_is_named_with_the_remedy(run_dir: Path, options: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["eval", *(o.format(run_dir.parent) for o in options)])
    assert isinstance(found.exception, UserError) and found.exception.exit_status == 2
    assert words in str(found.exception)


def test_an_interrupt_shows_what_is_scored_by_then(run_dir: Path) -> None:
    out = run_dir.parent / "interrupted.json"
    many = run_dir.parent / "many.jsonl"
    many.write_text((run_dir.parent / "held_out.jsonl").read_text() * 5000)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline_launcher", "eval", str(run_dir), "--data", str(many)),
            *("--k", "2", "--set", "fleet.rollout_threads=1", "--json", str(out)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " of 40,000 prompts" in line:
                break
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=patient(120))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, said
    assert "of 40,000 prompts: the means are over those scored" in said and "reward" in shown
    found = json.loads(out.read_text())
    assert found["interrupted"] and 0 < found["scored"] < 40000 and "Traceback" not in said
