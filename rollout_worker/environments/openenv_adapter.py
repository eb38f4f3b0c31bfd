"""Environments of OpenEnv, behind its servers: rollout.environment = "openenv:http://HOST:PORT".

    server: reset ──► observation ──► the model's turn ──► action ──► step ──► observation, reward
                           ▲                                                      │ until done
                           └──────────────────────────────────────────────────────┘

``rollout.environment_options``:

    action = "message"     # field of the action that the model's text becomes; "*": it is the whole
                           # action, as JSON
    observation = "text"   # field of the observation that the model gets; default: all, as JSON
    reset = {level = 2}    # arguments of every reset, beside the seed, which a group has in common
"""

import json
from collections.abc import Mapping
from typing import Any

from openenv.core import GenericEnvClient

from paceline.dataset.messages import Message
from rollout_worker.environments.base import (
    EnvironmentTask,
    Sample,
    SetupFailed,
    TranscriptFull,
    TurnRewards,
)

_INVALID = "VALIDATION_ERROR"  # The server's code for an action that it cannot read


class OpenEnv:
    """Raises ValueError for options that are missing, or are none of its own."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._action = url, options.get("action")
        self._observation, self._reset = options.get("observation"), options.get("reset", {})
        if unknown := set(options) - {"action", "observation", "reset"}:
            raise ValueError(f"no such option of openenv: {', '.join(sorted(unknown))}")
        if not isinstance(self._action, str):
            raise ValueError(
                "set rollout.environment_options.action to the field of the action that the "
                'model\'s text becomes, or to "*"'
            )

    async def __call__(self, task: EnvironmentTask, sample: Sample) -> TurnRewards | None:
        client = GenericEnvClient(base_url=self._url)
        try:
            try:
                await client.connect()
                result = await client.reset(seed=task.group_seed >> 33, **self._reset)
            except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
                raise SetupFailed(f"{self._url}: {error}") from error
            return await self._play(client, task, sample, result)
        finally:
            await client.close()

    async def _play(
        self, client: Any, task: EnvironmentTask, sample: Sample, result: Any
    ) -> TurnRewards | None:
        said = _opening(task.prompt, self._text(result.observation))
        rewards: list[float] = []
        while not result.done:
            try:
                turn = await sample(said)
            except TranscriptFull:
                break
            result, text = await self._step(client, turn.text, result)
            rewards.append(float(result.reward or 0.0))
            said = [{"role": "user", "content": text}] if task_is_chat(task) else f"\n{text}\n"
        # Even if none was told: one that is cut before the first is scored like the others.
        return TurnRewards(rewards) if rewards else None

    async def _step(self, client: Any, text: str, before: Any) -> tuple[Any, str]:
        """The result of the action, and the text that the model gets."""
        try:
            action = json.loads(text) if self._action == "*" else {self._action: text}
            if not isinstance(action, dict):
                raise ValueError("it must be a JSON object")
        except (ValueError, RecursionError) as error:
            return type(before)(before.observation), f"No action: {error}"
        try:
            result = await client.step(action)
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise
            return type(before)(before.observation), f"No action: {error}"
        return result, self._text(result.observation)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation)
        return str(observation[self._observation])


def task_is_chat(task: EnvironmentTask) -> bool:
    return not isinstance(task.prompt, str)


def _opening(prompt: str | list[Message], text: str) -> str | list[Message]:
    if isinstance(prompt, str):
        return f"{prompt}\n{text}\n"
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
