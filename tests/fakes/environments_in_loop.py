"""Environments in the test's own loop, in place of those in processes: they may be closures."""

from typing import Any

from rollout_worker.environments.base import Environment, EnvironmentTask, Said, Turn, play
from rollout_worker.environments.conversation import Conversation
from rollout_worker.environments.environment_processes import EnvironmentProcesses


class EnvironmentsInLoop(EnvironmentProcesses):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def run(self, task: EnvironmentTask, conversation: Conversation, timeout_s: float) -> Any:
        async def say(said: Said, branch: int, after: int | None, **how: Any) -> Turn:
            transcript = conversation.branch(branch, after)
            return await conversation.say(said, transcript=transcript, **how)

        try:
            return await play(self._environment, task, say)
        finally:
            conversation.close()
