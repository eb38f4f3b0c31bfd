"""Configurations of the math example: `config check` and `plan memory` accept each on the GPUs that
its first lines name."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from examples.math.make_tiny import CHAT_TEMPLATE
from paceline.config.load import load_config
from paceline_launcher.cli import app
from paceline_launcher.node_placement import Placement
from testbed.fleets.local_run import ROOT
from testbed.tiny_model import make_char_tokenizer
from tests.fixtures.engines import needs_vllm
from tests.unit.memory_plan.test_memory_plan import QWEN3_32B, QWEN25_7B

HERE = ROOT / "examples" / "math"
GPUS_PER_NODE = 8
MODELS = {
    "Qwen3-8B": ("qwen3", QWEN3_32B | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,  # noqa: E501
    }),
    "Qwen3-32B": ("qwen3", QWEN3_32B),
    "Qwen3-30B-A3B": ("qwen3_moe", QWEN3_32B | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,  # noqa: E501
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,  # noqa: E501
        "norm_topk_prob": True,
    }),
    "Qwen2.5-32B-Instruct": ("qwen2", QWEN25_7B | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,  # noqa: E501
        "num_key_value_heads": 8,
    }),
}  # fmt: skip
"""What the models' published config.json say."""
CASES = {
    "qwen3_8b": (1, "h100-80g", 8.19),
    "qwen3_32b": (2, "h100-80g", 32.76),
    "qwen3_30b_a3b": (2, "h100-80g", 30.53),
    "qwen25_32b_gsm8k": (2, "h100-80g", 32.76),
}
"""the GPU, and 10^9 parameters as the models' cards have them."""
ROWS = {"math": (7_500, 5_000), "gsm8k": (7_473, 1_319)}
"""Rows to train and to evaluate on, of the published data sets."""


@pytest.fixture(scope="module")
def home_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which models and data are where the configurations look for them; the weights
    are empty files."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = make_char_tokenizer("abc")
    tokenizer.chat_template = CHAT_TEMPLATE
    for name, (family, numbers) in MODELS.items():
        directory = home / "models" / name
        AutoConfig.for_model(family, **numbers).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / "model.safetensors").touch()
    for name, counts in ROWS.items():
        (home / "data" / name).mkdir(parents=True)
        for split, count in zip(("train", "test"), counts, strict=True):
            rows = (json.dumps({"problem": f"{n} + 1", "answer": f"{n + 1}"}) for n in range(count))
            (home / "data" / name / f"{split}.jsonl").write_text("\n".join(rows))
    return home


def invoke(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_every_configuration_is_covered_and_named_on_the_page() -> None:
    names = {path.stem for path in HERE.glob("*.toml")}
    assert names == {*CASES, "tiny"}
    page = (ROOT / "docs" / "tutorial.md").read_text()
    assert all(f"(../examples/math/{name}.toml)" in page for name in names)


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_fits_the_gpus_that_it_names(
    name: str, home_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, gpu, billions = CASES[name]
    monkeypatch.chdir(home_directory)
    path = HERE / f"{name}.toml"
    planned = invoke("plan", "memory", str(path), "--gpu", gpu)
    assert planned.endswith(": fits\n")
    (parameters,) = re.findall(r": ([0-9.]+) B parameters\n", planned)
    assert float(parameters) == pytest.approx(billions, abs=0.01)
    gigabytes = re.findall(r"\d+", gpu)[-1]
    head = " ".join(re.findall(r"^# (.*)", path.read_text(), re.MULTILINE))
    assert f"eight GPUs of {gigabytes} GB" in head and (nodes == 2) == ("two nodes" in head)


@needs_vllm
@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_config_check_accepts_a_configuration(
    name: str, home_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home_directory)
    # It also refuses what does not fit the GPUs of this machine, which are others.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = invoke("config", "check", str(HERE / f"{name}.toml"))
    if name == "qwen25_32b_gsm8k":
        assert "39 steps of 192 groups x 16 completions" in said


@pytest.mark.parametrize("name", CASES)
def test_every_gpu_of_the_nodes_has_a_worker(name: str) -> None:
    nodes, _, _ = CASES[name]
    config = load_config(HERE / f"{name}.toml")
    placed = Placement(config, nodes, GPUS_PER_NODE)
    for node in range(nodes):
        used = [gpu for where in placed.on(node).values() for gpu in where.gpus]
        assert sorted(used) == list(range(GPUS_PER_NODE))
