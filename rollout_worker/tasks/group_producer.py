"""From one lease to one scored group, or to the reason why there is none.

row ──► prompt tokens ──► engine ──► texts ──► rewards ──► group
    bad row: DROP   failed: FAILED          failed: FAILED
"""

from __future__ import annotations

import json
import logging
import time

import numpy as np

from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine, GenerationFailed, Request, SamplingParams
from rollout_worker.environments.environment_runner import EnvironmentRunner
from rollout_worker.rewards.score import Job, ScoringFailed
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.tasks.group_encoding import group_message, text_of
from rollout_worker.tasks.held_tasks import HeldTask, Stage
from rollout_worker.tasks.partial_encoding import prefixes_of
from rollout_worker.tokenizer import BadPrompt, Prompt, PromptTokenizer

logger = logging.getLogger(__name__)


class GroupProducer:
    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        engine: Engine,
        scorer: Scorer,
        environments: EnvironmentRunner | None = None,
    ) -> None:
        """``environments``: what makes completions instead of the engine alone."""
        self._config = config
        self._tokenizer = tokenizer
        self._engine = engine
        self._scorer = scorer
        self._environments = environments
        self.continued_tokens = 0
        """Tokens that others had generated and that were not generated again."""

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        """Raises Aborted where the request was aborted, EngineError where the engine has failed."""
        if self._environments is not None:
            return await self._environments.produce(held)
        lease = held.lease
        try:
            row = json.loads(lease.row_json)
            if not isinstance(row, dict):
                raise BadPrompt("malformed_row", "the row is not a JSON object")
            prompt = self._tokenizer.prompt(row)
        except json.JSONDecodeError as error:
            return returned(held, rollout_pb2.RETURN_KIND_DROP, "malformed_row", str(error))
        except BadPrompt as error:
            return returned(held, rollout_pb2.RETURN_KIND_DROP, error.reason, str(error))
        try:
            held.request = self._request(held, prompt)
            samples = await self._engine.generate(held.request)
        except GenerationFailed as error:
            return returned(held, rollout_pb2.RETURN_KIND_FAILED, "generation_error", str(error))
        generate_s = time.monotonic() - held.since
        held.stage, held.samples = Stage.SCORING, samples
        texts = self._tokenizer.decode_many([sample.tokens for sample in samples])
        texts = [text_of(sample, text) for sample, text in zip(samples, texts, strict=True)]
        job = self._job(lease, row, prompt, texts)
        job.each["finish_reason"] = [sample.finish.value for sample in samples]
        job.each["token_count"] = [len(sample.tokens) for sample in samples]
        try:
            scores = await self._scorer.score(job)
        except ScoringFailed as error:
            return returned(held, rollout_pb2.RETURN_KIND_FAILED, error.reason, str(error))
        return group_message(lease, prompt, samples, texts, scores, generate_s=generate_s)

    def _request(self, held: HeldTask, prompt: Prompt) -> Request:
        """All completions of the task, from where an earlier attempt left them."""
        lease, params = held.lease, self._params(held.lease, len(prompt.tokens))
        prefixes = prefixes_of(
            lease.partial,
            prompt.tokens,
            count=lease.group_size,
            max_tokens=params.max_tokens,
            version=self._engine.version,
        )
        tokens = sum(len(sample.tokens) for sample in prefixes if sample is not None)
        self.continued_tokens += tokens
        if lease.HasField("partial"):
            event(logger, "continued", task=held.request_id, tokens=tokens)
        return Request(held.request_id, prompt.tokens, params, lease.group_size, prefixes)

    def _params(self, lease: rollout_pb2.Lease, prompt_tokens: int) -> SamplingParams:
        rollout = self._config.rollout
        return SamplingParams(
            max_tokens=min(rollout.max_tokens, self._engine.max_context - prompt_tokens),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            seed=lease.seed,
            greedy=lease.kind == rollout_pb2.TASK_KIND_EVAL,
        )

    def _job(
        self,
        lease: rollout_pb2.Lease,
        row: dict[str, object],
        prompt: Prompt,
        texts: list[str],
    ) -> Job:
        field = self._config.data.answer_field
        return Job(
            prompt=prompt.text,
            completions=texts,
            answer=row.get(field) if field else None,
            row=row,
            shared={
                "task_id": lease.task.task_id,
                "attempt": lease.task.attempt,
                "evaluation": lease.kind == rollout_pb2.TASK_KIND_EVAL,
            },
            each={},
        )


def returned(
    held: HeldTask, kind: rollout_pb2.ReturnKind, reason: str, detail: str = ""
) -> rollout_pb2.ReturnedTask:
    return rollout_pb2.ReturnedTask(
        task=held.lease.task, kind=kind, reason=reason, detail=detail[:1000]
    )


def longest_prompt(config: Config, engine: Engine) -> int:
    """Tokens a prompt may have: room for one new token is needed."""
    return int(np.clip(engine.max_context - 1, 1, config.data.max_prompt_tokens))
