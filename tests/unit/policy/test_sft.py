"""Supervised fine-tuning against TRL and a plain forward: loss and gradients of recorded rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.dataset.recorded_encoding import RowEncoder
from paceline.ids import Step, Version
from paceline.prompt_tokenizer import PromptTokenizer
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.model.policy_model import load_model
from policy_worker.objectives.batch import StepTotals
from policy_worker.step.gradients import Gradients
from policy_worker.step.held_out import measure_held_out
from tests.fixtures.chat_model import MARKED, make_chat_model
from tests.fixtures.configs import config_of
from tests.fixtures.training_steps import CPU, flat, keys, make_gradients

CHATS = [
    [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 1"},
        {"role": "assistant", "content": "5"},
    ],
    [
        {"role": "user", "content": "a longer question?"},
        {"role": "assistant", "content": "yes, it is long"},
    ],
]
TEXTS = [("2+2=", "4"), ("what is it? ", "a longer answer")]
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "chat": ({"messages_field": "messages"}, [{"messages": chat} for chat in CHATS]),
    "completion": ({"completion_field": "c"}, [{"prompt": p, "c": c} for p, c in TEXTS]),
}
TRL = {"chat": 4.56986141204834, "completion": 4.622956275939941}
"""Loss that the SFTTrainer of TRL 1.16.0 computes for these rows in one batch, with
assistant_only_loss or completion_only_loss."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("sft") / "model", MARKED)


def made(
    model: Path, form: str, **train: Any
) -> tuple[Gradients, list[rollout_pb2.Group], StepTotals]:
    data, rows = FORMS[form]
    config = config_of(
        model={"path": str(model), "device": "cpu"},
        data=data,
        train={"algorithm": "sft", **train},
        rollout={"source": "recorded"},
    )
    encoder = RowEncoder(config, PromptTokenizer(config))
    groups = [
        encoder.encode(row, common_pb2.TaskRef(task_id=f"t{i}", attempt=1))
        for i, row in enumerate(rows)
    ]
    tokens = sum(sum(mask_of(group)) for group in groups)
    gradients = make_gradients(config, load_model(str(model), config.model, CPU))
    return gradients, groups, StepTotals(Step(1), Version(0), tokens, len(groups))


def mask_of(group: rollout_pb2.Group) -> list[int]:
    (completion,) = group.completions
    return list(completion.loss_mask or b"\1" * (len(completion.tokens) // 4))


def added(
    gradients: Gradients, groups: list[rollout_pb2.Group], totals: StepTotals
) -> torch.Tensor:
    gradients.begin(totals, keys(groups))
    gradients.add(groups)
    return flat(gradients)


def ids(data: bytes) -> list[int]:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).tolist()


def plainly(
    model: Path, groups: list[rollout_pb2.Group], aggregation: str
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of each row by itself, unpacked, by transformers' own forward."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums, counts = [], []
    for group in groups:
        prompt, answer = ids(group.prompt_tokens), ids(group.completions[0].tokens)
        logits = network(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        mask = torch.tensor(mask_of(group))
        sums.append(-(logp * mask).sum())
        counts.append(mask.sum())
    if aggregation == "token_mean":
        loss = torch.stack(sums).sum() / torch.stack(counts).sum()
    else:
        loss = (torch.stack(sums) / torch.stack(counts)).mean()
    loss.backward()
    found = [p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]
    return float(loss), torch.cat(found)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_rows_give_the_gradient_of_rows_that_are_alone(
    model: Path, form: str, aggregation: str
) -> None:
    for room in (8, 8192):
        made_of = made(model, form, aggregation=aggregation, tokens_per_microbatch=room)
        gradients, groups, totals = made_of
        found = added(gradients, groups, totals)
        loss, expected = plainly(model, groups, aggregation)
        assert gradients.stats.mean("loss") == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        if aggregation == "token_mean":
            assert loss == pytest.approx(TRL[form], abs=1e-5)
            assert gradients.stats.mean("nll") == pytest.approx(TRL[form], abs=1e-5)


def test_a_held_out_measurement_is_the_loss_of_a_step_and_leaves_its_gradients_alone(
    model: Path,
) -> None:
    gradients, groups, totals = made(model, "chat", tokens_per_microbatch=8)
    before = added(gradients, groups, totals)
    # Nothing is compared with a policy that did not sample.
    assert set(gradients.stats.entries) == {"loss", "nll", "entropy", "row_tokens"}
    measured = measure_held_out(gradients, groups)
    assert measured.mean("loss") == pytest.approx(gradients.stats.mean("loss"), abs=1e-6)
    assert torch.equal(before, flat(gradients))
