"""One lease to one scored group, or to a return with the reason.

row ──► prompt tokens ──► engine (or an environment) ──► texts ──► rewards ──► group
    unusable row: DROP   failed: FAILED                      failed: FAILED
"""

from __future__ import annotations

import logging
import time

import numpy as np

from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine, GenerationFailed, Request
from rollout_worker.environments.environment_runner import EnvironmentRunner
from rollout_worker.environments.environment_thread import LOST
from rollout_worker.failures import AttemptFailed
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.tasks.group_encoding import group_message, text_of
from rollout_worker.tasks.held_tasks import HeldTask, Stage
from rollout_worker.tasks.lease_inputs import (
    is_evaluation,
    returned,
    row_of,
    sampling_params,
    scoring_job,
)
from rollout_worker.tasks.partial_encoding import prefixes_of
from rollout_worker.tokenizer import Prompt, PromptTokenizer

logger = logging.getLogger(__name__)

_KINDS = {
    # No other attempt can do better.
    "prompt_too_long": rollout_pb2.RETURN_KIND_DROP,
    "malformed_row": rollout_pb2.RETURN_KIND_DROP,
    # Not the task's fault.
    LOST: rollout_pb2.RETURN_KIND_HAND_BACK,
}
"""By reason; FAILED for the others."""


class GroupProducer:
    """``environments``: makes the completions instead of the engine alone."""

    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        engine: Engine,
        scorer: Scorer,
        environments: EnvironmentRunner | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._engine = engine
        self._scorer = scorer
        self._environments = environments
        self.continued_tokens = 0
        """Tokens that other workers had generated and that were not generated again."""

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        """Raises Aborted if the request was aborted, EngineError if the engine has failed."""
        try:
            if self._environments is not None:
                return await self._environments.produce(held)
            return await self._produce(held)
        except AttemptFailed as failed:
            kind = _KINDS.get(failed.reason, rollout_pb2.RETURN_KIND_FAILED)
            return returned(held.lease, kind, failed.reason, str(failed))
        except GenerationFailed as error:
            kind = rollout_pb2.RETURN_KIND_FAILED
            return returned(held.lease, kind, "generation_error", str(error))

    async def _produce(self, held: HeldTask) -> rollout_pb2.Group:
        row = row_of(held.lease)
        prompt = self._tokenizer.prompt(row)
        held.request = self._request(held, prompt)
        completions = await self._engine.generate(held.request)
        generate_s = time.monotonic() - held.since
        held.stage, held.completions = Stage.SCORING, completions
        texts = self._tokenizer.decode_many([c.tokens for c in completions])
        texts = [text_of(c, text) for c, text in zip(completions, texts, strict=True)]
        job = scoring_job(
            held.lease,
            row,
            self._config,
            prompt.text,
            texts,
            finish_reason=[c.finish.value for c in completions],
            token_count=[len(c.tokens) for c in completions],
        )
        scores = await self._scorer.score(job)
        return group_message(held.lease, prompt, completions, texts, scores, generate_s=generate_s)

    def _request(self, held: HeldTask, prompt: Prompt) -> Request:
        """All completions of the task, each continued from what an earlier attempt left of it."""
        lease, rollout = held.lease, self._config.rollout
        room = self._engine.max_context - len(prompt.tokens)
        params = sampling_params(
            rollout,
            max_tokens=min(rollout.max_tokens, room),
            seed=lease.seed,
            greedy=is_evaluation(lease),
        )
        prefixes = prefixes_of(
            lease.partial,
            prompt.tokens,
            count=lease.group_size,
            max_tokens=params.max_tokens,
            version=self._engine.version,
        )
        tokens = sum(len(prefix.tokens) for prefix in prefixes if prefix is not None)
        self.continued_tokens += tokens
        if lease.HasField("partial"):
            event(logger, "continued", task=held.request_id, tokens=tokens)
        return Request(held.request_id, prompt.tokens, params, lease.group_size, prefixes)


def longest_prompt(config: Config, engine: Engine) -> int:
    """Tokens a prompt may have: room for one new token is needed."""
    return int(np.clip(engine.max_context - 1, 1, config.data.max_prompt_tokens))
