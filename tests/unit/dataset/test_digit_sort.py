"""The demo's checked-in data, tokenizer, weights and configuration fit together."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.digit_sort import make_data, warm_start
from examples.digit_sort.reward import sorted_exactly

HERE = Path(make_data.__file__).parent
MODEL = HERE / "model-0.1M"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_the_checked_in_data_is_what_its_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_data", "--out", str(tmp_path)])
    make_data.main()
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


def test_no_held_out_prompt_is_trained_on_and_every_answer_is_right():
    train, held_out = (
        [json.loads(line) for line in (HERE / name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    )
    prompts = [{row["prompt"] for row in rows} for rows in (train, held_out)]
    assert (len(prompts[0]), len(prompts[1])) == (len(train), len(held_out)) == (4096, 256)
    assert not prompts[0] & prompts[1]
    for row in train + held_out:
        digits = row["prompt"].removeprefix("s").removesuffix("=")
        assert 4 <= len(digits) <= 12
        assert row["answer"] == "".join(sorted(digits))


def test_the_warm_start_leaves_reinforcement_learning_something_to_do():
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert 0.5 <= warm_start.exact_match(model, random.Random("fresh"), 1024) <= 0.65


@pytest.mark.parametrize(
    ("completion", "finish_reason", "token_count", "reward"),
    [
        ("1379", "stop", 5, 1.0),
        ("1379", "length", 4, 0.0),
        ("1379", "stop", 6, 0.0),  # a special token in between, which the text leaves out
        ("", "stop", 1, 0.0),
    ],
)
def test_the_reward_is_for_exactly_the_answer_and_the_end(
    completion, finish_reason, token_count, reward
):
    assert sorted_exactly(completion, "1379", finish_reason, token_count) == reward
