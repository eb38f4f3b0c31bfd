"""The environment interface: task, sample, turn.

    async def environment(task, sample):
        turn = await sample(task.prompt)               # text, messages or tokens ──► a turn
        turn = await sample(reply_to(turn.text))       # extends the same token sequence
        turn = await sample.branch()("Check: ...")     # another sequence of the same sample
        return {"solved": 1.0}                         # or a number; None: reward functions score

It is called once for each sample of a group, concurrently, in processes of the worker
(rollout.environment_processes). Waiting is free; computing delays the other environments of the
process. Imports no torch: the processes use it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.dataset.messages import Message
from paceline.errors import BadInput
from paceline.user_code import NotFound, find, raised_in
from rollout_worker.rewards.functions import AttemptFailed

if TYPE_CHECKING:
    from paceline.prompt_tokenizer import PromptTokenizer

COMPONENT = "environment"  # Component name of a single number that an environment returns
TURNS = "turns"  # Component name of the sum of TurnRewards.turns
FULL_CODES = ("context_length_exceeded", "max_turns_exceeded", "max_branches_exceeded")

ERROR = "environment_error"
SETUP_ERROR = "environment_setup_error"
CRASHED = "environment_crashed"
TIMEOUT = "environment_timeout"
LOST = "environment_lost"
"""Reasons of an attempt that has no transcript. The last is not counted as an attempt."""


class EnvironmentFailed(AttemptFailed):
    """The attempt has no transcript. ``full``: because the environment did not catch that the
    transcript is full, so that it has one after all."""

    def __init__(self, reason: str, detail: str, *, trace: str = "", full: bool = False) -> None:
        super().__init__(reason, detail, trace=trace)
        self.full = full


class SetupFailed(Exception):
    """For environments to raise if something that they need is not there, such as a sandbox. The
    attempt fails with the reason environment_setup_error."""


class BadEnvironment(BadInput):
    """``rollout.environment`` cannot be used."""


class BadTurn(Exception):
    """``sample`` was called with invalid arguments, or before its turn before was finished."""


class TranscriptFull(Exception):
    """There is no room for another turn; nothing was added. ``code``: context_length_exceeded,
    max_turns_exceeded or max_branches_exceeded. If an environment does not catch it, its sample
    ends with the newest turn, unscored."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class TranscriptOver(Exception):
    """The environment has returned, or its task is no longer held."""


@dataclass(frozen=True, slots=True)
class Turn:
    text: str  # Without special tokens, cut before the stop string if one ended it
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]  # (weight version, number of tokens), in order
    finish: str  # stop (end of sequence, or a stop string) or length
    stop: str | None  # The stop string that ended it
    prompt_tokens: int  # Tokens of its transcript before this turn
    room: int  # Tokens that its transcript may still grow by
    number: int  # Rises by when the turns of the sample were asked for


Said = str | Sequence[Message] | Sequence[int]
"""Input before the model's turn: text to tokenise, messages for the chat template, or tokens."""


class Sample(Protocol):
    """``sample`` in an environment."""

    def __call__(
        self, said: Said, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Awaitable[Turn]:
        """The model's next turn, after ``said``. ``max_tokens`` can only lower rollout.max_tokens;
        ``stop`` is added to rollout.stop. Raises TranscriptFull if there is no room left, BadTurn
        for invalid arguments. Other exceptions end the whole attempt; do not catch them."""
        ...

    def branch(self, *, after: Turn | None = None) -> Sample:
        """Another sequence of this sample, for a sub-agent, a summary or another try: it begins
        with nothing, or with all up to and including ``after``, a turn of the sample. Sequences may
        have their turns side by side. One without a turn is not recorded."""
        ...


Say = Callable[..., Awaitable[Turn]]
"""Takes what is said, the number of the branch and that of the turn that it goes on from (or None),
and by name max_tokens and stop. See Conversation.branch and Conversation.say."""


@dataclass(frozen=True, slots=True)
class NumberedSample:
    """``sample`` of an environment, and its branches."""

    say: Say
    number: int = 0
    after: int | None = None
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __call__(
        self, said: Said, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Awaitable[Turn]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return self.say(said, self.number, self.after, max_tokens=max_tokens, stop=stops)

    def branch(self, *, after: Turn | None = None) -> Sample:
        number = None if after is None else after.number
        return replace(self, number=next(self.numbers), after=number)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of the model for OpenAI's and Anthropic's clients of one sample; see rollout.openai.

        client = AsyncOpenAI(base_url=task.openai.base_url, api_key=task.openai.api_key)

    ``headers`` name the sample for clients that use the key for something else. Key and headers
    only allow extending the sample's transcript.
    """

    base_url: str
    anthropic_url: str  # base_url of an Anthropic client
    api_key: str
    headers: Mapping[str, str]
    model: str
    ca_file: str | None  # PEM by which clients verify it; None: on loopback, without TLS
    trust_file: str | None  # PEM with it and the authorities that clients trust without it

    @property
    def environ(self) -> dict[str, str]:
        """Variables from which an agent in a process of its own reads all of it."""
        # The first replaces a client's own authorities, the second is added to them.
        files = {"SSL_CERT_FILE": self.trust_file, "NODE_EXTRA_CA_CERTS": self.ca_file}
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            **{name: path for name, path in files.items() if path is not None},
        }


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    row: Mapping[str, Any]  # The data set's row
    prompt: str | list[Message]
    """The row's data.prompt_field; with data.chat or a system prompt, as messages."""
    answer: Any  # The row's data.answer_field
    seed: int
    """The same for every attempt at this sample, different for each sample of a group. 64 bits."""
    group_seed: int  # The same for all samples of the group: draw what they have in common from it
    task_id: str
    attempt: int
    index: int  # 0 to group size - 1
    evaluation: bool
    max_turns: int
    openai: Endpoint | None
    tokenizer: PromptTokenizer


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """Rewards by turn, as an environment may return them. The sample's reward is the sum of all."""

    turns: Sequence[float]
    """One for each turn of the model, of all sequences, in the order in which they were asked for.
    """
    outcome: float | Mapping[str, float] = 0.0
    """Reward of the whole sample: a number, or numbers by component."""


Environment = Callable[[EnvironmentTask, Sample], Awaitable[Any]]
"""Returns None (the reward functions score), a number, numbers by component, or TurnRewards."""


async def play(environment: Environment, task: EnvironmentTask, say: Say) -> Any:
    """The result of ``environment``. Raises EnvironmentFailed for whatever it raises: SystemExit
    and its like would end the process, and all environments in it."""
    try:
        return await environment(task, NumberedSample(say))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # The environment, or its OpenAI client, may not catch that the transcript is full.
        full = _says_full(error)
        line, trace = raised_in(error, __file__)
        reason = SETUP_ERROR if isinstance(error, SetupFailed) else ERROR
        raise EnvironmentFailed(reason, f"it raised {line}", trace=trace, full=full) from error


def _says_full(error: BaseException) -> bool:
    """True if ``error``, a cause of it or a member of a group says that there is no room. OpenAI's
    client has the code in the exception, Anthropic's in its body."""
    left: list[BaseException | None] = [error]
    seen: list[BaseException] = []
    while left:
        at = left.pop()
        if at is None or any(at is other for other in seen):
            continue
        seen.append(at)
        match getattr(at, "body", None):
            case {"error": {"code": code}}:
                pass
            case _:
                code = getattr(at, "code", None)
        if code in FULL_CODES:
            return True
        left += [at.__cause__, *(at.exceptions if isinstance(at, BaseExceptionGroup) else ())]
    return False


ADAPTERS = {
    "verifiers": "rollout_worker.environments.verifiers_adapter:Verifiers",
    "openenv": "rollout_worker.environments.openenv_adapter:OpenEnv",
}
"""Classes of environments by the first part of a name, called with its rest and the options."""


def load(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """``options``: for the adapters. Raises BadEnvironment, with what is wrong with the name or
    with what it names."""
    kind, _, rest = name.partition(":")
    if kind in ADAPTERS:
        try:
            return cast(Environment, find(ADAPTERS[kind])(rest, options or {}))
        except Exception as error:  # Code of theirs is loaded, which may raise anything
            raise _bad(name, " ".join(str(error).split())[:500]) from error
    try:
        target: Any = find(name)
    except NotFound as error:
        raise _bad(name, str(error)) from error
    call = target if inspect.isroutine(target) else getattr(target, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        raise _bad(name, "it must be an async function of (task, sample)")
    try:
        inspect.signature(target).bind(None, None)
    except (TypeError, ValueError):
        raise _bad(name, "it must take two arguments, (task, sample)") from None
    return cast(Environment, target)


def _bad(name: str, why: str) -> BadEnvironment:
    return BadEnvironment(f"rollout.environment = {name!r}: {why}")
