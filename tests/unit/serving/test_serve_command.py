"""The command that `paceline serve` starts. What is refused: tests/golden/commands.txt."""

import json
import os
import shlex
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from paceline.config.sections.inputs import LoraConfig
from paceline.lora import write_peft
from paceline_launcher.cli import app
from tests.fixtures.engines import needs_vllm

KEY = "0123456789abcdef"


def make_export(path: Path) -> Path:
    path.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"")
    (path / "paceline.json").write_text("{}")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "maths"
    make_export(run / "export")
    (run / "config.toml").write_text("")
    return run


@pytest.fixture(params=["CPU wheel", "GPU wheel"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    on_cpu: bool = request.param == "CPU wheel"
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if on_cpu else [])
    return on_cpu


def serve(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--dry-run", *words], env={**environment})


def started(*words: str, **environment: str) -> list[str]:
    """The words of the server's command."""
    shown = serve(*words, **environment)
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    return shlex.split(shown.stdout)


@needs_vllm
def test_a_run_is_served_from_its_newest_export_under_its_name(run_dir: Path, cpu: bool) -> None:
    newer = make_export(run_dir / "best")
    os.utime(run_dir / "export" / "paceline.json", (1, 1))
    words = started(str(run_dir))
    assert f"--model={newer}" in words and "--served-model-name=maths" in words
    assert "--host=127.0.0.1" in words and "--port=8000" in words
    assert ("--enforce-eager" in words) == cpu, "what a shared CPU needs, and a GPU does not"
    assert ("--max-num-batched-tokens=4096" in words) == cpu
    assert "--middleware" not in " ".join(words), "loopback without a key"


@needs_vllm
def test_the_options_have_the_last_word_over_flags_that_are_passed_on(
    run_dir: Path, cpu: bool
) -> None:
    words = started(
        *(str(run_dir / "export"), "--port", "8100", "--max-model-len", "512"),
        *("--served-name", "m", "--", "--hos=0.0.0.0", "--tensor-parallel-size", "2"),
    )
    assert words.index("--hos=0.0.0.0") < words.index("--host=127.0.0.1"), "vLLM takes the last one"
    assert {"--port=8100", "--max-model-len=512"} < set(words)
    assert "--served-model-name=m" in words
    assert words[words.index("--tensor-parallel-size") + 1] == "2"


@needs_vllm
@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "SERVE_KEY"])
def test_a_key_is_asked_for_and_never_shown(run_dir: Path, variable: str) -> None:
    named = () if variable == "VLLM_API_KEY" else ("--api-key-env", variable)
    shown = serve(str(run_dir), "--host", "0.0.0.0", *named, **{variable: KEY})
    assert "--middleware=paceline_launcher.vllm_server.KeyCheck" in shown.stdout
    assert KEY not in shown.output


@needs_vllm
def test_adapters_are_served_beside_their_base(tmp_path: Path) -> None:
    base, adapters = make_export(tmp_path / "base"), tmp_path / "maths"
    adapters.mkdir()
    weights = {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(20, 8)}
    write_peft(adapters, weights, LoraConfig(rank=20), str(base))
    words = started(str(adapters))
    assert f"--model={base}" in words and f"--served-model-name={base}" in words
    assert words[words.index("--lora-modules") + 1] == f"maths={adapters}"
    assert "--max-lora-rank=32" in words and "--enable-lora" in words
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    # What vLLM reads of it.
    helper = PEFTHelper.from_local_dir(str(adapters), None)
    helper.validate_legal(LoRAConfig(max_lora_rank=32))
    assert (helper.r, helper.vllm_lora_scaling_factor) == (20, 1.6)
    write_peft(adapters, weights, LoraConfig(rank=20), str(base), "SEQ_CLS")
    assert "it scores text" in str(serve(str(adapters)).exception)


@needs_vllm
def test_an_export_elsewhere_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert "--served-model-name=qwen-math" in started(str(make_export(tmp_path / "qwen-math")))
