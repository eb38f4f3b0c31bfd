"""Trial of a run's rewards, or of its environment, on one row with a made-up completion.

python -P -m rollout_worker.check_rewards < {"config": ..., "row": ..., "completion": ...}

It prints one line of JSON, a Trial. The calls are those of a rollout worker: rewards in a scoring
process, an environment with an engine that says the completion at every turn.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.inputs import RewardConfig
from paceline.dataset.rows import DataError, prompt_of
from paceline.process.lifetime import leave_after
from paceline.user_code import asked, search_start_directory_last
from rollout_worker.rewards.functions import AttemptFailed, Job, load
from rollout_worker.rewards.scoring import Scorer, Scores

MADE_UP = "So the answer is \\boxed{42}."
FIRST_CALL_S = 15.0  # Least limit of a call: the first one may load a library
ENVIRONMENT_S = 60.0  # Longest trial of an environment, whatever its own limit is
WRONG = ("reward_error", "reward_crashed", "environment_error")
"""Reasons that are a mistake in the user's code. A time limit may only be the machine's fault."""


@dataclass(frozen=True, slots=True)
class Trial:
    """``values``: of each function, or component of the environment; ``problem``: why there are
    none; ``wrong``: it is a mistake in the user's code; ``trace``: with this traceback."""

    values: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    problem: str = ""
    wrong: bool = False
    trace: str = ""


async def try_rewards(
    config: Config, row: Mapping[str, Any] | None, completion: str = MADE_UP
) -> Trial:
    """``row`` None: the functions are imported and not called. Raises RewardError, BadEnvironment
    or TokenizerError if something named in the configuration cannot be used."""
    of_sets = (each.reward for each in config.evaluation.sets.values() if each.reward is not None)
    for functions in (config.reward.functions, *of_sets):
        load(functions)
    if row is None:
        return Trial()
    try:
        if config.rollout.environment is not None:
            return await _play(config, row, completion)
        return _trial(await _score(config.reward, _job(config, row, completion)))
    except AttemptFailed as failed:
        return Trial(
            problem=f"{failed.reason}: {failed}", wrong=failed.reason in WRONG, trace=failed.trace
        )
    except DataError as error:
        return Trial(problem=str(error))


def _trial(scores: Scores) -> Trial:
    return Trial(scores.components[0], scores.rewards[0])


async def _score(reward: RewardConfig, job: Job) -> Scores:
    limit_s = max(reward.timeout_s, FIRST_CALL_S)
    scorer = Scorer(reward.model_copy(update={"processes": 1, "timeout_s": limit_s}))
    try:
        await scorer.start()
        return await scorer.score(job)
    finally:
        await scorer.close()


def _job(config: Config, row: Mapping[str, Any], completion: str) -> Job:
    prompt = prompt_of(row, config.data)
    if not isinstance(prompt, str):
        # Without the chat template: no tokenizer is loaded for this.
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    answer = row.get(config.data.answer_field) if config.data.answer_field else None
    count = min(2, config.rollout.group_size)  # Functions of a whole group may compare
    shared = {"task_id": "t0", "attempt": 1, "evaluation": False}
    return Job(
        shared | {"prompt": prompt, "answer": answer, "row": dict(row)},
        {
            "completion": [completion] * count,
            "finish_reason": ["stop"] * count,
            "token_count": [len(completion.split()) + 1] * count,
        },
    )


async def _play(config: Config, row: Mapping[str, Any], completion: str) -> Trial:
    # Only here: they import torch.
    from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
    from paceline.v1 import common_pb2, rollout_pb2
    from rollout_worker.engine.without_model import ScriptedEngine
    from rollout_worker.held_tasks import HeldTask
    from rollout_worker.tasks.environment_runner import EnvironmentRunner

    limit_s = min(ENVIRONMENT_S, config.rollout.environment_timeout_s)
    limits = {"environment_timeout_s": limit_s, "environment_processes": 1}
    limited = config.rollout.model_copy(update=limits)
    config = config.model_copy(update={"rollout": limited})
    tokenizer = PromptTokenizer(config)
    engine = ScriptedEngine(config, tokenizer, completion)
    environments = EnvironmentRunner(config, tokenizer)
    lease = rollout_pb2.Lease(
        task=common_pb2.TaskRef(task_id="t0", attempt=1),
        kind=rollout_pb2.TASK_KIND_TRAIN,
        group_size=min(2, config.rollout.group_size),
    )
    try:
        await environments.start(engine)
        made = await environments.generate(HeldTask(lease), dict(row))
    except BadPrompt as error:
        return Trial(problem=f"{error.reason}: {error}")
    finally:
        await environments.close()
    if made.scores is not None:
        return _trial(made.scores)
    job = _job(config, row, completion)
    return _trial(await _score(config.reward, replace(job, each=made.scored)))


def main() -> int:
    given = asked()
    config = Config.model_validate(given["config"])
    search_start_directory_last()
    trial = asyncio.run(try_rewards(config, given["row"], given.get("completion") or MADE_UP))
    print("\n" + json.dumps(asdict(trial)), flush=True)
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
