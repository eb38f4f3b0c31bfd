"""Group producer: from a lease to a scored group, or to a return with the reason.

row ──► prompt tokens ──► engine (or an environment) ──► texts ──► rewards ──► group
    unusable row: DROP   failed: FAILED                      failed: FAILED
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.config.sections.scorers import named_scorer
from paceline.dataset.recorded_encoding import RowEncoder
from paceline.errors import one_line
from paceline.payloads.routes import note_routes
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Completion, Engine, GenerationFailed, Request
from rollout_worker.engine.without_model import NoEngine
from rollout_worker.environments.base import LOST
from rollout_worker.generated_group import (
    GeneratedGroup,
    completion_fields,
    text_of,
    token_bytes,
)
from rollout_worker.held_tasks import (
    HeldTask,
    Stage,
    answer_of,
    eval_set_of,
    is_evaluation,
    returned,
    sampling_params,
    settings_of,
)
from rollout_worker.rewards.builtin import answer_of_text
from rollout_worker.rewards.functions import AttemptFailed, Job
from rollout_worker.rewards.scoring import Scorer, Scores, penalised
from rollout_worker.tasks.environment_runner import EnvironmentRunner
from rollout_worker.tasks.group_scores import GroupScores
from rollout_worker.tasks.partial_rollouts import PartialRollouts

logger = logging.getLogger(__name__)

MOST_TRACES = 32  # Of one worker: a reward that always fails must not fill the log
_MAX_TEXT = 1 << 16  # Characters of a text that are sent along; texts are for people

_KINDS = {
    # No other attempt can do better.
    "prompt_too_long": rollout_pb2.RETURN_KIND_DROP,
    "malformed_row": rollout_pb2.RETURN_KIND_DROP,
    # Not the task's fault.
    LOST: rollout_pb2.RETURN_KIND_HAND_BACK,
}  # By reason; FAILED for the others


@dataclass
class GroupProducer:
    config: Config
    tokenizer: PromptTokenizer
    engine: Engine
    scorer: Scorer
    environments: EnvironmentRunner | None = None
    """Makes the completions instead of the engine alone."""
    set_scorers: Mapping[str, Scorer] = field(default_factory=dict)
    """Scorers of evaluation sets that have their own rewards, by name."""
    group_scores: GroupScores | None = None  # Scorers of the config; None: there are none
    partials: PartialRollouts | None = None  # Work that earlier attempts have left
    _logged: set[str] = field(default_factory=set)
    """Failures whose traceback stands in the log already."""

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        """Raises Aborted if the request was aborted, EngineError if the engine has failed."""
        try:
            return await self._scored_group(held)
        except (AttemptFailed, BadPrompt) as failed:
            kind = _KINDS.get(failed.reason, rollout_pb2.RETURN_KIND_FAILED)
            detail = str(failed)
            if isinstance(failed, AttemptFailed) and kind == rollout_pb2.RETURN_KIND_FAILED:
                detail = self._told(held.lease, failed)
            return returned(held.lease.task, failed.reason, detail, kind)
        except GenerationFailed as error:
            return returned(held.lease.task, "generation_error", str(error))

    def _told(self, lease: rollout_pb2.Lease, failed: AttemptFailed) -> str:
        """The failure with what it failed on. Its traceback goes to the log."""
        detail = str(failed)
        if failed.trace and detail not in self._logged and len(self._logged) < MOST_TRACES:
            self._logged.add(detail)
            task = {"task": lease.task.task_id, "attempt": lease.task.attempt}
            event(logger, "code of the run failed", logging.ERROR, **task, why=detail)
            logger.error("%s", failed.trace)
        completions = failed.job.each["completion"] if failed.job else []
        if failed.number is not None and failed.number < len(completions):
            completion = f"{completions[failed.number]!r:.200}"
            held_out = f" of {lease.eval_set or 'data.eval_path'}" * is_evaluation(lease)
            detail += f", on completion {failed.number} of row {lease.index}{held_out}: "
            detail += completion
        return detail

    async def _scored_group(self, held: HeldTask) -> rollout_pb2.Group:
        lease = held.lease
        row = in_data_fields(row_of(lease), lease, self.config)
        generate = self.environments.generate if self.environments else self._generate
        wait = (WaitKind.ENGINE, "generating", "")  # Its progress is in the worker's report
        if environment := self.config.rollout.environment:
            wait = (WaitKind.ENVIRONMENT, f"running {environment}", environment)
        with waiting(*wait):
            made = await generate(held, row)
        generate_s = time.monotonic() - held.since
        held.stage, held.completions = Stage.SCORING, made.completions
        eval_set = eval_set_of(lease, self.config)
        answer = answer_of(row, self.config)
        shared = {
            "prompt": made.prompt.text,
            "answer": answer,
            "row": row,
            "task_id": lease.task.task_id,
            "attempt": lease.task.attempt,
            "evaluation": is_evaluation(lease),
        }
        # A set's own rewards replace those of the environment, too.
        has_own_reward = eval_set is not None and eval_set.reward is not None
        scores = None if has_own_reward else made.scores
        scores = scores or await self._scores(lease, made, shared, eval_set)
        if self.config.reward.overlong_buffer and not is_evaluation(lease):
            # With an environment, the limit of the transcript after the prompt.
            most = self.engine.max_context - len(made.prompt.tokens)
            if not self.environments:
                most = min(sampling_params(self.config, lease).max_tokens, most)
            scores = penalised(scores, made.lengths(), most, self.config.reward)
        vote = ""
        if eval_set is not None and eval_set.samples > 1:
            vote = eval_set.votes(self.config.reward)
        group = group_message(lease, made, scores, generate_s=generate_s, vote=vote)
        firsts = [made.completions[first].prompt_routes for first in made.firsts]
        noted = [routes for routes in firsts if routes is not None]
        if noted and not is_evaluation(lease):
            routes = [c.routes for c in made.completions]
            # They are compressed, and the session must go on.
            await asyncio.to_thread(note_routes, group, noted[0], routes)
        if self.group_scores is not None and not is_evaluation(lease):
            columns = await self.group_scores.columns(made, answer)
            for name, numbers in columns.items():
                for completion, column in zip(group.completions, numbers, strict=True):
                    completion.columns[name] = column
        return group

    async def _scores(
        self,
        lease: rollout_pb2.Lease,
        made: GeneratedGroup,
        shared: dict[str, Any],
        eval_set: EvalSetConfig | None,
    ) -> Scores:
        """Asks reward functions, then scorers: a group that a function fails costs no scorer."""
        scorer, functions = self.scorer, self.config.reward.functions
        if eval_set is not None and eval_set.reward is not None:
            scorer, functions = self.set_scorers[lease.eval_set], eval_set.reward
        names = ", ".join(name for name in functions if named_scorer(name) is None)
        limit_s = settings_of(lease, self.config).reward_timeout_s
        with waiting(WaitKind.REWARD, f"scoring with {names}", names, limit_s=limit_s):
            job = Job(shared, made.scored, limit_s)
            try:
                scores = await scorer.score(job)
            except AttemptFailed as failed:
                failed.job = job
                raise
        if self.group_scores is None:
            return scores
        return await self.group_scores.rewards(made, shared["answer"], scores, functions)

    async def _generate(self, held: HeldTask, row: dict[str, Any]) -> GeneratedGroup:
        prompt = self.tokenizer.prompt(row)
        params = sampling_params(self.config, held.lease)
        room = self.engine.max_context - len(prompt.tokens)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        prefixes: tuple[Completion | None, ...] = ()
        if self.partials is not None:
            prefixes = await self.partials.prefixes(
                held.lease,
                prompt.tokens,
                max_tokens=params.max_tokens,
                version=self.engine.version,
            )
        held.request = Request(
            held.request_id, prompt.tokens, params, held.lease.group_size, prefixes
        )
        completions = await self.engine.generate(held.request)
        texts = self.tokenizer.decode_many([c.tokens for c in completions])
        texts = [text_of(c, text) for c, text in zip(completions, texts, strict=True)]
        return GeneratedGroup(
            prompt,
            completions,
            texts,
            scored={
                "completion": texts,
                "finish_reason": [c.finish.value for c in completions],
                "token_count": [len(c.tokens) for c in completions],
            },
        )


def row_of(lease: rollout_pb2.Lease) -> dict[str, Any]:
    """Raises AttemptFailed."""
    try:
        row = json.loads(lease.row_json)
    except (ValueError, RecursionError) as error:
        raise AttemptFailed("malformed_row", one_line(error)) from error
    if not isinstance(row, dict):
        raise AttemptFailed("malformed_row", "the row is not a JSON object")
    return row


def in_data_fields(row: dict[str, Any], lease: rollout_pb2.Lease, config: Config) -> dict[str, Any]:
    """The lease's row with prompt and answer in the fields that ``data`` names."""
    of, data = eval_set_of(lease, config), config.data
    if of is None:
        return row
    named = {data.prompt_field: of.prompt_field, data.answer_field: of.answer_field}
    return row | {to: row[name] for to, name in named.items() if to and name and name in row}


def group_message(
    lease: rollout_pb2.Lease,
    made: GeneratedGroup,
    scores: Scores,
    *,
    generate_s: float,
    vote: str = "",
) -> rollout_pb2.Group:
    """``vote``: what the samples vote on (see answer_of_text); "": on nothing."""
    branches = [made.branch_of(number) for number in range(len(made.completions))]
    group = rollout_pb2.Group(
        task=lease.task,
        kind=lease.kind,
        prompt_tokens=token_bytes(made.prompt.tokens),
        completions=[
            rollout_pb2.Completion(
                **completion_fields(completion),
                text=text[:_MAX_TEXT],
                branch=branch.message if branch else None,
            )
            for completion, text, branch in zip(made.completions, made.texts, branches, strict=True)
        ],
        generate_s=generate_s,
        reward_s=scores.seconds,
        prompt_text=made.prompt.text[:_MAX_TEXT],
        prompt_cut=made.prompt.cut,
    )
    for number, first in enumerate(made.firsts):
        completion = group.completions[first]
        completion.reward = scores.rewards[number]
        completion.reward_components.update(scores.components[number])
        if vote:
            completion.answer = answer_of_text(vote, made.texts[made.newest[number]])
    for completion, mask in zip(group.completions, made.masks, strict=False):
        completion.loss_mask = b"" if mask.all() else mask.tobytes()
    for index, placed in enumerate(scores.placed):
        alone = [(index, token) for token in range(len(placed))]
        places = made.turn_ends[index] if made.turn_ends else alone
        for (sequence, token), reward in zip(places, placed, strict=True) if placed else ():
            group.completions[sequence].token_rewards.add(token=token, reward=reward)
    return group


@dataclass
class RecordedProducer:
    encoder: RowEncoder
    engine: NoEngine
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Tokenizers are not made for several threads."""

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        task = held.lease.task
        try:
            async with self._one:
                # In a thread: a long row takes some time, and the session must go on.
                group = await asyncio.to_thread(
                    lambda: self.encoder.encode(row_of(held.lease), task, held.lease.kind)
                )
        except (AttemptFailed, BadPrompt) as failed:
            # No other attempt can do better.
            return returned(task, failed.reason, str(failed), rollout_pb2.RETURN_KIND_DROP)
        self.engine.rows_encoded += 1
        group.generate_s = time.monotonic() - held.since
        return group
