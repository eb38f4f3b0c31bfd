"""Groups of completions that an environment makes.

    lease ──► a conversation for each sample ──► environment, at once ──► transcripts ──► rewards
                   ▲ sample(...), or the OpenAI endpoint                       │
                   └ engine                            group with masks ◄──────┘

The first sample that fails ends the others: there are no partial groups. A failure never becomes a
reward.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config.schema import Config
from paceline.dataset.messages import Message
from paceline.errors import one_line
from paceline.prompt_tokenizer import Prompt, PromptTokenizer
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.environments.base import (
    EnvironmentFailed,
    EnvironmentTask,
    TranscriptFull,
    load,
)
from rollout_worker.environments.conversation import FULL, TURNS, Conversation
from rollout_worker.environments.environment_thread import EnvironmentThread
from rollout_worker.environments.transcript import (
    common_prompt,
    masked_completion,
    readable,
    scores_of,
    turn_ends,
)
from rollout_worker.generated_group import GeneratedGroup
from rollout_worker.held_tasks import (
    HeldTask,
    answer_of,
    is_evaluation,
    sampling_params,
    settings_of,
)

if TYPE_CHECKING:
    from rollout_worker.openai_server.server import ChatServer


class EnvironmentRunner:
    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Imports it. Raises BadEnvironment."""
        self._config = config
        self._tokenizer = tokenizer
        environment = load(config.rollout.environment or "")
        self._server: ChatServer | None = None
        if config.rollout.openai:
            # Only here: the web framework is slow to import.
            from rollout_worker.openai_server import server

            self._server = server.ChatServer(config, tokenizer)
        self._thread = EnvironmentThread(environment)

    async def start(self, engine: Engine) -> None:
        """``engine`` is started. Raises BadEnvironment if the endpoint's port is taken."""
        self._engine = engine
        if self._server is not None:
            await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await self._thread.close()

    async def generate(self, held: HeldTask, row: dict[str, Any]) -> GeneratedGroup:
        """Raises AttemptFailed, and Aborted and EngineError as the engine does."""
        prompt = self._tokenizer.content_of(row)
        tasks = [self._task(held.lease, row, prompt, i) for i in range(held.lease.group_size)]
        conversations = [self._conversation(held, task) for task in tasks]
        timeout_s = settings_of(held.lease, self._config).environment_timeout_s
        plays = [
            asyncio.ensure_future(self._play(held.request_id, task, conversation, timeout_s))
            for task, conversation in zip(tasks, conversations, strict=True)
        ]
        try:
            results = await asyncio.gather(*plays)
        finally:
            for running in plays:
                running.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
        shared = common_prompt(conversations)
        made = [masked_completion(conversation, len(shared)) for conversation in conversations]
        newest = [conversation.pieces[-1].turn for conversation in conversations]
        completions, masks = zip(*made, strict=True)
        return GeneratedGroup(
            Prompt(shared, self._tokenizer.decode_all(shared.tolist())),
            completions,
            texts=[self._tokenizer.decode_all(c.tokens.tolist()) for c in completions],
            scored={
                "completion": [turn.text for turn in newest],
                "finish_reason": [turn.finish for turn in newest],
                "token_count": [int(mask.sum()) for mask in masks],
                "transcript": [readable(conversation) for conversation in conversations],
            },
            scores=scores_of(results, [len(c.pieces) for c in conversations]),
            masks=masks,
            turn_ends=[turn_ends(conversation, len(shared)) for conversation in conversations],
        )

    def _task(
        self, lease: rollout_pb2.Lease, row: dict[str, Any], prompt: str | list[Message], index: int
    ) -> EnvironmentTask:
        return EnvironmentTask(
            row=row,
            prompt=prompt,
            answer=answer_of(row, self._config),
            seed=int(sample_keys(lease.seed, np.array([index]))[0]),
            group_seed=lease.seed,
            task_id=lease.task.task_id,
            attempt=lease.task.attempt,
            index=index,
            evaluation=is_evaluation(lease),
            max_turns=settings_of(lease, self._config).max_turns,
            openai=None if self._server is None else self._server.endpoint(),
            tokenizer=self._tokenizer,
        )

    def _conversation(self, held: HeldTask, task: EnvironmentTask) -> Conversation:
        context = self._engine.max_context
        return Conversation(
            f"{held.request_id}#{task.index}",
            self._engine,
            self._tokenizer,
            replace(sampling_params(self._config, held.lease), seed=task.seed),
            max_context=context,
            max_prompt=min(self._tokenizer.limit, context - 1),
            max_turns=task.max_turns,
        )

    async def _play(
        self, request_id: str, task: EnvironmentTask, conversation: Conversation, timeout_s: float
    ) -> Any:
        if self._server is not None and task.openai is not None:
            self._server.admit(task.openai, conversation)
        try:
            result = await self._thread.run(task, conversation, timeout_s)
        except Exception as error:
            if isinstance(error, EnvironmentFailed):
                error.number = task.index
            if conversation.failure is not None or isinstance(error, EnvironmentFailed):
                raise conversation.failure or error from None
            if not _full(error, conversation):
                raise EnvironmentFailed("environment_error", one_line(error)) from error
            result = None
        finally:
            if self._server is not None and task.openai is not None:
                self._server.dismiss(task.openai)
        if conversation.failure is not None:
            # The environment may have caught it.
            raise conversation.failure
        if not conversation.pieces:
            raise EnvironmentFailed("environment_error", "it ended before the model had a turn")
        # As for the completions of a request of the engine alone.
        self._engine.completion_finished(request_id)
        return result


def _full(error: Exception, conversation: Conversation) -> bool:
    """The environment did not catch that the transcript is full, itself or its client."""
    is_full = isinstance(error, TranscriptFull) or getattr(error, "code", None) in (FULL, TURNS)
    return is_full and conversation.full
