"""A sample's growing transcript, in the worker's event loop.

    said ──► tokens that extend the transcript ──► engine ──► turn, appended
      │ no room: TranscriptFull                      │ aborted, failed: nothing is appended
      └ invalid: BadTurn                             └ this attempt is over: ``failure``

Sampled tokens are never tokenised again: each turn is generated from exactly the tokens before it.
A turn is appended together with its input, or not at all.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.dataset.messages import BadMessage, Message, normal_message
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    Request,
    SamplingParams,
    bad_stop,
)
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.environments.base import (
    FULL_CODES,
    BadTurn,
    EnvironmentFailed,
    Said,
    TranscriptFull,
    TranscriptOver,
    Turn,
)
from rollout_worker.generated_group import text_of

_CONTEXT = 16
"""Tokens before a text that decide how it begins."""

FULL, TURNS = FULL_CODES


@dataclass(frozen=True, slots=True)
class TranscriptPiece:
    """A turn and its input. ``said``: int32 [n], n may be 0 after the first."""

    said: NDArray[np.int32]
    completion: Completion
    said_text: str
    turn: Turn


@dataclass(slots=True)
class Conversation:
    """``params``: of every turn, except max_tokens, stop strings and the seed. ``own_clock(runs)``:
    called when the environment's own time stops (False) and continues (True)."""

    request_id: str
    engine: Engine
    tokenizer: PromptTokenizer
    params: SamplingParams
    max_context: int  # Tokens of the whole transcript
    max_prompt: int  # Tokens before the first turn
    max_turns: int
    own_clock: Callable[[bool], None] = lambda runs: None
    pieces: list[TranscriptPiece] = field(default_factory=list)
    messages: list[Message] | None = field(default_factory=list)
    """The transcript as messages; None if part of it was text or tokens."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools in the first prompt, as chat templates expect them."""
    full: bool = False  # Another turn was requested and there was no room
    failure: Exception | None = None
    """The error by which the attempt has failed, even if the environment catches it."""
    _calls: int = 0
    _running: asyncio.Task[Any] | None = None
    _over: bool = False

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n], of the transcript so far."""
        parts = [part for piece in self.pieces for part in (piece.said, piece.completion.tokens)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    async def say(
        self,
        said: Said,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        after: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> Turn:
        """The model's turn after ``said``. ``seed``: mixed into that of the turn, because the
        samples of a group must not become equal if all ask for one seed; ``after``: the number of
        turns that the caller assumes; ``tools``: for the first prompt, if ``said`` are messages;
        ``calls``: the tool calls in the turn before, if the caller has parsed them. Raises BadTurn,
        TranscriptFull, TranscriptOver, and the failure of the attempt."""
        with self._one_at_a_time(after):
            said = _normal(said)
            tools = self.tools if self.pieces else list(tools)
            before = self.tokens
            if len(self.pieces) >= self.max_turns:
                self._refuse(TURNS, f"the model has had its {self.max_turns} turns")
            added, text = self._tokens_of(said, tools, calls)
            params = self._params(len(before), len(added), max_tokens, stop)
            if seed is not None:
                mixed = sample_keys(params.seed, np.array([seed]))[0]
                params = replace(params, seed=int(mixed))
            self._calls += 1
            # Not the task's own id: another worker cannot continue a turn.
            request_id = f"{self.request_id}.{self._calls}"
            request = Request(request_id, np.concatenate([before, added]), params)
            (completion,) = await self.engine.generate(request)
            tokens = tuple(completion.tokens.tolist())
            turn = Turn(
                text=text_of(completion, self.tokenizer.decode(tokens)),
                tokens=tokens,
                logprobs=tuple(completion.logprobs.tolist()),
                versions=completion.versions,
                finish=completion.finish,
                stop=completion.stop,
                prompt_tokens=len(request.prompt_tokens),
                room=self.max_context - len(request.prompt_tokens) - len(tokens),
            )
            self.tools = tools
            self.pieces.append(TranscriptPiece(added, completion, text, turn))
            self._remember(said, turn)
            return turn

    def close(self) -> None:
        """The environment has returned: no turn is added any more."""
        self._over = True
        if self._running is not None:
            self._running.cancel()

    @contextmanager
    def _one_at_a_time(self, after: int | None) -> Iterator[None]:
        """Refuses a turn beside another one, and records the failure of the attempt."""
        if self._over:
            raise TranscriptOver("the sample's environment has ended")
        if self.failure is not None:
            raise self.failure
        if self._running is not None or after not in (None, len(self.pieces)):
            raise BadTurn(
                "one turn at a time: the newest one of this sample is not finished", busy=True
            )
        self._running = asyncio.current_task()
        self.own_clock(False)
        try:
            yield
        except (Aborted, EngineError, EnvironmentFailed) as error:
            self.failure = error
            raise
        finally:
            self._running = None
            if not self._over:
                self.own_clock(True)

    def _params(
        self, before: int, added: int, max_tokens: int | None, stop: Sequence[str]
    ) -> SamplingParams:
        """Sampling parameters of a turn after ``before`` tokens and ``added`` new ones."""
        if not self.pieces and not 0 < added <= self.max_prompt:
            reason = "prompt_too_long" if added else "malformed_row"
            detail = f"a prompt of {added} tokens, 1 to {self.max_prompt} allowed"
            raise EnvironmentFailed(reason, detail)
        room = self.max_context - before - added
        if room < 1:
            self._refuse(
                FULL,
                f"{before} tokens and {added} more leave no room for a turn within "
                f"{self.max_context}",
            )
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise BadTurn("max_tokens must be a whole number, at least 1")
        if (bad := bad_stop(stop)) is not None:
            raise BadTurn(f"stop takes texts, none of them empty; not {bad!r}")
        return replace(
            self.params,
            max_tokens=min(room, self.params.max_tokens, max_tokens or room),
            stop=tuple(dict.fromkeys([*self.params.stop, *stop])),
            seed=int(sample_keys(self.params.seed, np.array([len(self.pieces)]))[0]),
        )

    def _tokens_of(
        self, said: Said, tools: list[dict[str, Any]], calls: Sequence[Mapping[str, Any]]
    ) -> tuple[NDArray[np.int32], str]:
        """Tokens to append, and their text."""
        if isinstance(said, str):
            if not self.pieces:
                prompt = self.tokenizer.opening(said)
                return prompt.tokens, prompt.text
            before = self.tokenizer.decode_all(self.tokens[-_CONTEXT:].tolist())
            try:
                return np.array(self.tokenizer.after(before, said), np.int32), said
            except BadPrompt as error:
                raise BadTurn(str(error)) from error
        items = list(said)
        messages = [item for item in items if isinstance(item, dict)]
        if messages and len(messages) == len(items):
            try:
                if not self.pieces:
                    prompt = self.tokenizer.opening(messages, tools)
                    return prompt.tokens, prompt.text
                last = int(self.pieces[-1].completion.tokens[-1])
                tokens = self.tokenizer.following(messages, last, tools, calls)
            except BadPrompt as error:
                raise BadTurn(str(error)) from error
            return np.array(tokens, np.int32), self.tokenizer.decode_all(tokens)
        tokens = [int(item) for item in items if isinstance(item, int | np.integer)]
        if len(tokens) < len(items):
            raise BadTurn("say text, a list of messages (dicts), or a list of token ids")
        for token in tokens:
            if not 0 <= token < self.engine.vocabulary:
                raise BadTurn(
                    f"token id {token} is not in the model's vocabulary of {self.engine.vocabulary}"
                )
        return np.array(tokens, np.int32), self.tokenizer.decode_all(tokens)

    def _remember(self, said: Said, turn: Turn) -> None:
        messages = [] if isinstance(said, str) else [m for m in said if isinstance(m, dict)]
        if not messages:
            self.messages = None
        if self.messages is not None:
            self.messages.extend(dict(message) for message in messages)
            self.messages.append({"role": "assistant", "content": turn.text})

    def _refuse(self, code: str, detail: str) -> None:
        self.full = True
        raise TranscriptFull(code, detail)


def _normal(said: Said) -> Said:
    """``said`` with its messages in one form. Raises BadTurn."""
    if isinstance(said, str):
        return said
    try:
        items: Any = [normal_message(m) if isinstance(m, dict) else m for m in said]
        return cast(Said, items)
    except BadMessage as error:
        raise BadTurn(str(error)) from error
