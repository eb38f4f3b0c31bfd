"""From one lease to one group whose completions an environment made, or to why there is none.

    lease ──► a conversation for each sample ──► environment, all at once ──► transcripts ──► rewards
                   ▲ sample(...), or the OpenAI endpoint                            │
                   └ engine                            group with masks ◄───────────┘

The first sample that fails ends the others: a group is whole or it is not there. No failure ever
becomes a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, Message, prompt_of
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine
from rollout_worker.engine.transformers.rng import sample_keys
from rollout_worker.environments import load
from rollout_worker.environments.base import EnvironmentFailed, EnvironmentTask, TranscriptFull
from rollout_worker.environments.conversation import FULL, TURNS, Conversation, ConversationLimits
from rollout_worker.environments.environment_thread import EnvironmentThread
from rollout_worker.environments.reward_conversion import scores_of
from rollout_worker.environments.transcript import common_prompt, completion, readable
from rollout_worker.openai_server.server import ChatServer
from rollout_worker.rewards.scoring import Scorer, Scores
from rollout_worker.tasks.group_encoding import group_message
from rollout_worker.tasks.held_tasks import HeldTask, Stage
from rollout_worker.tasks.lease_inputs import (
    answer_of,
    is_evaluation,
    row_of,
    sampling_params,
    scoring_job,
)
from rollout_worker.tokenizer import Prompt, PromptTokenizer


class EnvironmentRunner:
    """``rollout.environment``, run for every lease of a worker."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Imports it. Raises BadEnvironment."""
        self._config = config
        self._tokenizer = tokenizer
        self._environment = load.load(config.rollout.environment or "")
        self._server = ChatServer(config, tokenizer) if config.rollout.openai else None
        self._host: EnvironmentThread | None = None
        self.completion_finished: Callable[[str], None] = lambda request_id: None
        """Called with the task's request id for each of its samples whose environment has ended."""

    async def start(self, engine: Engine, scorer: Scorer) -> None:
        """``engine`` is started. Raises BadEnvironment where the endpoint's port is taken."""
        self._engine = engine
        self._scorer = scorer
        self._host = EnvironmentThread(
            self._environment, timeout_s=self._config.rollout.environment_timeout_s
        )
        if self._server is not None:
            await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        if self._host is not None:
            await self._host.close()

    async def produce(self, held: HeldTask) -> rollout_pb2.Group:
        """Raises AttemptFailed, and Aborted and EngineError as the engine does."""
        row = row_of(held.lease)
        try:
            prompt = prompt_of(row, self._config.data)
        except DataError as error:
            raise EnvironmentFailed("malformed_row", str(error)) from error
        tasks = [self._task(held.lease, row, prompt, i) for i in range(held.lease.group_size)]
        conversations = [self._conversation(held, task) for task in tasks]
        results = await self._play_all(tasks, conversations, held.request_id)
        generate_s = time.monotonic() - held.since
        shared = common_prompt(conversations)
        made = [completion(conversation, len(shared)) for conversation in conversations]
        scores = scores_of(results)
        opening = Prompt(shared, self._tokenizer.decode_all(shared.tolist()))
        if scores is None:
            held.stage = Stage.SCORING
            scores = await self._score(held.lease, row, opening.text, conversations)
        completions = [masked.completion for masked in made]
        texts = [self._tokenizer.decode_all(c.tokens.tolist()) for c in completions]
        group = group_message(
            held.lease, opening, completions, texts, scores, generate_s=generate_s
        )
        for message, masked in zip(group.completions, made, strict=True):
            if not masked.mask.all():
                message.loss_mask = masked.mask.tobytes()
        return group

    def _task(
        self,
        lease: rollout_pb2.Lease,
        row: dict[str, Any],
        prompt: str | list[Message],
        index: int,
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
            max_turns=self._config.rollout.max_turns,
            openai=None if self._server is None else self._server.endpoint(),
            tokenizer=self._tokenizer,
        )

    def _conversation(self, held: HeldTask, task: EnvironmentTask) -> Conversation:
        rollout = self._config.rollout
        context = self._engine.max_context
        return Conversation(
            f"{held.request_id}#{task.index}",
            self._engine,
            self._tokenizer,
            sampling_params(
                rollout, max_tokens=rollout.max_tokens, seed=task.seed, greedy=task.evaluation
            ),
            ConversationLimits(context, min(self._tokenizer.limit, context - 1), rollout.max_turns),
        )

    async def _play_all(
        self,
        tasks: Sequence[EnvironmentTask],
        conversations: Sequence[Conversation],
        request_id: str,
    ) -> list[Any]:
        """What the environment returned for each. Raises for the first that failed."""

        async def play(task: EnvironmentTask, conversation: Conversation) -> Any:
            result = await self._play(task, conversation)
            self.completion_finished(request_id)
            return result

        plays = [
            asyncio.ensure_future(play(task, conversation))
            for task, conversation in zip(tasks, conversations, strict=True)
        ]
        try:
            return list(await asyncio.gather(*plays))
        finally:
            for running in plays:
                running.cancel()
            await asyncio.gather(*plays, return_exceptions=True)

    async def _play(self, task: EnvironmentTask, conversation: Conversation) -> Any:
        assert self._host is not None, "not started"
        if self._server is not None and task.openai is not None:
            self._server.admit(task.openai, conversation)
        try:
            result = await self._host.run(task, conversation)
        except Exception as error:
            if conversation.failure is not None or isinstance(error, EnvironmentFailed):
                raise conversation.failure or error from None
            if not _full(error, conversation):
                raise _failed(error) from error
            result = None
        finally:
            if self._server is not None and task.openai is not None:
                self._server.dismiss(task.openai)
        if conversation.failure is not None:
            # The environment may have caught it and gone on.
            raise conversation.failure
        if not conversation.pieces:
            raise EnvironmentFailed("environment_error", "it ended before the model had a turn")
        return result

    async def _score(
        self,
        lease: rollout_pb2.Lease,
        row: dict[str, Any],
        prompt: str,
        conversations: Sequence[Conversation],
    ) -> Scores:
        """Scores the newest turn of each transcript with the reward functions."""
        newest = [conversation.pieces[-1].turn for conversation in conversations]
        job = scoring_job(
            lease,
            row,
            self._config,
            prompt,
            [turn.text for turn in newest],
            finish_reason=[turn.finish for turn in newest],
            token_count=[
                sum(len(piece.turn.tokens) for piece in conversation.pieces)
                for conversation in conversations
            ],
            transcript=[readable(conversation) for conversation in conversations],
        )
        return await self._scorer.score(job)


def _full(error: Exception, conversation: Conversation) -> bool:
    """The transcript had no room and the environment let that pass, perhaps as its client tells it."""
    told = isinstance(error, TranscriptFull) or getattr(error, "code", None) in (FULL, TURNS)
    return told and conversation.full


def _failed(error: Exception) -> EnvironmentFailed:
    line = (str(error).strip() or "no message").splitlines()[0]
    return EnvironmentFailed("environment_error", f"{type(error).__name__}: {line}")
