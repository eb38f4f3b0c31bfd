"""Evaluation of a model on a data set in this process: an engine, rewards, and no controller.

rows ──► lease ──► group producer (prompt ─► engine ─► rewards) ──► score of the row
         the same as a rollout worker's, so a model gets the scores that it would get in a run
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers.utils import logging as transformers_logging

from paceline.config.schema import Config
from paceline.dataset.data_order import task_seed
from paceline.dataset.rows import RowSource
from paceline.evaluation import RowScore, row_score
from paceline.ids import TaskId
from paceline.payloads.group_payload import truncated_samples
from paceline.payloads.sample_paths import paths_of
from paceline.prompt_tokenizer import PromptTokenizer
from paceline.user_code import search_start_directory_last
from paceline.v1 import common_pb2, rollout_pb2
from paceline_launcher.cli.eval_command import SET
from rollout_worker.engine.base import Aborted
from rollout_worker.engine.choice import make_engine
from rollout_worker.held_tasks import HeldTask
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.tasks.environment_runner import EnvironmentRunner
from rollout_worker.tasks.group_producer import GroupProducer


@dataclass(slots=True)
class Judged:
    rows: int  # rows to evaluate
    scores: dict[int, RowScore] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)  # rows without a score, by reason
    example: str = ""  # error of the first row that failed
    interrupted: bool = False
    generate_s: float = 0.0

    @property
    def finished(self) -> int:
        return len(self.scores) + self.failed.total()


def evaluate(config: Config, rows: RowSource, progress: Callable[[Judged], None]) -> Judged:
    """The scores of the set ``SET`` of ``config``. ``progress`` is called after each row."""
    transformers_logging.disable_progress_bar()
    search_start_directory_last()
    outcome = Judged(min(len(rows), config.evaluation.sets[SET].limit))
    # The first Ctrl-C cancels the work, a second one does not wait for it.
    try:
        asyncio.run(_evaluate(config, rows, outcome, progress))
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


async def _evaluate(
    config: Config, rows: RowSource, outcome: Judged, progress: Callable[[Judged], None]
) -> None:
    eval_set, remaining = config.evaluation.sets[SET], iter(range(outcome.rows))

    async def take_rows(producer: GroupProducer) -> None:
        for index in remaining:
            lease = rollout_pb2.Lease(
                task=common_pb2.TaskRef(task_id=f"e0.{index}", attempt=1),
                kind=rollout_pb2.TASK_KIND_EVAL,
                index=index,
                row_json=json.dumps(rows[index], ensure_ascii=False),
                seed=task_seed(config.run.seed, TaskId(f"{SET}/{index}")),
                group_size=eval_set.samples,
                eval_set=SET,
            )
            with contextlib.suppress(Aborted):
                made = await producer.produce(HeldTask(lease))
                if isinstance(made, rollout_pb2.ReturnedTask):
                    outcome.failed[made.reason] += 1
                    outcome.example = outcome.example or f"row {index}: {made.detail}"
                else:
                    firsts = [c for c in made.completions if not c.HasField("branch")]
                    outcome.scores[index] = row_score(
                        [c.reward for c in firsts],
                        [c.answer for c in firsts] if eval_set.samples > 1 else [],
                        [len(c.tokens) // 4 for c in made.completions],
                        truncated_samples(made.completions, paths_of(made)),
                        eval_set.solved_at,
                    )
                progress(outcome)

    tokenizer = PromptTokenizer(config)
    environments = EnvironmentRunner(config, tokenizer) if config.rollout.environment else None
    engine, scorer = make_engine(config, tokenizer), Scorer(config.reward)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(scorer.close)
        stack.push_async_callback(engine.close)
        await scorer.start()
        if environments is not None:
            stack.push_async_callback(environments.close)
            await environments.start(engine)
        await engine.start()
        # Room for one new token is needed.
        tokenizer.limit = min(max(1, engine.max_context - 1), config.data.max_prompt_tokens)
        producer = GroupProducer(config, tokenizer, engine, scorer, environments)
        at_once = -(-config.rollout.max_sequences // eval_set.samples) + 1
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, outcome.rows)):
                    group.create_task(take_rows(producer))
        finally:
            outcome.generate_s = time.monotonic() - began
