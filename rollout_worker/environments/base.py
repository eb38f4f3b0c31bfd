"""What an environment sees.

    async def environment(task, sample):
        turn = await sample(task.prompt)               # text, messages or tokens ──► a turn of the model
        turn = await sample(reply_to(turn.text))       # extends the same token sequence
        return {"solved": 1.0}                         # or a number, or None: the reward functions score

It is called once for each sample of a group, all of them at once, in a thread that they share and
that is not the worker's: waiting is free, computing holds the others up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.dataset.rows import Message
from paceline.errors import BadInput
from rollout_worker.failures import AttemptFailed
from rollout_worker.tokenizer import PromptTokenizer

COMPONENT = "environment"
"""Under which the number that an environment returns is reported."""


class EnvironmentFailed(AttemptFailed):
    """This attempt has no transcript. ``reason``: environment_error, environment_timeout, ..."""


class BadEnvironment(BadInput):
    """``rollout.environment`` cannot be used."""


class BadTurn(Exception):
    """``sample`` was called in a way that it cannot be: the message says how. ``busy``: another
    turn of the sample is not finished."""

    def __init__(self, detail: str, *, busy: bool = False) -> None:
        super().__init__(detail)
        self.busy = busy


class TranscriptFull(Exception):
    """There is no room for another turn, nothing was added. ``code``: context_length_exceeded or
    max_turns_exceeded.

    An environment may let it pass: its transcript then ends with the newest turn, unscored.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class TranscriptOver(Exception):
    """The environment has returned, or its task is no longer held."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one go."""

    text: str
    """Without special tokens, cut before the stop string if one ended it."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    """(weight version, tokens), in order."""
    finish: str
    """stop (end of sequence, or a stop string) or length."""
    stop: str | None
    """The stop string that ended it."""
    prompt_tokens: int
    """Tokens of the transcript before this turn."""
    room: int
    """Tokens that the transcript may still grow by."""


Said = str | Sequence[Message] | Sequence[int]
"""What the environment puts before the model's turn: text that is tokenised as it is, messages that
go through the chat template, or tokens."""


class Sample(Protocol):
    """``sample`` in an environment."""

    def __call__(
        self, said: Said, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Awaitable[Turn]:
        """The model's next turn, after ``said``.

        ``max_tokens`` can only lower rollout.max_tokens; ``stop`` is added to rollout.stop. Raises
        TranscriptFull where there is no room left, BadTurn for what cannot be said, and what ends
        the whole attempt (do not catch that).
        """
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI client finds the model for this one sample; see rollout.openai.

        client = AsyncOpenAI(base_url=task.openai.base_url, api_key=task.openai.api_key)

    ``headers`` name the sample for clients whose key is not free. Whoever knows either can extend
    the sample's transcript, and nothing else.
    """

    base_url: str
    api_key: str
    headers: Mapping[str, str]
    model: str


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """One sample that is to be made."""

    row: Mapping[str, Any]
    """Of the data set."""
    prompt: str | list[Message]
    """As data.prompt_field has it; with chat or a system prompt, as messages."""
    answer: Any
    """The row's data.answer_field."""
    seed: int
    """Equal for every attempt at this sample, different for each sample of a group. 64 bits."""
    group_seed: int
    """Equal for all samples of the group: for what they must have in common."""
    task_id: str
    attempt: int
    index: int
    """0 to group size - 1."""
    evaluation: bool
    max_turns: int
    openai: Endpoint | None
    tokenizer: PromptTokenizer


Environment = Callable[[EnvironmentTask, Sample], Awaitable[Any]]
"""Returns None (the reward functions score), a number, or numbers by component."""
