"""From one lease to one group whose completions an environment made, or to why there is none.

    lease ──► a conversation for each sample ──► environment, all at once ──► transcripts ──► rewards
                   ▲ sample(...), or the OpenAI endpoint                            │
                   └ engine                            group with masks ◄───────────┘

The first sample that fails ends the others: a group is whole or it is not there. No failure ever
becomes a reward.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, Message, prompt_of
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine, GenerationFailed, SamplingParams
from rollout_worker.engine.transformers.rng import sample_keys
from rollout_worker.environments import load
from rollout_worker.environments.base import EnvironmentFailed, EnvironmentTask, TranscriptFull
from rollout_worker.environments.conversation import FULL, TURNS, Conversation, ConversationLimits
from rollout_worker.environments.environment_thread import LOST, EnvironmentThread
from rollout_worker.environments.reward_conversion import scores_of
from rollout_worker.environments.transcript import common_prompt, completion, readable
from rollout_worker.openai_server.server import ChatServer
from rollout_worker.rewards.score import Job, ScoringFailed
from rollout_worker.rewards.scoring import Scorer, Scores
from rollout_worker.tasks.group_encoding import group_message
from rollout_worker.tasks.held_tasks import HeldTask, Stage
from rollout_worker.tokenizer import Prompt, PromptTokenizer

HOPELESS = {"prompt_too_long", "malformed_row"}
"""Reasons that no other attempt can mend."""


class EnvironmentRunner:
    """``rollout.environment``, run for every lease of a worker."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Imports it. Raises BadEnvironment."""
        self._config = config
        self._tokenizer = tokenizer
        self._environment = load.load(config.rollout.environment or "")
        self._server = ChatServer(config, tokenizer) if config.rollout.openai else None
        self._host: EnvironmentThread | None = None
        self.sample_over: Callable[[str], None] = lambda request_id: None
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

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        """Raises Aborted and EngineError as the plain way does."""
        try:
            return await self._group(held)
        except EnvironmentFailed as error:
            kind = rollout_pb2.RETURN_KIND_FAILED
            if error.reason in HOPELESS:
                kind = rollout_pb2.RETURN_KIND_DROP
            elif error.reason == LOST:
                kind = rollout_pb2.RETURN_KIND_HAND_BACK
            reason, detail = error.reason, str(error)
        except GenerationFailed as error:
            kind = rollout_pb2.RETURN_KIND_FAILED
            reason, detail = "generation_error", str(error)
        except ScoringFailed as error:
            kind = rollout_pb2.RETURN_KIND_FAILED
            reason, detail = error.reason, str(error)
        return rollout_pb2.ReturnedTask(
            task=held.lease.task, kind=kind, reason=reason, detail=detail[:1000]
        )

    async def _group(self, held: HeldTask) -> rollout_pb2.Group:
        row, prompt = self._opening(held.lease)
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
            scores = await self._score(held.lease, row, opening, conversations)
        group: rollout_pb2.Group = group_message(
            held.lease,
            opening,
            [one.sample for one in made],
            [self._tokenizer.decode_all(one.sample.tokens.tolist()) for one in made],
            scores,
            generate_s=generate_s,
        )
        for message, one in zip(group.completions, made, strict=True):
            if not one.mask.all():
                message.loss_mask = one.mask.tobytes()
        return group

    def _opening(self, lease: rollout_pb2.Lease) -> tuple[dict[str, Any], str | list[Message]]:
        try:
            row = json.loads(lease.row_json)
            if not isinstance(row, dict):
                raise EnvironmentFailed("malformed_row", "the row is not a JSON object")
            return row, prompt_of(row, self._config.data)
        except (json.JSONDecodeError, DataError) as error:
            raise EnvironmentFailed("malformed_row", str(error)) from error

    def _task(
        self,
        lease: rollout_pb2.Lease,
        row: dict[str, Any],
        prompt: str | list[Message],
        index: int,
    ) -> EnvironmentTask:
        field = self._config.data.answer_field
        return EnvironmentTask(
            row=row,
            prompt=prompt,
            answer=row.get(field) if field else None,
            seed=int(sample_keys(lease.seed, np.array([index]))[0]),
            group_seed=lease.seed,
            task_id=lease.task.task_id,
            attempt=lease.task.attempt,
            index=index,
            evaluation=lease.kind == rollout_pb2.TASK_KIND_EVAL,
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
            SamplingParams(
                max_tokens=rollout.max_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop=tuple(rollout.stop),
                seed=task.seed,
                greedy=task.evaluation,
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
            self.sample_over(request_id)
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
        prompt: Prompt,
        conversations: Sequence[Conversation],
    ) -> Scores:
        """By the reward functions, of each transcript's newest turn."""
        field = self._config.data.answer_field
        newest = [conversation.pieces[-1].turn for conversation in conversations]
        return await self._scorer.score(
            Job(
                prompt=prompt.text,
                completions=[turn.text for turn in newest],
                answer=row.get(field) if field else None,
                row=row,
                shared={
                    "task_id": lease.task.task_id,
                    "attempt": lease.task.attempt,
                    "evaluation": lease.kind == rollout_pb2.TASK_KIND_EVAL,
                },
                each={
                    "finish_reason": [turn.finish for turn in newest],
                    "token_count": [
                        sum(len(piece.turn.tokens) for piece in conversation.pieces)
                        for conversation in conversations
                    ],
                    "transcript": [readable(conversation) for conversation in conversations],
                },
            )
        )


def _full(error: Exception, conversation: Conversation) -> bool:
    """The transcript had no room and the environment let that pass, perhaps as its client tells it."""
    told = isinstance(error, TranscriptFull) or getattr(error, "code", None) in (FULL, TURNS)
    return told and conversation.full


def _failed(error: Exception) -> EnvironmentFailed:
    line = (str(error).strip() or "no message").splitlines()[0]
    return EnvironmentFailed("environment_error", f"{type(error).__name__}: {line}")
