"""One group that cannot be trained is named, and the gradients of the others are what they would
be."""

import numpy as np
import pytest
import torch

from paceline.payloads.group_payload import encode
from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.control_plane import PolicyReport
from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.grpo import Grpo
from policy_worker.rows.group_reading import AcceptedGroup
from policy_worker.rows.row_forwards import RowForwards
from policy_worker.trainer import Trainer
from policy_worker.training_steps import TrainingSteps
from testbed.tiny_model import make_tiny_model
from tests.fakes.policy_control import ScriptedControl
from tests.fixtures.group_meta import submitted
from tests.fixtures.policy_models import make_config, random_groups

CPU = torch.device("cpu")


class Controller(ScriptedControl):
    """Holds the payloads and hears what the replica says of them."""

    def __init__(self, groups: list[rollout_pb2.Group]) -> None:
        super().__init__(TryGroup=self.tried, RejectGroups=self.rejected)
        self.payloads = {g.task.task_id: g for g in groups}
        self.stands = True
        self.heard: list[tuple[str, tuple[str, ...]]] = []
        self.detail = ""

    def fetch(self, keys, over):
        found = [self.payloads.get(task_id) for task_id, _ in keys]
        return [None if group is None else encode(group) for group in found]

    def tried(self, request):
        self.heard.append(("try", (request.task_id,)))
        return policy_pb2.TryReply(stands=self.stands)

    def rejected(self, request):
        fault = policy_pb2.GroupFault.Name(request.fault).removeprefix("GROUP_FAULT_").lower()
        self.heard.append((fault, tuple(ref.task_id for ref in request.groups)))
        self.detail = request.detail
        return policy_pb2.RejectReply(left=len(request.groups))


def plan_of(groups, suspects=(), step=1):
    counts = [(len(g.completions), sum(len(c.tokens) // 4 for c in g.completions)) for g in groups]
    return policy_pb2.StepPlan(
        step=step,
        version=step - 1,
        mesh_epoch=4,
        shard=[g.task for g in groups],
        groups=[
            policy_pb2.PlannedGroup(tokens=t, sequences=s, suspect=g.task.task_id in suspects)
            for g, (s, t) in zip(groups, counts, strict=True)
        ],
        total_tokens=sum(t for _, t in counts),
        total_sequences=sum(s for s, _ in counts),
    )


@pytest.fixture
def groups():
    return random_groups(5, group_size=3, seed=4, vocab=15)


@pytest.fixture
def trainer(tmp_path):
    return Trainer(make_config(model=make_tiny_model(tmp_path, hidden=32)), CPU)


def compute(trainer, control, plan):
    trainer.payloads = control
    steps = TrainingSteps(control, trainer, PolicyReport(), None, None, None)
    complete = steps.add_shard(plan) is not None
    scratch = torch.full((trainer.gradients.size,), float("nan"))
    trainer.gradients.flatten(scratch)
    return complete, scratch


def undisturbed(trainer, groups):
    complete, gradient = compute(trainer, Controller(groups), sealed_plan(groups))
    trainer.gradients.clear()
    assert complete and gradient.abs().sum() > 0
    return gradient


def test_every_lost_payload_is_named_at_once_and_nothing_is_added(trainer, groups):
    control = Controller(groups)
    del control.payloads["t1"], control.payloads["t3"]
    complete, gradient = compute(trainer, control, plan_of(groups))
    assert not complete
    assert control.heard == [("payload_lost", ("t1", "t3"))]
    assert (gradient == 0).all()


def with_value(data, dtype, at, value):
    values = np.frombuffer(data, dtype).copy()
    values[at] = value
    return values.tobytes()


def damage(group, kind):
    first, _, last = group.completions
    if kind == "count":  # consistent in itself: only the accepted metadata tell
        del group.completions[2]
    elif kind == "length":
        last.logprobs = last.logprobs[:-4]
    elif kind == "shift":  # as many numbers in all, but the second begins one too early
        second = group.completions[1]
        first.logprobs, second.logprobs = first.logprobs[:-4], first.logprobs[-4:] + second.logprobs
    elif kind == "mask":
        first.loss_mask = bytes(len(first.tokens) // 4)
    elif kind == "token":
        last.tokens = with_value(last.tokens, "<i4", -1, -7)
    elif kind == "prompt":
        group.prompt_tokens = np.array([900_000], "<i4").tobytes()
    elif kind == "logprob":
        first.logprobs = with_value(first.logprobs, "<f4", 0, np.nan)
    else:
        group.task.attempt = 7


@pytest.mark.parametrize(
    "kind", ["length", "shift", "count", "mask", "token", "prompt", "logprob", "name"]
)
def test_a_payload_that_contradicts_its_facts_is_rejected_by_its_name(trainer, groups, kind):
    plan = plan_of(groups)
    control = Controller([rollout_pb2.Group.FromString(g.SerializeToString()) for g in groups])
    damage(control.payloads["t2"], kind)
    complete, gradient = compute(trainer, control, plan)
    assert not complete
    assert control.heard == [("payload_invalid", ("t2",))]
    assert "t2" in control.detail
    assert (gradient == 0).all()


def sealed_plan(groups):
    """With the digests under which the groups were accepted."""
    plan = plan_of(groups)
    for group, planned in zip(groups, plan.groups, strict=True):
        meta = submitted(group)
        planned.digest = meta.digest
    return plan


def test_a_store_that_returns_other_bytes_is_found_out(trainer, groups):
    """A reward that changed on the way contradicts nothing else."""
    plan = sealed_plan(groups)
    control = Controller([rollout_pb2.Group.FromString(g.SerializeToString()) for g in groups])
    control.payloads["t2"].completions[0].reward += 0.5
    complete, gradient = compute(trainer, control, plan)
    assert not complete
    assert control.heard == [("payload_invalid", ("t2",))]
    assert "t2 is not what was submitted" in control.detail
    assert (gradient == 0).all()


def test_a_trainer_that_was_attached_to_no_store_fails(trainer, groups):
    plan = plan_of(groups)
    keys = [(ref.task_id, ref.attempt) for ref in plan.shard]
    trainer.begin(StepTotals.of(plan), keys)
    accepted = [AcceptedGroup.of(*pair) for pair in zip(keys, plan.groups, strict=True)]
    with pytest.raises(RuntimeError, match="no payload store"):
        trainer.take(accepted)


def test_bytes_that_are_no_group_are_found_out(trainer, groups):
    plan = plan_of(groups)  # of a journal without digests
    control = Controller(groups)
    control.fetch = lambda keys, over: [b"\xff" * 9 for _ in keys]
    complete, _ = compute(trainer, control, plan)
    assert not complete
    assert control.heard == [("payload_invalid", ("t0", "t1", "t2", "t3", "t4"))]


def out_of_memory_above(monkeypatch, sequences, poison=()):
    """A device on which rows of more than ``sequences`` sequences do not fit, nor any of
    ``poison``, the first tokens of prompts. A part of the backward pass is done before it is
    noticed."""
    real = Grpo.loss
    packed = RowForwards.pack
    rows = []

    def pack(forwards, batch, row, device):
        rows.append((len(row), {int(t) for t in batch.group_of[row]}))
        rows[-1] += (batch.prompt_length[batch.group_of[row]].max(),)
        return packed(forwards, batch, row, device)

    def loss(objective, scores, tokens):
        result = real(objective, scores, tokens)
        if rows[-1][0] > sequences or rows[-1][2] in poison:
            result.total.backward(retain_graph=True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nmore")
        return result

    monkeypatch.setattr(RowForwards, "pack", pack)
    monkeypatch.setattr(Grpo, "loss", loss)
    return rows


def test_a_row_of_several_groups_that_is_too_large_is_computed_group_by_group(
    trainer, groups, monkeypatch
):
    expected = undisturbed(trainer, groups)
    rows = out_of_memory_above(monkeypatch, 3)
    control = Controller(groups)
    complete, gradient = compute(trainer, control, plan_of(groups))
    assert complete and control.heard == []
    assert len(rows) > 1 and all(len(g) == 1 for _, g, _ in rows[1:])
    torch.testing.assert_close(gradient, expected, atol=2e-7, rtol=2e-4)


def test_a_group_whose_row_does_not_fit_into_memory_is_named_and_the_rest_is_trained(
    trainer, groups, monkeypatch
):
    groups[3].prompt_tokens = bytes(4 * 40)
    others = [g for g in groups if g.task.task_id != "t3"]
    expected = undisturbed(trainer, others)
    out_of_memory_above(monkeypatch, 99, poison=(40,))
    control = Controller(groups)
    complete, gradient = compute(trainer, control, plan_of(groups))
    assert not complete
    assert control.heard == [("out_of_memory", ("t3",))]
    assert "prompts included" in control.detail and "80 GiB" in control.detail
    assert (gradient == 0).all(), "a part of the row was in the gradients"
    complete, gradient = compute(trainer, control, plan_of(others))
    assert complete
    torch.testing.assert_close(gradient, expected, atol=2e-7, rtol=2e-4)


def test_a_suspect_is_computed_by_itself_after_the_controller_knows(trainer, groups):
    expected = undisturbed(trainer, groups)
    control = Controller(groups)
    real = trainer.add

    def add(taken, last=False):
        control.heard.append(("add", tuple(task_id for task_id, _ in trainer._taken[taken].keys)))
        assert not last
        real(taken)

    trainer.add = add
    complete, gradient = compute(trainer, control, plan_of(groups, suspects=("t1", "t4")))
    assert complete
    assert control.heard == [
        ("add", ("t0", "t2", "t3")),
        ("try", ("t1",)),
        ("add", ("t1",)),
        ("try", ("t4",)),
        ("add", ("t4",)),
        ("try", ("",)),
    ]
    torch.testing.assert_close(gradient, expected, atol=2e-7, rtol=2e-4)


def test_a_suspect_is_not_computed_once_the_attempt_at_the_step_is_over(trainer, groups):
    control = Controller(groups)
    control.stands = False
    complete, _ = compute(trainer, control, plan_of(groups, suspects=("t1",)))
    assert not complete
    assert control.heard == [("try", ("t1",))]
