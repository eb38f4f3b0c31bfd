"""Environments of the package verifiers: rollout.environment = "verifiers:NAME".

    row ──► the environment's task ──► its harness ──► verifiers' interception server
                                                              │ with the sample's header
         rewards of the trace, by name ◄── its scoring        └──► rollout.openai ──► model

``NAME`` and ``rollout.environment_options`` are verifiers' own configuration of an environment, the
taskset's id and the rest of it. The model speaks through the sample's OpenAI endpoint.

    python -m rollout_worker.environments.verifiers_adapter NAME [--options JSON] [--limit N]

writes the tasks of the environment as rows, for data.path.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf

from rollout_worker.environments.base import (
    FULL_CODES,
    EnvironmentTask,
    Sample,
    SetupFailed,
    TranscriptFull,
)

_SETUP = ("SandboxError", "ToolsetError", "TunnelError")


class Verifiers:
    """``options``: of verifiers' EnvConfig. Raises ValueError for what is not supported, and
    whatever verifiers raises for what is not there."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        taskset = {**options.get("taskset", {}), "id": name}
        self._config = vf.resolve_env_config({**options, "taskset": taskset})
        env = vf.load_environment(self._config)
        seats = self._config.agent_harnesses()
        if len(seats) != 1:
            raise ValueError(f"it has the agents {', '.join(seats)}: only one can be trained")
        self._taskset = env.taskset

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks in the order of the taskset, as rows. Raises ValueError for one in which the
        environment opens the conversation."""
        for task in self._taskset:
            row = task.data.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
            if "prompt" not in row:
                raise ValueError(f"task {task.data.idx} has no prompt: this is not supported")
            yield row

    async def __call__(self, task: EnvironmentTask, sample: Sample) -> dict[str, float] | None:
        assert task.openai is not None  # the configuration asks for it
        endpoint = vf.EvalClientConfig(
            base_url=task.openai.base_url, headers=dict(task.openai.headers), api_key_var=""
        )
        context = vf.ModelContext(model=task.openai.model, client=endpoint)
        async with AsyncExitStack() as serving:
            # One for each sample: verifiers keeps a client for every endpoint that it has seen.
            try:
                env = vf.load_environment(self._config)
                kind = type(env.taskset).task_type()
                data = kind.data_type().model_validate(dict(task.row))
                played = kind(data, env.taskset.config.task)
                await serving.enter_async_context(env.serving())
            except Exception as error:
                raise SetupFailed(" ".join(str(error).split())) from error
            episode = await env.run_episode(played, context)
        return _rewards(episode)


def _rewards(episode: Any) -> dict[str, float] | None:
    """Weighted rewards by name; None if the environment has none. Raises for an episode that has
    failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    for error in errors:
        if (code := next((code for code in FULL_CODES if code in error.message), None)) is not None:
            raise TranscriptFull(code, error.message)
        detail = f"{error.type}: {error.message}"
        raise SetupFailed(detail) if error.type in _SETUP else RuntimeError(detail)
    if len(episode.traces) != 1:
        raise RuntimeError(f"it ran its agent {len(episode.traces)} times: only once is supported")
    rewards = episode.traces[0].rewards
    if missing := [name for name, reward in rewards.items() if reward is None]:
        raise RuntimeError(f"it was not scored by {', '.join(missing)}")
    return {name: reward.value for name, reward in rewards.items()} or None


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the tasks of an environment as rows.")
    parser.add_argument("name")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of its options")
    parser.add_argument("--limit", type=int, help="most rows; needed if the tasks have no end")
    given = parser.parse_args()
    for row in itertools.islice(Verifiers(given.name, given.options).rows(), given.limit):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
