"""An export is a directory that transformers loads, with exactly the trained weights."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

from paceline.config.schema import Config
from paceline.lora import LoraError
from paceline_launcher.cli import app
from paceline_launcher.launch import ending, exports
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.checkpoint.export import MARKER, ExportError, export
from testbed.tiny_model import make_tiny_model
from tests.fixtures.event_files import write_events
from tests.fixtures.train_states import synthetic_step, tiny_config, tiny_state


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    config = tiny_config(folder)
    state = tiny_state(config)
    for _ in range(2):
        synthetic_step(state)
    checkpointer = Checkpointer(folder / "run", config)
    path = checkpointer.save_async(state).result(30).path
    checkpointer.close()
    return config, state, path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_equal_the_trained_bits(trained, tmp_path, dtype):
    config, state, checkpoint = trained
    out = export(checkpoint, config.model.path, tmp_path / "out", dtype)
    model = AutoModelForCausalLM.from_pretrained(out)
    loaded = dict(model.named_parameters())
    for name, weight in state.named_weights():
        assert loaded[name].dtype == getattr(torch, dtype)
        assert torch.equal(loaded[name], weight.to(loaded[name].dtype)), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if dtype == "float32":
        tokens = torch.tensor([[5, 6, 7]])
        assert torch.allclose(model(tokens).logits, state.model(tokens).logits, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("s12=") == AutoTokenizer.from_pretrained(config.model.path).encode(
        "s12="
    )
    for file in Path(config.model.path).glob("tokenizer*"):
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert json.loads((out / MARKER).read_text())["step"] == 2


def test_adapters_are_exported_as_peft_has_them_or_merged(trained, tmp_path):
    """The base is the model itself, at its path."""
    config = tiny_config(tmp_path, lora={"rank": 4, "alpha": 6.0})
    state = tiny_state(config)
    for _ in range(2):
        synthetic_step(state)
    checkpointer = Checkpointer(tmp_path / "run", config)
    checkpoint = checkpointer.save_async(state).result(30).path
    checkpointer.close()
    adapters = export(checkpoint, None, tmp_path / "adapters")
    stored = load_file(adapters / "adapter_model.safetensors")
    weights = dict(state.named_weights())
    assert {n.removeprefix("base_model.model.") for n in stored} == weights.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, weights[name.removeprefix("base_model.model.")]), name
    described = json.loads((adapters / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == config.model.path
    assert (adapters / "tokenizer.json").exists() and not (adapters / "config.json").exists()

    with pytest.raises(ExportError, match="has adapters already: --merge"):
        export(adapters, None, tmp_path / "again")
    tokens = torch.tensor([[5, 6, 7]])
    for source in checkpoint, adapters:
        out = export(source, None, tmp_path / "merged", "float32", merge=True)
        logits = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
        torch.testing.assert_close(logits, state.model(tokens).logits, atol=1e-5, rtol=1e-5)
        assert json.loads((out / MARKER).read_text())["checkpoint"] == str(checkpoint)
    file, name = adapters / "adapter_model.safetensors", "base_model.model.lora_embedding_A"
    save_file(stored | {name: torch.zeros(4, 4)}, file)
    with pytest.raises(ExportError, match="lora_embedding_A is not in"):
        export(adapters, None, tmp_path / "out", merge=True)
    half = next(name for name in stored if name.endswith("lora_B.weight"))
    save_file({name: tensor for name, tensor in stored.items() if name != half}, file)
    with pytest.raises(LoraError, match="has no lora_B"):
        export(adapters, None, tmp_path / "out", merge=True)
    other = make_tiny_model(tmp_path / "wider", hidden=64)
    with pytest.raises(LoraError, match=r"the adapter model\.layers\.0\..* fits no layer of"):
        export(checkpoint, other, tmp_path / "out", merge=True)


def test_a_model_without_tokenizer_and_a_checkpoint_that_names_no_parts(trained, tmp_path):
    config, _, checkpoint = trained
    old, bare = tmp_path / "step-000002", tmp_path / "bare"
    shutil.copytree(checkpoint, old)
    shutil.copytree(config.model.path, bare, ignore=shutil.ignore_patterns("*token*", "vocab*"))
    meta = json.loads((old / "meta.json").read_text())
    del meta["parts"]
    (old / "meta.json").write_text(json.dumps(meta))
    assert (export(old, bare, tmp_path / "out") / "model.safetensors").exists()


def test_the_command_takes_a_directory_of_checkpoints_and_says_nothing_beside_its_line(
    trained, tmp_path, capfd
):
    """Where the roles were started by hand, the events are in a controller's directory."""
    config, _, checkpoint = trained
    model = tmp_path / "moved"
    shutil.copytree(config.model.path, model)
    logging.enable_progress_bar()
    out = tmp_path / "out"
    arguments = ["export", str(checkpoint.parent.parent), "--out", str(out)]
    app([*arguments, "--model", str(model), "--dtype", "bfloat16"], standalone_mode=False)
    assert capfd.readouterr() == (f"exported {checkpoint} to {out}\n", "")
    assert json.loads((out / MARKER).read_text())["model"] == str(model)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_that_is_killed_leaves_the_earlier_one_and_no_remains(trained, tmp_path):
    _, _, checkpoint = trained
    out = export(checkpoint, None, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    code = (
        "import os, pathlib, sys\n"
        "from policy_worker.checkpoint import export\n"
        "export.put_in_place = lambda *_: os.kill(os.getpid(), 9)\n"
        "export.export(pathlib.Path(sys.argv[1]), None, pathlib.Path(sys.argv[2]), 'bfloat16')\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(checkpoint), str(out)])
    assert killed.returncode == -signal.SIGKILL
    assert (out / "model.safetensors").read_bytes() == before
    remains = [path for path in tmp_path.iterdir() if path != out]
    assert remains, "it had begun to write"
    export(checkpoint, None, out, "bfloat16")
    assert list(tmp_path.iterdir()) == [out]


def test_export_replaces_an_earlier_export_and_nothing_else(trained, tmp_path):
    config, _, checkpoint = trained
    out = export(checkpoint, None, tmp_path / "out")
    assert export(checkpoint, None, out) == out
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(ExportError, match="not an earlier export"):
        export(checkpoint, config.model.path, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"


def test_checkpoints_that_cannot_be_exported_are_refused_with_the_reason(trained, tmp_path):
    config, _, checkpoint = trained
    with pytest.raises(ExportError, match="step-000099: no such checkpoint") as refused:
        export(checkpoint.with_name("step-000099"), None, tmp_path / "out")
    assert str(checkpoint) in str(refused.value), "the newest there is"
    half = tmp_path / "step-000002"
    shutil.copytree(checkpoint, half)
    (half / "meta.json").unlink()
    with pytest.raises(ExportError, match="not a complete checkpoint"):
        export(half, config.model.path, tmp_path / "out")
    with pytest.raises(ExportError, match=r"cannot be read.*--model"):
        export(checkpoint, tmp_path / "nothing", tmp_path / "out")
    make_tiny_model(tmp_path / "deeper", hidden=32, layers=3)
    with pytest.raises(ExportError, match=r"is not of .*deeper"):
        export(checkpoint, tmp_path / "deeper", tmp_path / "out")
    with pytest.raises(ExportError, match="float8"):
        export(checkpoint, None, tmp_path / "out", "float8")
    assert not (tmp_path / "out").exists()


# ---- a model whose code comes with its checkpoint, and the run that trusted it

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
    recorded = {"type": "CheckpointRecorded", "path": str(checkpoint), "step": 0}
    write_events(run_dir, recorded)
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
        return await ending.export_newest(config, run_dir, print)

    out = asyncio.run(export())
    assert out is not None, (run_dir / "logs" / "export.log").read_text()
    assert (out / "odd.py").exists()


@pytest.mark.heavy
async def test_a_run_that_goes_on_leaves_a_directory_of_its_checkpoint(run):
    config, run_dir, checkpoint = run
    dumped = config.model_dump()
    dumped["train"]["export_every"] = 1
    config = Config.model_validate(dumped)
    noted: asyncio.Queue[str] = asyncio.Queue()
    going = asyncio.create_task(exports.export_while_it_runs(config, run_dir, noted.put_nowait))
    out = run_dir / "exports" / "step-000000"
    assert await asyncio.wait_for(noted.get(), 300) == f"exported {out}"
    going.cancel()
    assert json.loads((out / MARKER).read_text())["checkpoint"] == str(checkpoint)
    assert (out / "model.safetensors").exists()
    assert (out / "odd.py").exists()


def test_a_run_has_finished_though_the_disk_has_no_room_for_its_export(run, monkeypatch):
    async def full(spec):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(spec.log))

    monkeypatch.setattr(exports.Child, "start", full)
    config, run_dir, _ = run
    how = {"status": "finished", "reason": "completed", "redis_url": ""}
    summary = asyncio.run(ending.close_books(config, run_dir, print, **how))
    assert (summary["status"], summary["export"]) == ("finished", None)
    assert ending.exit_status(summary) == 1
    for words in ("completed", "export.log. Free space", f"paceline export {run_dir} --out"):
        assert words in summary["reason"]


def test_the_command_runs_foreign_code_only_when_told_to(run, tmp_path):
    _, run_dir, _checkpoint = run
    command = ["export", str(run_dir), "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, ExportError)
    assert "--trust-remote-code" in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model.safetensors").exists()
