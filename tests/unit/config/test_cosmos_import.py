"""``paceline import cosmos-rl``: files in the shapes of its examples become runs of ours."""

import json
import re
import tomllib

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.config.schema import SETTINGS
from paceline.config.sections.scorers import ScorerConfig
from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.cli.imports import COSMOS_RL, REWARDS, UNKNOWN

TABLE = tomllib.loads(COSMOS_RL.read_text())
GRPO = """
redis = "12800"

[policy]
model_name_or_path = "Qwen/Qwen2.5-7B-Instruct"
model_max_length = 2048
model_gradient_checkpointing = true

[policy.parallelism]
n_init_replicas = 2
tp_size = 1
dp_shard_size = 4

[rollout]
max_response_length = 1024
n_generation = 16
batch_size = 8
gpu_memory_utilization = 0.7
quantization = "fp8"

[rollout.parallelism]
n_init_replicas = 3
tp_size = 2

[rollout.sampling_config]
temperature = 0.9
top_k = -1

[train]
epoch = 15
optm_lr = 2e-6
optm_grad_norm_clip = 0.0
train_batch_per_replica = 512
fsdp_reshard_after_forward = "never"

[train.train_policy]
type = "grpo"
variant = "dapo"
dataset.name = "openai/gsm8k"
dataset.subset = "main"
dataset.split = ["train"]
prompt_column_name = "question"
response_column_name = "answer"
reward_function = { boxed_math = 0.9, gsm8k = 0.1 }
temperature = 0.9
epsilon_high = 0.28
kl_beta = 0.01
mu_iterations = 2
allowed_outdated_steps = 2

[train.ckpt]
enable_checkpoint = true
save_freq = 10
max_keep = 3

[validation]
enable = true
freq = 30
dataset.name = "openai/gsm8k"
dataset.split = "test"
"""
SFT = """
[policy]
model_name_or_path = "Qwen/Qwen2.5-32B-Instruct"
model_max_length = 1024
lora = { r = 16, lora_alpha = 32.0, target_modules = "all-linear", use_rslora = true }

[policy.parallelism]
tp_size = 2
dp_shard_size = 4

[train]
max_num_steps = 200
epoch = 1
optm_warmup_steps = 0.1
optm_decay_type = "cosine"
optm_min_lr_factor = 0.1
train_batch_per_replica = 32
compile = false
model_dtype = "half"

[train.train_policy]
type = "sft"
dataset.name = "chats"
dataset.split = "train"
conversation_column_name = "conversation"
mini_batch = 8

[logging]
logger = ["console", "wandb"]
"""


@pytest.fixture
def imported(tmp_path):
    """The configuration and the text that a file of Cosmos-RL becomes."""

    def convert(text: str):
        source, out = tmp_path / "theirs.toml", tmp_path / "run.toml"
        source.write_text(text)
        done = CliRunner().invoke(app, ["import", "cosmos-rl", str(source), "--out", str(out)])
        assert done.exit_code == 0, done.exception
        checked = CliRunner().invoke(app, ["config", "check", "--settings-only", str(out)])
        assert checked.exit_code == 0, checked.exception
        return load_config(out), out.read_text()

    return convert


def test_an_asynchronous_run_keeps_its_sizes_and_its_loss(imported):
    run, _ = imported(GRPO)
    assert (run.train.algorithm, run.train.groups_per_step) == ("dapo", 512 * 2 // 16)
    assert (run.fleet.policy, run.fleet.policy_ranks, run.fleet.rollout) == (2, 4, 3)
    assert (run.rollout.engine, run.rollout.tensor_parallel) == ("vllm", 2)
    assert (run.rollout.group_size, run.rollout.max_tokens, run.rollout.max_context) == (
        *(16, 1024),
        2048,
    )
    assert (run.rollout.temperature, run.rollout.top_k) == (0.9, 0)
    assert run.rollout.vllm == {"gpu_memory_utilization": 0.7}
    loss, optimizer = run.train.loss, run.train.optimizer
    assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.2, 0.28, 0.01)
    assert not loss.overlong_filter  # which our dapo has and theirs has not
    assert (optimizer.lr, optimizer.max_grad_norm) == (2e-6, None)
    assert (run.train.max_staleness, run.train.epochs, run.train.steps) == (2, 15, None)
    assert (run.train.checkpoint_every, run.train.keep_checkpoints) == (10, 3)
    assert (run.train.export_every, run.train.eval_every) == (1, 30)
    assert (run.data.path, run.data.name, run.data.split) == ("openai/gsm8k", "main", "train")
    assert (run.data.eval_path, run.data.eval_split) == ("openai/gsm8k", "test")
    assert run.reward.functions == {"math_verify": 0.9, "rewards:gsm8k": 0.1}
    assert not run.train.memory.reshard_after_forward


def test_defaults_of_theirs_that_are_not_ours_are_written(imported):
    run, _ = imported(re.sub(r"allowed.*|model_max.*|max_resp.*|n_generation.*", "", GRPO))
    optimizer = run.train.optimizer
    assert (optimizer.weight_decay, optimizer.eps, optimizer.warmup_steps) == (0.01, 1e-6, 20)
    assert (run.train.max_staleness, run.rollout.max_tokens) == (4, 2048)
    assert (run.rollout.group_size, run.rollout.max_context) == (16, 4096)
    assert run.model.dtype == "bfloat16"


def test_fine_tuning_keeps_its_schedule_and_its_adapters(imported):
    run, text = imported(SFT)
    assert (run.train.algorithm, run.recorded, run.rollout.group_size) == ("sft", True, 1)
    assert (run.train.steps, run.train.epochs) == (200, None)
    optimizer = run.train.optimizer
    assert (optimizer.warmup_steps, optimizer.schedule, optimizer.min_lr_ratio) == (
        20,
        "cosine",
        0.1,
    )
    # Each of four data-parallel ranks reads 32 rows; tensor parallelism becomes ranks of FSDP.
    assert (run.train.groups_per_step, run.fleet.policy_ranks) == (4 * 32, 2 * 4)
    assert (run.model.lora.rank, run.model.lora.alpha) == (16, 32.0)
    assert (run.data.messages_field, run.model.compile) == ("conversation", False)
    assert run.metrics.sinks == ["tensorboard", "wandb"]
    assert f'train.model_dtype = "half": {UNKNOWN}' in text


def test_a_teacher_is_a_scorer_and_devices_are_shared_in_turns(imported):
    text = 'mode = "colocated"\n' + GRPO.replace("dapo", "grpo").replace(
        "mu_iter", "on_policy = true #"
    )
    text += '\n[distillation]\nenable = true\nmodel_name_or_path = "big"\n'
    run, _ = imported(text)
    assert (run.train.algorithm, run.scorers.by_name["teacher"].path) == ("distill", "big")
    assert (run.fleet.sharing, run.fleet.rollout, run.rollout.tensor_parallel) == ("turns", 2, 4)
    assert run.train.max_staleness == 0


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            GRPO,
            {
                *("redis", "rollout.batch_size", "rollout.quantization"),
                *("train.train_policy.temperature", "train.train_policy.mu_iterations"),
                *("train.train_policy.reward_function gsm8k",),
            },
        ),
        (
            SFT,
            {
                *("policy.lora.use_rslora", "train.epoch"),
                *("train.train_policy.mini_batch", "train.model_dtype"),
            },
        ),
    ],
    ids=["grpo", "sft"],
)
def test_each_line_without_counterpart_is_named_with_its_reason(imported, text, left):
    head = imported(text)[1].split("\n\n")[0].splitlines()[1:]
    assert {line[4:].partition(" = ")[0].partition(":")[0] for line in head} == left
    assert all(len(line.partition(": ")[2]) > 4 for line in head)


@pytest.mark.parametrize(
    ("text", "old", "new", "line"),
    [
        (
            SFT,
            "mini_batch",
            'reward_function = "gsm8k"\nmini_batch',
            f'{REWARDS} = "gsm8k": a run of',
        ),
        (
            f'{GRPO}[distillation]\nenable = true\nmodel_name_or_path = "big"\n',
            *('variant = "dapo"', "", f'{REWARDS} = {{"boxed_math": 0.9'),
        ),
        (
            *(GRPO, "dp_shard_size = 4", "dp_shard_size = -1"),
            "policy.parallelism.dp_shard_size = -1: 1 is taken",
        ),
        (
            *(GRPO, "per_replica = 512", "per_replica = 50"),
            "train.train_batch_per_replica: 100 samples are no whole number of groups of 16",
        ),
        (
            *(GRPO, "enable_checkpoint = true", "enable_checkpoint = false"),
            "train.ckpt.enable_checkpoint = false: checkpoints are always written",
        ),
    ],
    ids=["rewards-sft", "rewards-distill", "other-gpus", "rounded", "checkpoints"],
)
def test_what_is_taken_in_another_way_is_named(imported, text, old, new, line):
    assert text.count(old) == 1
    assert f"\n#   {line}" in imported(text.replace(old, new))[1]


def test_a_filter_that_would_be_another_one_is_named(imported):
    given = GRPO.replace('type = "grpo"', 'type = "grpo"\nfilter_reward_metric = ["acc"]')
    assert "train.train_policy.filter_reward_metric = " in imported(given)[1].split("\n\n")[0]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[policy]", "[policy", "Expected"),
        ("[train.train_policy]", "[train.other]", "no [train.train_policy]"),
        ("[train.train_policy]", "train_policy = 3\n[train.other]", "no [train.train_policy]"),
        ('dataset.name = "openai/gsm8k"', "", "train.train_policy.dataset.name is not given"),
        ("{ boxed_math = 0.9, gsm8k = 0.1 }", "5", f"{REWARDS} = 5: give a name"),
        ("{ boxed_math = 0.9, gsm8k = 0.1 }", "[5]", f"{REWARDS} = [5]: give a name"),
        ("boxed_math = 0.9", 'boxed_math = "x"', f"{REWARDS}: the weight of math_verify"),
        (
            "epoch = 15",
            'max_num_steps = 9\noptm_warmup_steps = "x"',
            'optm_warmup_steps = "x": give',
        ),
        ('type = "grpo"', 'type = "dpo"', 'train.train_policy.type = "dpo"'),
        ("epoch = 15", "epoch = 15\nnon_text = true", "train.non_text"),
        ("optm_lr = 2e-6", 'optm_lr = "fast"', "train.optm_lr: Input should be a valid number"),
        ("n_generation = 16", "n_generation = 0", "rollout.n_generation = 0"),
        ("dp_shard_size = 4", 'dp_shard_size = "all"', "policy.parallelism.dp_shard_size"),
        ("top_k = -1", "top_k = -2", "rollout.sampling_config.top_k"),
        ("epoch = 15", "epoch = 15\noptm_warmup_steps = 0.1", "give a number of steps"),
    ],
)
def test_a_file_that_cannot_be_ours_is_refused_by_name(tmp_path, old, new, named):
    assert GRPO.count(old) >= 1
    (source := tmp_path / "bad.toml").write_text(GRPO.replace(old, new, 1))
    done = CliRunner().invoke(app, ["import", "cosmos-rl", str(source)])
    assert isinstance(done.exception, BadInput)
    assert str(done.exception).startswith(f"{source}: ")
    assert named in str(done.exception)
    assert done.stdout == ""


def test_a_file_is_replaced_only_if_asked(tmp_path):
    (source := tmp_path / "theirs.toml").write_text(GRPO)
    (out := tmp_path / "run.toml").write_text("mine")
    command = ["import", "cosmos-rl", str(source), "--out", str(out)]
    assert "--force replaces it" in str(CliRunner().invoke(app, command).exception)
    assert out.read_text() == "mine"
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
    missing = CliRunner().invoke(app, ["import", "cosmos-rl", str(tmp_path / "none.toml")])
    assert "No such file" in str(missing.exception)


def test_the_table_names_settings_of_ours_and_gives_reasons() -> None:
    for theirs, entry in TABLE["settings"].items():
        assert not entry.keys() - {
            "to",
            "default",
            "of",
            "when",
            "as",
            "only",
            "why",
            "here",
            "note",
        }
        assert "why" in entry or "only" not in entry, theirs
        to = entry.get("to", "run.name")
        section, _, field = to.replace("teacher.", "").rpartition(".")
        known = to in SETTINGS or section in ("rollout.vllm", "fleet.scorers")
        assert known or field in ScorerConfig.model_fields, to
    ours = [name for entry in TABLE["also"] for name in entry["ours"]]
    assert all(name in SETTINGS or name.startswith("scorers.") for name in ours)
    names = [name for names in TABLE["without"].values() for name in names]
    assert len(names) == len(set(names))
    assert not set(names) & TABLE["settings"].keys()
    json.dumps(TABLE)
