"""Short runs of the flows with several models, with pairs and with recorded data, as a user starts
them. One with an objective of a user is in test_user_files_named_like_ours.py, one that trains a
reward model in test_rlhf_pipeline.py."""

import json
import math
import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from paceline.observe.samples import ArchiveReader
from testbed.fleets.local_run import Up, paceline, write_run
from testbed.tiny_model import make_tiny_model, make_tiny_reward_model
from tests.fixtures.chat_model import make_chat_model
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

FLEET = {"controllers": 1, "policy": 1, "rollout": 1}


def finished(up: Up) -> list[Mapping[str, Any]]:
    """The metrics of a run to its end."""
    assert up.wait() == 0, up.said()
    exported = AutoModelForCausalLM.from_pretrained(up.assert_sound()["export"])
    assert type(exported).__name__ in exported.config.architectures
    return up.metrics()


def of_kind(rows: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def test_ppo_learns_what_a_reward_model_scores_and_survives_the_loss_of_all_its_scorers(
    start: Start, tmp_path: Path
) -> None:
    """A completion alone of its prompt: its advantage is the critic's, and its reward a scorer's
    less the KL.

    Both scorers are stopped: groups wait, and `paceline why` says for what. Then one is killed and
    comes back as another process, and the other one goes on. No attempt fails, and nothing is lost.
    """
    model = make_tiny_model(tmp_path / "model", hidden=32)
    make_tiny_reward_model(tmp_path / "rm", model)
    up = start(
        rows=512,
        reward={
            "functions": {"scorer:helpful": 10.0, "testbed.rewards:digit_first": 0.1},
            "processes": 0,
        },
        scorers={"helpful": {"kind": "reward_model", "path": str(tmp_path / "rm")}},
        train={
            "algorithm": "ppo",
            "steps": 24,
            "groups_per_step": 32,
            "lr": 3e-3,
            "kl_coef": 0.01,
            "checkpoint_every": 12,
            "eval_every": 24,
        },
        objective={"critic_lr_scale": 1.0, "value_pretraining_steps": 1},
        rollout={"group_size": 1},
        fleet={**FLEET, "scorers": 2, "lease_ttl_s": 2.0},
    )
    lose_all_scorers(up)
    rows = finished(up)
    assert not [event for event in up.events("TaskReleased") if event["counts"]]
    steps, evaluated = of_kind(rows, "step"), of_kind(rows, "eval")
    assert len(steps) == 24
    assert all(step["grad_norm_critic"] > 0 and step["tokens"] > 0 for step in steps)
    assert (steps[0]["kl"], steps[0]["value_mean"]) == (pytest.approx(0, abs=1e-5), 0)
    assert evaluated[-1]["eval_reward_mean"] > evaluated[0]["eval_reward_mean"] + 0.5
    assert mean(steps[-6:], "kl") > 0.01
    value, returned = mean(steps[-6:], "value_mean"), mean(steps[-6:], "return_mean")
    assert value > 0.5 * returned > 0


def lose_all_scorers(up: Up) -> None:
    first, other = scorers = ("scorer-helpful-0", "scorer-helpful-1")

    def told(kind: str) -> set[str]:
        return {event["worker_id"] for event in up.events(kind)}

    up.until(lambda: up.step() >= 2 and told("WorkerRegistered") >= {*scorers})
    for name in scorers:
        up.kill(name, signal.SIGSTOP)
    up.until(lambda: told("WorkerDied") >= {*scorers})
    why = ("why", "--run-dir", str(up.run_dir))
    up.until(lambda: "0 of 2 scorers helpful" in paceline(*why).stdout)
    before = up.step()
    assert before < 24
    up.kill(first)
    up.until(lambda: up.step() > before)
    up.kill(other, signal.SIGCONT)


@pytest.mark.slow
def test_a_policy_is_distilled_from_a_teacher_that_is_a_scorer(
    start: Start, tmp_path: Path
) -> None:
    """The rewards say nothing; only the teacher's log-probs are trained. In every run: scorers of a
    fleet above, their log-probs in tests/unit/scorer, and the loss in
    tests/unit/policy/test_distill.py."""
    make_tiny_model(tmp_path / "model", hidden=32)
    teacher = make_tiny_model(tmp_path / "teacher", hidden=64)
    up = start(
        rows=512,
        scorers={"teacher": {"kind": "logprobs", "path": str(teacher)}},
        train={
            "algorithm": "distill",
            "steps": 24,
            "groups_per_step": 16,
            "lr": 3e-3,
            "checkpoint_every": 12,
            "eval_every": 24,
        },
        objective={"teacher": "teacher"},
        fleet={**FLEET, "scorers": 1},
    )
    rows = finished(up)
    steps = of_kind(rows, "step")
    assert len(steps) == 24
    assert mean(steps[-6:], "teacher_kl") < mean(steps[:3], "teacher_kl")


def write_pairs(path: Path, count: int = 48, seed: int = 0) -> Path:
    """Rows whose chosen completion has the digits in order, and whose rejected one has them
    reversed."""
    draw = random.Random(seed)
    rows = []
    while len(rows) < count:
        digits = "".join(draw.choices("0123456789", k=draw.randint(2, 4)))
        right, wrong = "".join(sorted(digits)), "".join(sorted(digits, reverse=True))
        if right != wrong:
            rows.append({"prompt": f"s{digits}=", "chosen": right, "rejected": wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_recorded_pairs_train_exactly_once_and_are_told_apart(start: Start, tmp_path: Path) -> None:
    """Four passes over 48 pairs. In every run: a reward model of pairs, which is killed in between
    (test_rlhf_pipeline.py)."""
    up = start(
        data={
            "path": str(write_pairs(tmp_path / "pairs.jsonl")),
            "chosen_field": "chosen",
            "rejected_field": "rejected",
            "eval_path": str(write_pairs(tmp_path / "held_out_pairs.jsonl", 16, seed=1)),
        },
        train={
            "algorithm": "dpo",
            "steps": 12,
            "groups_per_step": 16,
            "lr": 3e-3,
            "checkpoint_every": 12,
            "eval_every": 12,
        },
        rollout={"source": "recorded", "group_size": 2},
        fleet=FLEET,
    )
    rows = finished(up)
    steps, evaluated = of_kind(rows, "step"), of_kind(rows, "eval")
    assert len(steps) == 12
    # Both completions of a pair have one score before the first update.
    assert steps[0]["pair_accuracy"] == pytest.approx(0.5)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert mean(steps[-3:], "pair_accuracy") > 0.7
    before, after = evaluated
    assert (before["eval_pair_accuracy"], before["eval_count"]) == (pytest.approx(0.5), 16)
    assert after["eval_pair_accuracy"] > 0.7 and after["eval_loss"] < before["eval_loss"]
    assert up.summary()["samples_trained"] == 12 * 16 * 2


STEPS = 80


def test_supervised_fine_tuning_survives_the_deaths_of_both_kinds_of_workers(
    start: Start, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        data={"completion_field": "answer"},
        reward={},
        train={
            "algorithm": "sft",
            "steps": STEPS,
            "groups_per_step": 4,
            "lr": 3e-3,
            "checkpoint_every": 10,
            "eval_every": 20,
        },
        rollout={"source": "recorded"},
        fleet={"controllers": 1, "policy": 2, "rollout": 1},
    )
    text = config.read_text().replace("group_size = 4\n", "")
    config.write_text(text)
    up = start()
    # A worker that dies before it has registered is nobody's death.
    up.until(
        lambda: {"policy-0", "rollout-0"} <= {e["worker_id"] for e in up.events("WorkerRegistered")}
    )
    up.until(lambda: up.step() >= 10)
    for name in ("policy-0", "rollout-0"):
        up.kill(name)
    assert up.wait() == 0, up.said()
    assert up.assert_sound(steps=STEPS)["samples_trained"] == STEPS * 4
    assert {e["worker_id"] for e in up.events("WorkerDied")} == {"policy-0", "rollout-0"}
    up.command("ledger", "verify")

    evals = [row for row in up.metrics() if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == list(range(0, STEPS + 1, 20))
    losses = [row["eval_loss"] for row in evals]
    assert losses[-1] < 0.7 * losses[0]
    assert all(row["eval_count"] == 8 for row in evals)
    best = up.events("BestCheckpointChosen")[-1]
    assert -best["reward_mean"] == pytest.approx(min(losses[1:]))
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    # Nothing was sampled, so there is nothing to compare with it.
    assert not any(name.startswith(("logprob_gap", "staleness", "reward")) for name in steps[-1])
    assert up.events("LinkAssigned") == []


KILLS = [("worker", "environment", "leader"), ("leader", "environment", "worker")]


@pytest.mark.parametrize("kills", [KILLS[0], pytest.param(KILLS[1], marks=pytest.mark.slow)])
def test_an_agent_with_a_tool_and_sub_agents_is_trained_whoever_dies_in_a_call_of_the_tool(
    start: Start, tmp_path: Path, kills: tuple[str, ...]
) -> None:
    """It speaks OpenAI's interface, and one sample calls a tool between its branches. If the worker
    or the process of the environment is killed meanwhile, the tool ends and the sample begins
    again; while the leader is replaced it waits. Where trainers and engines compute the same
    log-probs, what is trained is what was sampled."""
    where = tmp_path / "tool"
    where.mkdir()
    up = start(
        environment={**os.environ, "TOOL": str(where)},
        model={"path": str(make_chat_model(tmp_path / "chat")), "dtype": "float32"},
        data={"chat": True, "max_prompt_tokens": 60},
        reward={"processes": 0},
        train={"steps": 4, "skip_zero_advantage": False, "max_staleness": 0, "eval_every": 4},
        rollout={
            "environment": "tests.fixtures.openai_agents:compacts",
            "environment_processes": 1,
            "environment_timeout_s": 300.0,
            "openai": True,
            "max_context": 160,
        },
        fleet=FLEET,
    )
    attempt = 1
    for killed in kills:
        begun = where / f"{attempt}"
        up.until(begun.exists)
        tool, environment = map(int, begun.read_text().split())
        if killed == "leader":
            terms = len(up.events("TermBegun"))
            up.kill(up.leader())
            up.until(lambda before=terms: len(up.events("TermBegun")) > before)
            assert psutil.pid_exists(tool)
            continue
        if killed == "worker":
            up.kill("rollout-0")
        else:
            os.kill(environment, signal.SIGKILL)
        up.until(lambda pid=tool: not psutil.pid_exists(pid))
        attempt += 1
    (where / "answer").touch()
    steps = of_kind(finished(up), "step")
    up.command("ledger", "verify")
    assert [event["worker_id"] for event in up.events("WorkerDied")] == ["rollout-0"]
    assert len(steps) == 4
    for step in steps:
        assert (step["samples"], step["sequences_per_sample"]) == (16, 4)
        assert step["logprob_gap_max"] < 1e-3
    group = ArchiveReader(up.run_dir).group("t9")
    assert group is not None and group["attempt"] == attempt == 3
    left = [completion.get("branch_of") for completion in group["completions"]]
    assert [number for number, of in enumerate(left) if of is None] == [0, 4, 8, 12]
