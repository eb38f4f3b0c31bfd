"""Groups of completions that an environment makes.

    lease ──► a conversation for each sample ──► environment, at once ──► transcripts ──► rewards
                   ▲ sample(...), or the OpenAI endpoint                       │
                   └ engine                            group with masks ◄──────┘

The first sample that fails ends the others: there are no partial groups. A failure never becomes a
reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config.schema import Config
from paceline.dataset.messages import Message
from paceline.payloads.group_limits import usable_reward
from paceline.process.threads import all_or_none
from paceline.prompt_tokenizer import Prompt, PromptTokenizer
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Engine
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.environments.base import (
    COMPONENT,
    TURNS,
    EnvironmentFailed,
    EnvironmentTask,
    TurnRewards,
)
from rollout_worker.environments.conversation import Conversation
from rollout_worker.environments.environment_processes import EnvironmentProcesses
from rollout_worker.environments.sequences import (
    SampleSequence,
    common_prompt,
    readable,
    sequences_of,
)
from rollout_worker.generated_group import GeneratedGroup, SharedPath
from rollout_worker.held_tasks import (
    HeldTask,
    answer_of,
    is_evaluation,
    sampling_params,
    settings_of,
)
from rollout_worker.rewards.functions import number_of
from rollout_worker.rewards.scoring import Scores

if TYPE_CHECKING:
    from rollout_worker.openai_server.server import ChatServer


class EnvironmentRunner:
    def __init__(
        self, config: Config, tokenizer: PromptTokenizer, home: Path | None = None
    ) -> None:
        """``home``: directory of the endpoint's files, see ChatServer. Raises BadEnvironment if the
        endpoint has no chat template."""
        self._config = config
        self._tokenizer = tokenizer
        self._server: ChatServer | None = None
        if config.rollout.openai:
            # Only here: the web framework is slow to import.
            from rollout_worker.openai_server import server

            self._server = server.ChatServer(config, tokenizer, home)
        self.processes = EnvironmentProcesses(config)

    async def start(self, engine: Engine, host: str = "127.0.0.1") -> None:
        """``host``: address at which others reach this machine. Raises BadEnvironment if the
        endpoint cannot listen, or if a process cannot import the environment."""
        self._engine = engine
        await self.processes.start()
        if self._server is not None:
            await self._server.start(host)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await self.processes.close()

    async def generate(self, held: HeldTask, row: dict[str, Any]) -> GeneratedGroup:
        """Raises AttemptFailed, and Aborted and EngineError as the engine does."""
        prompt = self._tokenizer.content_of(row)
        tasks = [self._task(held.lease, row, prompt, i) for i in range(held.lease.group_size)]
        conversations = [self._conversation(held, task) for task in tasks]
        timeout_s = settings_of(held.lease, self._config).environment_timeout_s
        results = await all_or_none(
            self._play(held.request_id, task, conversation, timeout_s)
            for task, conversation in zip(tasks, conversations, strict=True)
        )
        return self._group(conversations, results)

    def _group(
        self, conversations: Sequence[Conversation], results: Sequence[Any]
    ) -> GeneratedGroup:
        prompt = common_prompt(conversations)
        made: list[SampleSequence] = []
        branches: list[SharedPath | None] = []
        turn_ends: list[list[tuple[int, int]]] = []
        for conversation in conversations:
            first = len(made)
            ends: dict[int, tuple[int, int]] = {}
            for number, sequence in enumerate(sequences_of(conversation, len(prompt)), first):
                shared, branch = sequence.path[: sequence.shared], None
                if number > first:
                    text = self._tokenizer.decode_all(shared.tolist())
                    branch = SharedPath(first + sequence.of, shared, text)
                made.append(sequence)
                branches.append(branch)
                ends |= {turn: (number, end) for turn, end in sequence.turn_ends.items()}
            turn_ends.append([ends[turn] for turn in sorted(ends)])
        turns = [conversation.turns for conversation in conversations]
        newest = [pieces[-1].turn for pieces in turns]
        return GeneratedGroup(
            Prompt(prompt, self._tokenizer.decode_all(prompt.tolist())),
            tuple(sequence.completion for sequence in made),
            texts=[self._tokenizer.decode_all(s.completion.tokens.tolist()) for s in made],
            scored={
                "completion": [turn.text for turn in newest],
                "finish_reason": [turn.finish for turn in newest],
                "token_count": [sum(len(p.completion.tokens) for p in pieces) for pieces in turns],
                "transcript": [readable(conversation) for conversation in conversations],
            },
            scores=scores_of(results, [len(pieces) for pieces in turns]),
            masks=[sequence.mask for sequence in made],
            turn_ends=turn_ends,
            branches=branches,
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
            max_branches=self._config.most_branches,
        )

    async def _play(
        self, request_id: str, task: EnvironmentTask, conversation: Conversation, timeout_s: float
    ) -> Any:
        if self._server is not None and task.openai is not None:
            self._server.admit(task.openai, conversation)
        try:
            result = await self.processes.run(task, conversation, timeout_s)
        except EnvironmentFailed as error:
            error.number = task.index
            if not (error.full and conversation.refused):
                raise conversation.failure or error from None
            result, conversation.full = None, True
        finally:
            if self._server is not None and task.openai is not None:
                self._server.dismiss(task.openai)
        if conversation.failure is not None:
            # The environment may have caught it.
            raise conversation.failure
        if not conversation.sequences:
            raise EnvironmentFailed("environment_error", "it ended before the model had a turn")
        # As for the completions of a request of the engine alone.
        self._engine.completion_finished(request_id)
        return result


_MOST = 64  # Components of a sample, as the controller checks
_ALLOWED = "a number, numbers by name, TurnRewards, or None"


def scores_of(results: Sequence[Any], turns: Sequence[int]) -> Scores | None:
    """Each sample's reward is the sum of its components. None: the environment does not score.
    ``turns``: the model's turns in each sample. Raises EnvironmentFailed for invalid rewards, and
    if only some samples are scored: rewards of one group must be comparable."""
    components = [_components(result) for result in results]
    if all(values is None for values in components):
        return None
    scored = [values for values in components if values is not None]
    if len(scored) < len(components):
        raise _bad(
            f"{len(scored)} of {len(components)} samples were scored and the others not; if an "
            "environment scores, it must also do so when its transcript is full (TranscriptFull)"
        )
    rewards = [math.fsum(values.values()) for values in scored]
    if not all(map(usable_reward, rewards)):
        raise _bad("the sum of a sample's rewards is not finite or above 1e9")
    placed: list[list[float]] = []
    for result, count in zip(results, turns, strict=True):
        given = result.turns if isinstance(result, TurnRewards) else ()
        if isinstance(result, TurnRewards) and len(given) != count:
            raise _bad(f"it returned rewards of {len(given)} turns, the model had {count}")
        placed.append(list(map(_number, given)))
    return Scores(rewards, scored, 0.0, placed)


def _components(result: Any) -> dict[str, float] | None:
    if result is None:
        return None
    if isinstance(result, TurnRewards):
        whole = {TURNS: math.fsum(map(_number, result.turns))}
        return whole | (_components(result.outcome) or {})
    if isinstance(result, Mapping):
        if not 0 < len(result) <= _MOST:
            raise _bad(f"it returned {len(result)} rewards, 1 to {_MOST} allowed")
        names = [str(name)[:64].encode(errors="backslashreplace").decode() for name in result]
        return dict(zip(names, map(_number, result.values()), strict=True))
    return {COMPONENT: _number(result)}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise _bad(f"it returned {value!r:.80}, not {_ALLOWED}")
    return number_of(value, lambda detail: _bad(f"it {detail}"), _ALLOWED)


def _bad(detail: str) -> EnvironmentFailed:
    return EnvironmentFailed("environment_error", detail)
