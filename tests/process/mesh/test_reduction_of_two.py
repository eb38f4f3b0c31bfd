"""Two replicas reduce during their backward passes, on real connections: equal sums, whatever each
has to compute."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policy_worker.objectives.batch import StepTotals
from policy_worker.step import update
from policy_worker.trainer import EpochMesh, Trainer
from testbed.groups_in_hand import add as add_groups
from testbed.tiny_model import make_tiny_model
from tests.fixtures.meshes import on_all
from tests.fixtures.policy_models import make_config, random_groups

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("transport")
GROUPS = random_groups(4, group_size=3, seed=0, vocab=15)
TOTALS = StepTotals(1, 0, sum(len(c.tokens) // 4 for g in GROUPS for c in g.completions), 12)


@pytest.fixture
def trainers(url: str, tmp_path, monkeypatch, request) -> Iterator[list[Trainer]]:
    monkeypatch.setattr(update, "BUCKET", 2_000)
    config = make_config(
        model=make_tiny_model(tmp_path, hidden=32), train={"tokens_per_microbatch": 64}
    )
    made = [Trainer(config, CPU) for _ in range(2)]
    for trainer in made:
        trainer.restore("", 0, 0)
    run = request.node.name
    on_all(2, lambda m: made[m].form(EpochMesh(1, m, 2, url, run, "127.0.0.1"), 30.0))
    yield made
    for trainer in made:
        trainer.close()


def add(trainer: Trainer, groups: list[Any], *, last: bool) -> None:
    trainer.begin(TOTALS, [(g.task.task_id, g.task.attempt) for g in groups])
    add_groups(trainer, groups, last=last)


def alone(trainer: Trainer, epoch: int) -> torch.Tensor:
    """The local gradients, by a reduction without others."""
    trainer.form(EpochMesh(epoch, 0, 1, "", "run", ""))
    trainer.reduce()
    assert trainer.update.scratch is not None
    return trainer.update.scratch.clone()


@pytest.mark.parametrize("share", [2, 4], ids=["both compute", "one computes"])
def test_both_have_the_sum_whoever_computes_what(trainers: list[Trainer], share: int) -> None:
    shards = [GROUPS[:share], GROUPS[share:]]

    def step(member: int) -> torch.Tensor:
        trainer = trainers[member]
        add(trainer, shards[member], last=True)
        trainer.reduce()
        assert trainer.update.scratch is not None
        return trainer.update.scratch.clone()

    sums = on_all(2, step)
    assert torch.equal(sums[0], sums[1])
    whole = alone(trainers[0], 2) + alone(trainers[1], 2)
    assert torch.equal(sums[0], whole)
