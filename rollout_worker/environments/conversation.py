"""The transcript of one sample as it grows. Lives in the worker's event loop.

    said ──► tokens that extend the transcript ──► engine ──► turn, appended
      │ no room: TranscriptFull                      │ aborted, failed: nothing is appended
      └ unsayable: BadTurn                           └ this attempt is over: ``failure``

Nothing that was sampled is ever tokenised again: a turn begins with exactly the tokens of those
before it. A turn is appended whole, with what was said before it, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.dataset.rows import Message
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    Finish,
    Request,
    SamplingParams,
    bad_stop,
)
from rollout_worker.engine.transformers.rng import sample_keys
from rollout_worker.environments.base import (
    BadTurn,
    EnvironmentFailed,
    Said,
    TranscriptFull,
    TranscriptOver,
    Turn,
)
from rollout_worker.tasks.group_encoding import text_of
from rollout_worker.tokenizer import BadPrompt, PromptTokenizer

FULL = "context_length_exceeded"
TURNS = "max_turns_exceeded"


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    context: int
    """Tokens of the whole transcript."""
    prompt: int
    """Tokens before the first turn."""
    turns: int


@dataclass(frozen=True, slots=True)
class TranscriptPiece:
    """What was said before a turn, and the turn. ``said``: int32 [n], n may be 0 after the first."""

    said: NDArray[np.int32]
    completion: Completion
    said_text: str
    turn: Turn


@dataclass(slots=True)
class Conversation:
    """``params``: of every turn, but for max_tokens, stop strings and the seed. ``own_clock(runs)``:
    called when the environment's own time stops (False) and when it goes on (True)."""

    request_id: str
    engine: Engine
    tokenizer: PromptTokenizer
    params: SamplingParams
    limits: ConversationLimits
    own_clock: Callable[[bool], None] = lambda runs: None
    pieces: list[TranscriptPiece] = field(default_factory=list)
    messages: list[Message] | None = field(default_factory=list)
    """The transcript as messages; None where part of it was said otherwise."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """What the first prompt says the model may call, as chat templates take it."""
    full: bool = False
    """Another turn was asked for and there was no room."""
    failure: Exception | None = None
    """Why there can be no transcript, whatever the environment makes of it."""
    _calls: int = 0
    _running: asyncio.Task[Any] | None = None
    _over: bool = False

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n], of the transcript so far."""
        parts = [part for piece in self.pieces for part in (piece.said, piece.completion.tokens)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def asking(self) -> bool:
        """The model is at its turn."""
        return self._running is not None

    async def say(
        self,
        said: Said,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        change: Callable[[SamplingParams], SamplingParams] = lambda params: params,
        after: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Turn:
        """The model's turn after ``said``; ``change``: what else is different in this one;
        ``after``: how many turns there were when ``said`` was chosen, where that matters;
        ``tools``: for the first prompt, where ``said`` are messages.

        Raises BadTurn, TranscriptFull, TranscriptOver, and what ends the attempt.
        """
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
            return await self._turn(said, max_tokens, stop, change, list(tools))
        except (Aborted, EngineError, EnvironmentFailed) as error:
            self.failure = error
            raise
        finally:
            self._running = None
            if not self._over:
                self.own_clock(True)

    def close(self) -> None:
        """The environment has returned: nothing is added any more."""
        self._over = True
        if self._running is not None:
            self._running.cancel()

    async def _turn(
        self,
        said: Said,
        max_tokens: int | None,
        stop: Sequence[str],
        change: Callable[[SamplingParams], SamplingParams],
        tools: list[dict[str, Any]],
    ) -> Turn:
        tools = self.tools if self.pieces else tools
        if len(self.pieces) >= self.limits.turns:
            self._refuse(TURNS, f"the model has had its {self.limits.turns} turns")
        before = self.tokens
        added, text = self._tokens_of(said, tools)
        if not self.pieces and not 0 < len(added) <= self.limits.prompt:
            reason = "prompt_too_long" if len(added) else "malformed_row"
            detail = f"a prompt of {len(added)} tokens, 1 to {self.limits.prompt} allowed"
            raise EnvironmentFailed(reason, detail)
        room = self.limits.context - len(before) - len(added)
        if room < 1:
            self._refuse(
                FULL,
                f"{len(before)} tokens and {len(added)} more leave no room for a turn within "
                f"{self.limits.context}",
            )
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise BadTurn("max_tokens must be a whole number, at least 1")
        if (bad := bad_stop(stop)) is not None:
            raise BadTurn(f"stop takes texts, none of them empty; not {bad!r}")
        most = min(room, self.params.max_tokens, max_tokens or room)
        key = sample_keys(self.params.seed, np.array([len(self.pieces)]))
        params = change(
            replace(
                self.params,
                max_tokens=most,
                stop=tuple(dict.fromkeys([*self.params.stop, *stop])),
                seed=int(key[0]),
            )
        )
        if params.temperature < (least := self.engine.least_temperature) and not params.greedy:
            raise BadTurn(f"temperature must be 0, or at least {least:g}")
        self._calls += 1
        (completion,) = await self.engine.generate(
            Request(
                # Other than a task's own id: nobody can go on with a turn elsewhere.
                f"{self.request_id}.{self._calls}",
                np.concatenate([before, added]),
                params,
            )
        )
        turn = self._describe(completion, len(before) + len(added))
        self.tools = tools
        self.pieces.append(TranscriptPiece(added, completion, text, turn))
        self._remember(said, turn)
        return turn

    def _tokens_of(self, said: Said, tools: list[dict[str, Any]]) -> tuple[NDArray[np.int32], str]:
        """Tokens to append, and what they say."""
        if isinstance(said, str):
            if not self.pieces:
                prompt = self.tokenizer.opening(said)
                return prompt.tokens, prompt.text
            return np.array(self.tokenizer.encode(said), np.int32), said
        items = list(said)
        messages = [item for item in items if isinstance(item, dict)]
        if messages and len(messages) == len(items):
            if not all("role" in message and "content" in message for message in messages):
                raise BadTurn("a message needs role and content")
            try:
                if not self.pieces:
                    prompt = self.tokenizer.opening(messages, tools)
                    return prompt.tokens, prompt.text
                last = int(self.pieces[-1].completion.tokens[-1])
                tokens = self.tokenizer.following(messages, last, tools)
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

    def _describe(self, completion: Completion, before: int) -> Turn:
        tokens = tuple(completion.tokens.tolist())
        return Turn(
            text=text_of(completion, self.tokenizer.decode(tokens)),
            tokens=tokens,
            logprobs=tuple(completion.logprobs.tolist()),
            versions=completion.versions,
            finish="length" if completion.finish is Finish.LENGTH else "stop",
            stop=completion.stop,
            prompt_tokens=before,
            room=self.limits.context - before - len(tokens),
        )

    def _refuse(self, code: str, detail: str) -> None:
        self.full = True
        raise TranscriptFull(code, detail)
