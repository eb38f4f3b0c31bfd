"""The step as a transaction, with real processes, gRPC, Redis and gloo: all members or none.

Whatever dies and whenever, the weights after the script's steps equal those of one process that was
never disturbed, to floating-point order, and all survivors hold the same bits.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from policy_worker.objectives.batch import StepTotals
from policy_worker.trainer import EpochMesh, Trainer
from testbed.groups_in_hand import add as add_groups
from testbed.patience import Patience, patient
from testbed.tiny_model import make_tiny_model
from tests.fakes.policy_controller import SmallController
from tests.fixtures import policy_process
from tests.fixtures.policy_models import make_config, random_groups

STEPS = 3


OBJECTIVES = {
    "grpo": ({}, {}),
    # A critic, moments of whitening and a KL coefficient are parts of the state, too.
    "ppo": (
        {"kl_coef": 0.1},
        {"kl_controller": "adaptive", "kl_target": 0.01, "critic_lr_scale": 1.0},
    ),
    # Rows hold whole groups, and a frozen reference is loaded beside the policy.
    "dpo": ({"tokens_per_microbatch": 64}, {"beta": 1.0}),
    # Adapters alone are the state, and the reference is their base.
    "lora": ({"kl_coef": 0.1}, {}),
}
"""Settings of [train] and of [objective]."""
both = pytest.mark.parametrize("config", OBJECTIVES, indirect=True)


@pytest.fixture(scope="module")
def config(request, tmp_path_factory):
    """``request.param``: the objective, by default grpo."""
    algorithm = getattr(request, "param", "grpo")
    train, objective = OBJECTIVES[algorithm]
    train = {"lr": 3e-3, "checkpoint_every": 100, "weight_decay": 0.1, **train}
    model = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)
    return make_config(
        model=model,
        model_section={"lora": {"rank": 4}} if algorithm == "lora" else {},
        train={"algorithm": "grpo" if algorithm == "lora" else algorithm, **train},
        objective=objective,
        fleet={"heartbeat_s": 0.2},
    )


@pytest.fixture(scope="module")
def steps():
    return [random_groups(6, group_size=3, seed=s, first=10 * s, vocab=15) for s in range(STEPS)]


@pytest.fixture(scope="module")
def undisturbed(config, steps):
    """Weights after each step, computed by one process without a controller."""
    trainer = Trainer(config, torch.device("cpu"))
    trainer.form(EpochMesh(1, 0, 1, "", "run", ""))
    trainer.restore("", 0, 0)
    after = []
    for number, groups in enumerate(steps):
        tokens = sum(len(c.tokens) // 4 for g in groups for c in g.completions)
        keys = [(g.task.task_id, 1) for g in groups]
        trainer.begin(StepTotals(number + 1, number, tokens, 18), keys)
        add_groups(trainer, groups)
        trainer.reduce()
        trainer.commit(number + 1, config.train.optimizer.lr)
        after.append(policy_process.numbers_of(trainer.state))
    return after


class Fleet:
    def __init__(self, config, controller, out):
        self.config, self.controller, self.out = config, controller, out
        self.processes = {}

    def start(self, *names, **faults):
        for name in names:
            self.processes[name] = policy_process.start(
                self.config, self.controller.address, name, self.out, **faults
            )

    def pid(self, name):
        return self.processes[name].pid

    def await_stopped(self, name):
        """Returns once the process has stopped itself; it is the fork server's child, not ours."""
        process, patience = psutil.Process(self.pid(name)), Patience(60)
        while process.is_running() and process.status() != psutil.STATUS_STOPPED:
            assert patience.left(), self.logs()
            time.sleep(0.01)
        assert process.is_running(), self.logs()

    def finish(self, *names):
        """Waits for these to exit 0; their weights."""
        for name in names:
            self.processes[name].join(patient(100))
            assert self.processes[name].exitcode == 0, self.logs()
        return [load_file(self.out / f"{name}.safetensors") for name in names]

    def assert_fell(self, instant):
        """A worker fell at that instant, and nowhere before it."""
        assert list(self.out.glob(f"*.{instant}.fallen")), self.logs()

    def logs(self):
        return "\n".join(p.read_text()[-3000:] for p in sorted(Path(self.out).glob("*.log")))


@pytest.fixture
def start_fleet(config, steps, url, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(at_start, changed=None, script=None):
            controller = SmallController(
                url, str(tmp_path), script or steps, at_start, (changed or config).train
            )
            stack.callback(controller.end)
            fleet = Fleet(changed or config, controller, tmp_path)
            stack.callback(lambda: [p.kill() for p in fleet.processes.values()])
            return fleet, controller

        yield start


def same_bits(all_weights):
    for other in all_weights[1:]:
        for name, tensor in all_weights[0].items():
            assert torch.equal(tensor, other[name]), name


def same_step(weights, expected):
    for name, tensor in expected.items():
        # AdamW's first updates are +-lr whatever the gradient's size, so rounding shows up where a
        # gradient is all but zero; lr is 3e-3.
        torch.testing.assert_close(weights[name], tensor, atol=3e-5, rtol=1e-3)


def assert_nothing_was_lost(fleet, undisturbed, *survivors):
    """These end with the weights of the undisturbed run, and every step was committed once."""
    weights = fleet.finish(*survivors)
    same_bits(weights)
    same_step(weights[0], undisturbed[-1])
    assert fleet.controller.step == STEPS
    assert all(len(digests) == 1 for digests in fleet.controller.digests.values())


def test_three_replicas_equal_one(start_fleet, undisturbed):
    fleet, controller = start_fleet(3)
    fleet.start("policy-0", "policy-1", "policy-2")
    assert_nothing_was_lost(fleet, undisturbed, "policy-0", "policy-1", "policy-2")
    names = {"loss", "entropy", "clip_fraction", "grad_norm", "lr", "ratio", "logprob_gap"}
    names |= {f"time_{what}_s" for what in ("wait", "compute", "reduce", "commit", "publish")}
    assert names <= set(controller.stats[-1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["die", "stop"])
def test_a_member_lost_in_the_all_reduce_costs_no_step(start_fleet, undisturbed, number):
    fleet, controller = start_fleet(3)
    fleet.start("policy-0", "policy-1")
    fleet.start("policy-2", falls_at="reduce", step=2, number=number)
    if number == signal.SIGSTOP:
        # Survivors go on without it; awake again, it rejoins and the state is transferred to it.
        controller.pause_after = 2
        fleet.await_stopped("policy-2")
        controller.declare_dead("policy-2")
        controller.wait(lambda: controller.step == 2)
        os.kill(fleet.pid("policy-2"), signal.SIGCONT)
        controller.wait(lambda: controller.holds_state("policy-2"))
        controller.change(lambda: setattr(controller, "pause_after", STEPS))
        assert_nothing_was_lost(fleet, undisturbed, "policy-0", "policy-1", "policy-2")
    else:
        assert_nothing_was_lost(fleet, undisturbed, "policy-0", "policy-1")
    fleet.assert_fell("reduce")


@pytest.mark.parametrize("instant", ["idle", "forward", "reduce", "vote", "commit"])
def test_a_member_killed_at(start_fleet, undisturbed, instant):
    killed_at(start_fleet, undisturbed, 3, instant)


@pytest.mark.parametrize("config", ["ppo", "dpo", "lora"], indirect=True)
@pytest.mark.parametrize("instant", ["forward", "reduce"])
def test_another_objective_survives_a_member_killed_at(start_fleet, undisturbed, config, instant):
    """With a critic, moments and an adaptive coefficient; with whole groups and a frozen reference;
    and with adapters. Tests below kill all of them around the vote and the commit."""
    controller = killed_at(start_fleet, undisturbed, 2, instant)
    ppo = config.train.algorithm == "ppo"
    assert any(name.startswith("critic/") for name in undisturbed[-1]) == ppo
    assert any(name.startswith("scalar ") for name in undisturbed[-1]) == ppo
    assert all(".lora_" in name for name in undisturbed[-1]) == (config.model.lora is not None)
    known_by = {"ppo": "grad_norm_critic", "dpo": "pair_accuracy", "grpo": "kl"}
    assert known_by[config.train.algorithm] in controller.stats[-1]


def killed_at(start_fleet, undisturbed, size, instant):
    fleet, controller = start_fleet(size)
    survivors = [f"policy-{i}" for i in range(size - 1)]
    fleet.start(*survivors)
    fleet.start(f"policy-{size - 1}", falls_at=instant, step=2)
    assert_nothing_was_lost(fleet, undisturbed, *survivors)
    fleet.assert_fell(instant)
    assert controller.deaths[0] == f"policy-{size - 1}"
    return controller


def test_a_member_killed_while_it_sends_a_joiner_the_state_is_replaced_as_the_source(
    start_fleet, undisturbed
):
    fleet, controller = start_fleet(2)
    controller.pause_after = 1
    fleet.start("policy-0", falls_at="state_transfer")
    controller.wait(lambda: "policy-0" in controller.workers)  # first to come: rank 0, the source
    fleet.start("policy-1")
    controller.wait(lambda: controller.step == 1)
    fleet.start("policy-2")
    controller.wait(lambda: controller.deaths == ["policy-0"])
    controller.wait(lambda: all(map(controller.holds_state, ("policy-1", "policy-2"))))
    controller.change(lambda: setattr(controller, "pause_after", STEPS))
    assert_nothing_was_lost(fleet, undisturbed, "policy-1", "policy-2")
    fleet.assert_fell("state_transfer")


@both
def test_a_member_killed_between_vote_and_commit_costs_no_step(start_fleet, undisturbed):
    fleet, controller = start_fleet(3)

    def kill(name, step):
        if step == 2 and name == "policy-1" and "policy-1" not in controller.deaths:
            os.kill(fleet.pid(name), signal.SIGKILL)
            # Its vote is not counted: the connection is dead before it is.
            raise ConnectionResetError

    controller.on_vote = kill
    fleet.start("policy-0", "policy-1", "policy-2")
    assert_nothing_was_lost(fleet, undisturbed, "policy-0", "policy-2")


@both
def test_a_member_killed_between_commit_and_optimizer_step_is_replaced(start_fleet, undisturbed):
    fleet, controller = start_fleet(2)

    def kill(name, step):
        if step == 2 and name == "policy-1" and "policy-1" not in controller.deaths:
            os.kill(fleet.pid(name), signal.SIGKILL)

    controller.before_reply = kill
    controller.pause_after = 2
    fleet.start("policy-0", "policy-1")
    controller.wait(lambda: "policy-1" in controller.deaths)
    fleet.start("policy-1")
    controller.wait(lambda: controller.holds_state("policy-1"))
    controller.change(lambda: setattr(controller, "pause_after", STEPS))
    assert_nothing_was_lost(fleet, undisturbed, "policy-0", "policy-1")


@both
def test_the_last_replica_resumes_from_its_checkpoint_with_the_same_result(
    start_fleet, undisturbed, config
):
    frequent = config.model_copy(
        update={"train": config.train.model_copy(update={"checkpoint_every": 1})}
    )
    fleet, controller = start_fleet(1, frequent)
    controller.pause_after = controller.record_until = 1
    fleet.start("policy-0")
    controller.wait(lambda: 1 in controller.written)
    controller.change(lambda: setattr(controller, "pause_after", 2))
    controller.wait(lambda: 2 in controller.written)  # it dies before the record of this one
    os.kill(fleet.pid("policy-0"), signal.SIGKILL)
    controller.wait(lambda: "policy-0" in controller.deaths)
    controller.pause_after = controller.record_until = STEPS
    fleet.start("policy-0")
    weights = fleet.finish("policy-0")[0]
    assert controller.version == STEPS + 2  # rolled back from 2 to 1, as version 3; two steps more
    for name, tensor in undisturbed[-1].items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_draining_replica_leaves_between_steps_and_exits_0(start_fleet, undisturbed, by_signal):
    fleet, controller = start_fleet(2)
    controller.pause_after = 1
    fleet.start("policy-0", "policy-1")
    controller.wait(lambda: controller.step == 1)
    if by_signal:
        os.kill(fleet.pid("policy-1"), signal.SIGTERM)
    else:
        controller.drain("policy-1")
    fleet.finish("policy-1")
    assert not controller.deaths
    controller.change(lambda: setattr(controller, "pause_after", STEPS))
    weights = fleet.finish("policy-0")
    same_step(weights[0], undisturbed[-1])


def test_the_only_replica_leaves_its_state_on_disk_for_its_successor(start_fleet, undisturbed):
    fleet, controller = start_fleet(1)
    controller.pause_after = 1
    fleet.start("policy-0")
    controller.wait(lambda: controller.step == 1)
    os.kill(fleet.pid("policy-0"), signal.SIGTERM)
    fleet.finish("policy-0")
    assert controller.written == [1] and not controller.deaths
    controller.change(lambda: setattr(controller, "pause_after", STEPS))
    fleet.start("policy-0")
    weights = fleet.finish("policy-0")
    same_step(weights[0], undisturbed[-1])
