"""Environments that only use the openai client, for tests of what it is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rollout_worker.environments.base import Endpoint, Sample, Task

Message = dict[str, Any]
BEGIN: list[Message] = [{"role": "user", "content": "begin"}]
ADD = {"type": "function", "function": {"name": "add"}}
"""A tool. Short, as the models of tests have a token for each character."""


def client_of(endpoint: Endpoint, **options: Any) -> Any:
    import openai

    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key="whatever",
        default_headers=dict(endpoint.headers),
        **{"max_retries": 0, **options},
    )


def agent(play: Callable[[Any, Task], Awaitable[Any]]) -> Callable[[Task, Sample], Awaitable[Any]]:
    """An environment that only uses a client."""

    async def environment(task: Task, sample: Sample) -> Any:
        assert task.openai is not None
        async with client_of(task.openai) as client:
            return await play(client, task)

    return environment


async def ask(client: Any, task: Task, messages: list[Message], **options: Any) -> Any:
    return await client.chat.completions.create(
        model=task.openai.model,
        messages=messages,
        **options,
    )
