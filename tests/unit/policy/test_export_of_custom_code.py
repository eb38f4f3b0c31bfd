"""A model whose code comes with its checkpoint is exported by the run that trusted it."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from paceline.config.schema import Config
from paceline_launcher.cli import app
from paceline_launcher.launch.ending import export_newest
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.checkpoint.export import ExportError
from tests.fixtures.train_states import tiny_config, tiny_state

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OddConfig(Qwen3Config):
    model_type = "odd"


class OddForCausalLM(Qwen3ForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Config and directory of a run of a model with code of its own, and its checkpoint."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = tiny_config(tmp_path)
    run_dir = tmp_path / "run"
    checkpointer = Checkpointer(run_dir, config)
    checkpoint = checkpointer.save_async(tiny_state(config)).result(30).path
    checkpointer.close()
    (run_dir / "events.jsonl").write_text(
        json.dumps({"type": "CheckpointRecorded", "path": str(checkpoint), "step": 0}) + "\n"
    )
    model = tmp_path / "tiny-model"
    (model / "odd.py").write_text(CODE)
    shape = json.loads((model / "config.json").read_text())
    shape |= {"model_type": "odd", "architectures": ["OddForCausalLM"]}
    shape["auto_map"] = {
        "AutoConfig": "odd.OddConfig",
        "AutoModelForCausalLM": "odd.OddForCausalLM",
    }
    (model / "config.json").write_text(json.dumps(shape))
    dumped = config.model_dump()
    dumped["model"]["trust_remote_code"] = True
    return Config.model_validate(dumped), run_dir, checkpoint


@pytest.mark.heavy
def test_the_final_export_trusts_what_the_run_trusted(run):
    config, run_dir, _ = run

    async def export():
        return await export_newest(config, run_dir, print)

    out = asyncio.run(export())
    assert out is not None, (run_dir / "logs" / "export.log").read_text()
    assert (out / "odd.py").exists()


def test_the_command_runs_foreign_code_only_when_told_to(run, tmp_path):
    _, run_dir, _checkpoint = run
    command = ["export", str(run_dir), "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, ExportError)
    assert "--trust-remote-code" in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model.safetensors").exists()
