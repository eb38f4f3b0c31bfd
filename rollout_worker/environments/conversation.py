"""A sample's growing transcripts, in the worker's event loop.

    said ──► tokens that extend a transcript ──► engine ──► turn, appended
      │ no room: TranscriptFull                    │ aborted, failed: nothing is appended
      └ invalid: BadTurn                           └ this attempt is over: ``failure``

Sampled tokens are never tokenised again: each turn is generated from exactly the tokens before it.
A turn is appended together with its input, or not at all. Each transcript has one turn at a time;
those of one sample have theirs side by side.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.dataset.messages import BadMessage, Message, normal_message
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
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
from rollout_worker.environments.transcript import Transcript, TranscriptPiece
from rollout_worker.generated_group import text_of

_CONTEXT = 16
"""Tokens before a text that decide how it begins."""

FULL, TURNS, BRANCHES = FULL_CODES


@dataclass(slots=True)
class Conversation:
    """``params``: of every turn, except max_tokens, stop strings and the seed. ``own_clock(runs)``:
    called when the environment's own time stops (False) and continues (True)."""

    request_id: str
    engine: Engine
    tokenizer: PromptTokenizer
    params: SamplingParams
    max_context: int  # Tokens of a whole transcript
    max_prompt: int  # Tokens before the first turn
    max_turns: int  # Of all transcripts together
    max_branches: int  # Transcripts, the first one included
    own_clock: Callable[[bool], None] = lambda runs: None
    named: dict[int, Transcript] = field(default_factory=lambda: {0: Transcript()})
    """The transcripts of the environment's ``sample`` (0) and of its branches."""
    transcripts: list[Transcript] = field(default_factory=list)
    """All that have a turn of their own, or are to get one now."""
    refused: bool = False  # A turn was requested that a limit did not allow
    full: bool = False  # It ended the sample
    failure: Exception | None = None
    """The error by which the attempt has failed, even if the environment catches it."""
    told: set[int] = field(default_factory=set)
    """Numbers of the turns whose replies the endpoint has sent."""
    _turns: set[int] = field(default_factory=set)
    """Numbers of the turns that are recorded or under way."""
    _calls: Iterator[int] = field(default_factory=lambda: count(1))
    _over: bool = False

    @property
    def sequences(self) -> list[Transcript]:
        """The transcripts with turns, by their first ones: a branch comes after what it left. Those
        that were begun by calls side by side come first, by their openings: which call arrives
        first is chance, and the samples of a group are to begin alike."""

        def order(transcript: Transcript) -> tuple[bool, list[int], int]:
            opening = transcript.own[0].said.tolist() if transcript.raced else []
            return not transcript.raced, opening, transcript.own[0].turn.number

        return sorted((made for made in self.transcripts if made.own), key=order)

    @property
    def turns(self) -> list[TranscriptPiece]:
        """All turns, in the order in which they were asked for."""
        pieces = [piece for transcript in self.transcripts for piece in transcript.own]
        return sorted(pieces, key=lambda piece: piece.turn.number)

    async def say(
        self,
        said: Said,
        *,
        transcript: Transcript,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> Turn:
        """The model's turn after ``said`` in ``transcript``. ``seed``: mixed into that of the turn,
        because the samples of a group must not become equal if all ask for one seed; ``tools``: for
        the first prompt, if ``said`` are messages; ``calls``: the tool calls in the turn before, if
        the caller has parsed them. Raises BadTurn, TranscriptFull, TranscriptOver, and the failure
        of the attempt."""
        with self._turn_of(transcript) as number:
            said = _normal(said)
            tools = transcript.tools if transcript.pieces else list(tools)
            before = transcript.tokens
            added, text = self._tokens_of(transcript, said, tools, calls)
            self._check_opening(transcript, len(added))
            room = self._room(transcript, len(before), len(added))
            params = self._params(room, max_tokens, stop)
            seeds = [number] if seed is None else [number, seed]
            for mixed in seeds:
                params = replace(params, seed=int(sample_keys(params.seed, np.array([mixed]))[0]))
            # Not the task's own id: another worker cannot continue a turn.
            request_id = f"{self.request_id}.{next(self._calls)}"
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
                number=number,
            )
            transcript.tools = tools
            messages = _messages_of(said, turn)
            transcript.pieces.append(TranscriptPiece(added, completion, text, turn, messages))
            return turn

    def branch(self, number: int, after: int | None) -> Transcript:
        """The transcript that the environment calls by this number. A new one continues after the
        turn of the number ``after``; None: it begins with nothing. Raises BadTurn."""
        if number not in self.named:
            branch = Transcript() if after is None else None
            for transcript in self.transcripts:
                for shared, piece in enumerate(transcript.pieces, 1):
                    if piece.turn.number == after:
                        branch = transcript.branch(shared)
            if branch is None:
                raise BadTurn(f"a branch after turn {after}, which the sample does not have")
            self.named[number] = branch
        return self.named[number]

    def close(self) -> None:
        """The environment has returned: no turn is added any more."""
        self._over = True
        for transcript in self.transcripts:
            if transcript.running is not None:
                transcript.running.cancel()

    @contextmanager
    def _turn_of(self, transcript: Transcript) -> Iterator[int]:
        """The number of a new turn. Refuses one beside another of the same transcript, and one too
        many; records the failure of the attempt."""
        if self._over:
            raise TranscriptOver("the sample's environment has ended")
        if self.failure is not None:
            raise self.failure
        if transcript.running is not None:
            raise BadTurn("one turn at a time: the newest one of this sequence is not finished")
        if len(self._turns) >= self.max_turns:
            transcript.full = True
            self._refuse(TURNS, f"the model has had its {self.max_turns} turns")
        if transcript not in self.transcripts:
            if len(self.transcripts) >= self.max_branches:
                self._refuse(BRANCHES, f"the sample may have {self.max_branches} sequences")
            self.transcripts.append(transcript)
        number = max(self._turns, default=-1) + 1
        if not self._runs():
            self.own_clock(False)
        transcript.running = asyncio.current_task()
        self._turns.add(number)
        try:
            yield number
        except (Aborted, EngineError, EnvironmentFailed) as error:
            self.failure = error
            raise
        finally:
            transcript.running = None
            if number not in {piece.turn.number for piece in transcript.own}:
                self._turns.remove(number)
            if not transcript.own:
                self.transcripts.remove(transcript)
            if not self._over and not self._runs():
                self.own_clock(True)

    def _runs(self) -> bool:
        return any(transcript.running is not None for transcript in self.transcripts)

    def _check_opening(self, transcript: Transcript, added: int) -> None:
        """A first prompt that cannot be used fails the attempt; that of a branch is refused."""
        if transcript.pieces or 0 < added <= self.max_prompt:
            return
        if self.transcripts == [transcript]:
            reason = "prompt_too_long" if added else "malformed_row"
            detail = f"a prompt of {added} tokens, 1 to {self.max_prompt} allowed"
            raise EnvironmentFailed(reason, detail)
        if not added:
            raise BadTurn("a branch that shares nothing begins with a prompt")

    def _room(self, transcript: Transcript, before: int, added: int) -> int:
        """Most tokens of a turn after ``before`` tokens and ``added`` new ones."""
        room = self.max_context - before - added
        if room < 1:
            transcript.full = self.refused = True
            tokens = f"{before} tokens and {added} more"
            raise TranscriptFull(FULL, f"{tokens} leave no room for a turn in {self.max_context}")
        return room

    def _params(self, room: int, max_tokens: int | None, stop: Sequence[str]) -> SamplingParams:
        """Sampling parameters of a turn of ``room`` tokens at most, but for the seed."""
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise BadTurn("max_tokens must be a whole number, at least 1")
        if (bad := bad_stop(stop)) is not None:
            raise BadTurn(f"stop takes texts, none of them empty; not {bad!r}")
        return replace(
            self.params,
            max_tokens=min(room, self.params.max_tokens, max_tokens or room),
            stop=tuple(dict.fromkeys([*self.params.stop, *stop])),
        )

    def _tokens_of(
        self,
        transcript: Transcript,
        said: Said,
        tools: list[dict[str, Any]],
        calls: Sequence[Mapping[str, Any]],
    ) -> tuple[NDArray[np.int32], str]:
        """Tokens to append, and their text."""
        if isinstance(said, str):
            if not transcript.pieces:
                prompt = self.tokenizer.opening(said)
                return prompt.tokens, prompt.text
            before = self.tokenizer.decode_all(transcript.tokens[-_CONTEXT:].tolist())
            try:
                return np.array(self.tokenizer.after(before, said), np.int32), said
            except BadPrompt as error:
                raise BadTurn(str(error)) from error
        items = list(said)
        messages = [item for item in items if isinstance(item, dict)]
        if messages and len(messages) == len(items):
            try:
                if not transcript.pieces:
                    prompt = self.tokenizer.opening(messages, tools)
                    return prompt.tokens, prompt.text
                last = int(transcript.pieces[-1].completion.tokens[-1])
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

    def _refuse(self, code: str, detail: str) -> None:
        """Refuses what would exceed a limit of the whole sample. An environment that catches this
        goes on, and ends by itself."""
        self.refused = True
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


def _messages_of(said: Said, turn: Turn) -> list[Message] | None:
    messages = [] if isinstance(said, str) else [dict(m) for m in said if isinstance(m, dict)]
    return [*messages, {"role": "assistant", "content": turn.text}] if messages else None
