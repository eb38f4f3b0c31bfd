"""Rewards of turns and tokens from environments and reward functions, to the controller's door;
soft overlong penalty."""

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.inputs import RewardConfig
from paceline.payloads.group_limits import GroupLimits, Invalid
from paceline.v1 import rollout_pb2
from rollout_worker.environments.base import EnvironmentTask, Sample, TurnRewards
from rollout_worker.rewards.functions import Job, ScoringFailed
from rollout_worker.rewards.scoring import Scorer, Scores, penalised
from tests.fixtures.environment_fixture import lease_of, mask_of, staged
from tests.fixtures.group_meta import accepted
from tests.fixtures.policy_models import make_group

HERE = "tests.unit.rollout.test_rewards_by_place"


def token_rewards(completion: rollout_pb2.Completion) -> dict[int, float]:
    return {r.token: r.reward for r in completion.token_rewards}


def turn_ends(completion: rollout_pb2.Completion) -> list[int]:
    """The model's tokens that none of the model's follows."""
    mask = [*mask_of(completion), 0]
    return [i for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]


def two_turns(result: Any) -> Any:
    async def environment(task: EnvironmentTask, sample: Sample) -> Any:
        turn = await sample(task.prompt)
        await sample(f"<{turn.text}>")
        return result

    return environment


# ---- environments


async def test_rewards_of_turns_are_at_the_last_tokens_of_the_turns(model: Path) -> None:
    environment = two_turns(TurnRewards([0.25, -1.0], outcome={"solved": 2.0}))
    async with staged(model, environment, lambda prompt: f"n{len(prompt)}") as stage:
        for completion in (await stage.group()).completions:
            first, second = turn_ends(completion)
            assert token_rewards(completion) == {first: 0.25, second: -1.0}
            assert completion.reward == 1.25
            assert dict(completion.reward_components) == {"turns": -0.75, "solved": 2.0}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (TurnRewards([1.0]), "rewards of 1 turns, the model had 2"),
        (TurnRewards([1.0, math.nan]), "the reward nan"),
        (TurnRewards([1.0, "much"]), "not a number"),
    ],
)
async def test_rewards_that_fit_no_turns_are_no_rewards(
    model: Path, result: TurnRewards, said: str
) -> None:
    async with staged(model, two_turns(result), lambda prompt: "n") as stage:
        refusal = await stage.refusal()
        assert refusal.reason == "environment_error" and said in refusal.detail


def by_turn(completion: str, transcript: list[dict[str, Any]]) -> list[float]:
    return [float(i + 1) for i, entry in enumerate(transcript) if entry["from"] == "model"]


async def test_a_reward_function_may_reward_each_turn_of_a_transcript(model: Path) -> None:
    reward = {"functions": {f"{HERE}:by_turn": 0.5}}
    environment = two_turns(None)
    async with staged(model, environment, lambda prompt: "n", reward=reward) as stage:
        completion = (await stage.group()).completions[0]
        first, second = turn_ends(completion)
        # The transcript: environment, model, environment, model.
        assert token_rewards(completion) == {first: 1.0, second: 2.0}
        assert completion.reward == 3.0
        assert dict(completion.reward_components) == {f"{HERE}:by_turn": 6.0}


# ---- reward functions


def by_token(completion: str, token_count: int) -> Any:
    if completion == "whole":
        return float(token_count)
    return [0.5] * (token_count - (completion == "one too few"))


def job(*completions: str) -> Job:
    each = {"completion": list(completions), "token_count": [3] * len(completions)}
    return Job({"answer": "", "prompt": ""}, each)


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [0, 1])
async def test_a_reward_function_may_reward_each_token(processes: int) -> None:
    functions = {f"{HERE}:by_token": 2.0, "format:w": 1.0}
    scorer = Scorer(RewardConfig(functions=functions, processes=processes, timeout_s=60.0))
    await scorer.start()
    try:
        scores = await scorer.score(job("whole", "each"))
        with pytest.raises(ScoringFailed, match="a list of 2 rewards for 3 tokens of the model"):
            await scorer.score(job("one too few"))
    finally:
        await scorer.close()
    assert scores.rewards == [7.0, 3.0]
    assert scores.placed == [[], [1.0, 1.0, 1.0]]
    assert [c[f"{HERE}:by_token"] for c in scores.components] == [3.0, 1.5]


# ---- the door


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([(2, 1.0)], "token 2 after -1, of 2 tokens"),
        ([(1, 1.0), (0, 1.0)], "token 0 after 1"),
        ([(0, 1.0), (0, 1.0)], "at most once"),
        ([(0, math.inf)], "inf for token 0"),
        ([(0, -1e10)], "at most 1e\\+09"),
    ],
)
def test_the_controller_refuses_rewards_of_no_token(
    given: list[tuple[int, float]], said: str
) -> None:
    group = make_group("t0", [1], [[2, 3]], [1.0])
    limits = GroupLimits(group_size=1, max_sequence_tokens=10)
    group.completions[0].token_rewards.add(token=0, reward=0.5)
    assert accepted(group, limits, 0).reward_mean == 1.0
    group.completions[0].ClearField("token_rewards")
    for token, reward in given:
        group.completions[0].token_rewards.add(token=token, reward=reward)
    with pytest.raises(Invalid, match=said):
        accepted(group, limits, 0)


# ---- the penalty


def dapo_equation_13(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def test_the_soft_penalty_is_dapos() -> None:
    lengths = [0, 5, 6, 7, 9, 10, 11]
    scores = Scores([1.0] * len(lengths), [{"right": 1.0}] * len(lengths), 0.0)
    config = RewardConfig(overlong_buffer=4, overlong_penalty=0.5)
    found = penalised(scores, lengths, 10, config)
    wanted = [0.5 * dapo_equation_13(n, 10, 4) for n in lengths]
    assert [c["overlong"] for c in found.components] == pytest.approx(wanted)
    assert found.rewards == pytest.approx([1.0 + loss for loss in wanted])


async def test_held_out_prompts_are_scored_without_the_penalty(model: Path) -> None:
    reward = {"overlong_buffer": 399}
    async with staged(model, two_turns(1.0), lambda prompt: "n", reward=reward) as stage:
        trained = (await stage.group()).completions[0]
        held_out = (await stage.group(lease_of(count=1, task_id="e1.0"))).completions[0]
    assert trained.reward < 1.0 and trained.reward_components["overlong"] < 0
    assert held_out.reward == 1.0 and "overlong" not in held_out.reward_components
