"""Held-out rows of recorded data: one that cannot be measured is left out, and the others are
measured without it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.v1 import policy_pb2
from policy_worker.control_plane import PolicyReport
from policy_worker.held_out_evaluation import HeldOutEvaluation
from policy_worker.rows.row_forwards import RowForwards
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fakes.policy_control import ScriptedControl
from tests.fixtures.policy_models import make_config
from tests.fixtures.training_steps import CPU, form_alone

LONG = {"prompt": "s9876543210=", "chosen": "0123456789", "rejected": "9876543210"}
ROWS = [
    {"prompt": "s21=", "chosen": "12", "rejected": "21"},
    {"prompt": "s312=", "chosen": "123", "rejected": "321"},
    LONG,
    {"prompt": "s40=", "chosen": "04", "rejected": "40"},
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    torch.set_num_threads(1)
    config = make_config(
        model=make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32),
        data={
            "path": "unused",
            "chosen_field": "chosen",
            "rejected_field": "rejected",
            "eval_path": "unused",
            "max_prompt_tokens": 16,
        },
        train={"algorithm": "dpo"},
        rollout={"source": "recorded", "group_size": 2},
    )
    made = Trainer(config, CPU)
    form_alone(made)
    made.restore("", 0, 0)
    # Another policy than its reference, so that the loss depends on the rows.
    with torch.no_grad():
        for parameter in made.state.parts["policy"].parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    yield made
    made.close()


def measured(trainer: Trainer, rows: list[dict[str, str]]) -> policy_pb2.HeldOutMeasured:
    """What the controller hears, which has the rows, two in a message."""
    texts, heard = [json.dumps(row) for row in rows], []

    def rows_of(request: Any) -> policy_pb2.HeldOutReply:
        return policy_pb2.HeldOutReply(
            rows=texts[request.first : request.first + 2], total=len(texts)
        )

    control: Any = ScriptedControl(HeldOutRows=rows_of, RecordHeldOut=heard.append)
    HeldOutEvaluation(trainer.config, control, trainer, PolicyReport()).run(0, lambda: False)
    (found,) = heard
    return found


def assert_same(found: policy_pb2.HeldOutMeasured, expected: policy_pb2.HeldOutMeasured) -> None:
    assert found.rows == expected.rows
    for name in ("loss", "pair_accuracy", "reward_margin"):
        one, other = found.stats[name], expected.stats[name]
        assert (one.sum, one.weight) == pytest.approx((other.sum, other.weight), abs=1e-5)


def test_a_row_that_does_not_fit_into_memory_leaves_the_others_measured(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is packed with others, which do fit. No row that fits is no loss."""
    others = measured(trainer, [row for row in ROWS if row != LONG])
    scores, room = RowForwards.scores, 30

    def small_device(self: RowForwards, micro: Any) -> Any:
        if micro.input_ids.numel() > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")
        return scores(self, micro)

    monkeypatch.setattr(RowForwards, "scores", small_device)
    found = measured(trainer, ROWS)
    assert_same(found, others)
    assert found.left_out == 1
    room = 0
    found = measured(trainer, ROWS)
    assert (found.rows, found.left_out, dict(found.stats)) == (0, 4, {})


def test_a_row_that_cannot_be_encoded_is_left_out(trainer: Trainer) -> None:
    others = measured(trainer, ROWS[:2])
    found = measured(trainer, [*ROWS[:2], {"prompt": "s1=", "chosen": "1", "rejected": "1"}])
    assert_same(found, others)
    assert found.left_out == 1
