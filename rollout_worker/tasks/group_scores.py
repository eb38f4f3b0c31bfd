"""Scores of a group by the scorers of the configuration: rewards, and columns of log-probs.

A call for scores is sent to a living scorer, and repeated elsewhere if it fails, dies or is slow:

    living scorers ── least busy ──► call ──► reply
      UNAVAILABLE, connection lost ──► pause it, ask another
      no longer living             ──► give it up, ask another
      no reply for timeout_s       ──► ask another as well; the first reply counts
      UNKNOWN                      ──► ask one other: its device may be at fault
      any other status             ──► ScorerFailed: the attempt fails
    no living scorer ──► wait for one, however long: nobody's fault

A score has no side effect, so a request that reaches two scorers, or is answered twice, does no
harm: the first reply counts. A judge that samples may answer the second differently.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from paceline.config.schema import Config
from paceline.config.sections.scorers import PREFIX, named_scorer
from paceline.payloads.group_limits import usable_reward
from paceline.process.threads import all_or_none
from paceline.process.waits import WaitKind, waiting
from paceline.prompt_tokenizer import Prompt
from paceline.rpc.auth import client_root, worker_token
from paceline.rpc.client import call_error
from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_channel
from paceline.v1 import scorer_pb2, worker_pb2
from rollout_worker.generated_group import GeneratedGroup, token_bytes
from rollout_worker.rewards.functions import AttemptFailed, weights_of
from rollout_worker.rewards.scoring import Scores

SCORE = METHODS["ScorerService.Score"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # Before a scorer that failed is asked again
LOOK_S = 0.5  # How often a call looks whether a paused scorer may be asked again
_ITS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)  # Statuses that another scorer would answer with, too
Call = asyncio.Future[scorer_pb2.ScoreReply]


class ScorerFailed(AttemptFailed):
    """The attempt has no score. ``reason``: scorer_error."""


@dataclass(eq=False)
class LivingScorer:
    name: str
    worker_id: str
    address: str
    channel: grpc.aio.Channel
    open_calls: int = 0
    not_before: float = 0.0  # Monotonic time until which it is not asked, because it failed
    trouble: str = ""  # Reason of the last failure
    pause_s: float = FIRST_PAUSE_S

    def failed(self, why: str) -> None:
        self.trouble, self.not_before = why, time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def answered(self) -> None:
        self.trouble, self.not_before, self.pause_s = "", 0.0, FIRST_PAUSE_S


class LivingScorers:
    """On one event loop. ``changed`` is replaced by a new event whenever the set changes."""

    def __init__(self, config: Config, run_dir: Path | None) -> None:
        """Raises AuthError."""
        self._token = worker_token(config, run_dir)
        self._root = client_root(config.auth)
        self._limit_mb = config.controller.max_message_mb
        self._living: dict[tuple[str, str, str], LivingScorer] = {}
        self._closings: set[asyncio.Future[None]] = set()  # Kept from the garbage collector
        self.changed = asyncio.Event()

    def set(self, directed: Iterable[worker_pb2.Scorer]) -> None:
        """``directed``: of a directive. A process that was started again has another address."""
        wanted = {(one.name, one.worker_id, one.address) for one in directed}
        if wanted == self._living.keys():
            return
        for key in self._living.keys() - wanted:
            closing = asyncio.ensure_future(self._living.pop(key).channel.close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
        for key in sorted(wanted - self._living.keys()):
            channel = open_channel(
                key[2], self._token, tls_ca=self._root, max_message_mb=self._limit_mb
            )
            self._living[key] = LivingScorer(*key, channel)
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    def of(self, name: str) -> list[LivingScorer]:
        return [scorer for scorer in self._living.values() if scorer.name == name]

    def ask(self, scorer: LivingScorer, request: scorer_pb2.ScoreRequest) -> Call:
        """One call without a time limit."""
        method = bind_method(scorer.channel, SCORE)
        call: Call = asyncio.ensure_future(method(request, metadata=call_metadata(self._token)))

        def over(_: Call) -> None:
            scorer.open_calls -= 1

        scorer.open_calls += 1
        call.add_done_callback(over)
        return call

    async def close(self) -> None:
        channels = [scorer.channel for scorer in self._living.values()]
        self._living.clear()
        for channel in channels:
            await channel.close()


async def scored(
    scorers: LivingScorers, name: str, request: scorer_pb2.ScoreRequest, timeout_s: float
) -> scorer_pb2.ScoreReply:
    """``timeout_s``: after this time another scorer is asked as well. Waits for a scorer without
    limit. Raises ScorerFailed."""
    began, ask_more_at = time.monotonic(), 0.0
    asked: dict[Call, LivingScorer] = {}
    tried: set[LivingScorer] = set()
    broke_down = False  # A scorer failed on it in a way that another one may not
    try:
        while True:
            now, living = time.monotonic(), scorers.of(name)
            if not asked or now >= ask_more_at:
                able = [s for s in living if s not in asked.values() and s.not_before <= now]
                if able:
                    chosen = min(able, key=lambda s: (s in tried, s.open_calls, s.worker_id))
                    tried.add(chosen)
                    ask_more_at = now + timeout_s
                    asked[scorers.ask(chosen, request)] = chosen
            with waiting(WaitKind.SCORER, _wait(name, living, asked.values()), name, since=began):
                await _news(scorers, asked, LOOK_S if living else None)
            living = scorers.of(name)
            for call, scorer in list(asked.items()):
                if not call.done():
                    if scorer not in living:
                        call.cancel()
                        del asked[call]
                    continue
                del asked[call]
                try:
                    reply: scorer_pb2.ScoreReply = call.result()
                except grpc.aio.AioRpcError as error:
                    details, unknown = call_error(error), error.code() is grpc.StatusCode.UNKNOWN
                    alone = not set(living) - {scorer}
                    if error.code() in _ITS_FAULT or (unknown and (broke_down or alone)):
                        why = f"scorer {name} ({scorer.worker_id}): {details}"
                        raise ScorerFailed("scorer_error", why) from None
                    broke_down = broke_down or unknown
                    scorer.failed(details)
                except (asyncio.CancelledError, grpc.aio.UsageError):
                    pass  # its channel was closed, because it is no longer among the living
                else:
                    scorer.answered()
                    return reply
    finally:
        for call in asked:
            call.cancel()


async def _news(scorers: LivingScorers, calls: Iterable[Call], limit_s: float | None) -> None:
    """Returns after a reply, after a change of the living, or after ``limit_s``."""
    changed: asyncio.Future[Any] = asyncio.ensure_future(scorers.changed.wait())
    try:
        await asyncio.wait({*calls, changed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changed.cancel()


def _wait(name: str, living: Iterable[LivingScorer], asked: Iterable[LivingScorer]) -> str:
    if ids := ", ".join(sorted(scorer.worker_id for scorer in asked)):
        return f"waiting for scorer {name} ({ids})"
    if not living:
        return f"waiting for scorer {name}: none is alive"
    why = next((s.trouble for s in living if s.trouble), "it is asked again soon")
    return f"waiting for scorer {name}: {why}"


REQUEST_BYTES = 4 << 20
"""Approximate size of a request; several scorers share a group of long completions."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A sequence for a scorer. ``prompt``: what it has before its own tokens, never empty."""

    prompt: Prompt
    tokens: NDArray[np.int32]
    text: str


def _item(made: GeneratedGroup, number: int) -> _Item:
    tokens, text = made.completions[number].tokens, made.texts[number]
    if (branch := made.branch_of(number)) is None:
        return _Item(made.prompt, tokens, text)
    if len(branch.tokens):
        return _Item(Prompt(branch.tokens, branch.text), tokens, text)
    return _Item(Prompt(tokens[:1], ""), tokens[1:], text)


Functions = Sequence[str] | Mapping[str, float]  # Name of the scorer in reward.functions


class GroupScores:
    """Asks the scorers that reward.functions names, and those of kind logprobs."""

    def __init__(self, config: Config, run_dir: Path | None = None) -> None:
        """Raises AuthError."""
        self._config = config
        self._columns = [n for n, s in config.scorers.by_name.items() if s.kind == "logprobs"]
        self._living = LivingScorers(config, run_dir)
        self.directed = self._living.set
        self.close = self._living.close

    async def rewards(
        self, made: GeneratedGroup, answer: Any, scores: Scores, functions: Functions
    ) -> Scores:
        """``scores`` with those of the scorers among ``functions``. Raises ScorerFailed."""
        named = {named_scorer(name): weight for name, weight in weights_of(functions).items()}
        weights = {name: weight for name, weight in named.items() if name is not None}
        if not weights:
            return scores
        names, began = list(weights), time.monotonic()
        items = [_item(made, number) for number in made.newest]
        replies = await all_or_none(self._ask(name, items, answer, "scores") for name in names)
        totals, components = list(scores.rewards), [dict(c) for c in scores.components]
        for name, numbers in zip(names, replies, strict=True):
            for index, number in enumerate(numbers):
                if not usable_reward(number):
                    raise _bad(name, f"returned the score {number}")
                components[index][PREFIX + name] = number
                totals[index] += weights[name] * number
        if not all(map(usable_reward, totals)):
            raise ScorerFailed(
                "scorer_error", "the weighted sum of the rewards is not finite or above 1e9"
            )
        seconds = scores.seconds + time.monotonic() - began
        return replace(scores, rewards=totals, components=components, seconds=seconds)

    async def columns(self, made: GeneratedGroup, answer: Any) -> dict[str, list[bytes]]:
        """By scorer: the bytes of each sequence's column. Raises ScorerFailed."""
        names = self._columns
        items = [_item(made, number) for number in range(len(made.completions))]
        replies = await all_or_none(self._ask(name, items, answer, "columns") for name in names)
        found: dict[str, list[bytes]] = {}
        for name, columns in zip(names, replies, strict=True):
            for item, column in zip(items, columns, strict=True):
                tokens = len(item.tokens)
                if len(column) != 4 * tokens:
                    raise _bad(name, f"returned {len(column) / 4:g} numbers for {tokens} tokens")
                if not np.isfinite(np.frombuffer(column, "<f4")).all():
                    raise _bad(name, "returned log-probs that are not finite")
            # Nothing predicts the first token of a path of its own.
            found[name] = [
                bytes(4 * (len(made.completions[number].tokens) - len(item.tokens))) + column
                for number, (item, column) in enumerate(zip(items, columns, strict=True))
            ]
        return found

    async def _ask(self, name: str, items: Sequence[_Item], answer: Any, field: str) -> list[Any]:
        """The field of all replies, with a value for each item."""
        requests = list(self._requests(name, items, answer))
        timeout_s = self._config.scorers.by_name[name].timeout_s
        replies = await all_or_none(scored(self._living, name, r, timeout_s) for r in requests)
        found: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            values, count = getattr(reply, field), len(request.completions)
            if len(values) != count:
                raise _bad(name, f"returned {len(values)} {field} for {count} completions")
            found += values
        return found

    def _requests(
        self, name: str, items: Sequence[_Item], answer: Any
    ) -> Iterator[scorer_pb2.ScoreRequest]:
        """Each has items of one prompt; those of all together are in their order."""
        most = self._config.scorers.by_name[name].batch_size
        for _, same_prompt in groupby(items, key=lambda item: id(item.prompt)):
            request, size = scorer_pb2.ScoreRequest(), 0
            for item in same_prompt:
                scored = scorer_pb2.ScoredCompletion(
                    tokens=token_bytes(item.tokens), text=item.text
                )
                size += scored.ByteSize()
                full = len(request.completions) >= most or size > REQUEST_BYTES
                if request.completions and full:
                    yield request
                    request, size = scorer_pb2.ScoreRequest(), scored.ByteSize()
                request.run, request.scorer = self._config.run.name, name
                request.prompt_tokens = token_bytes(item.prompt.tokens)
                request.prompt = item.prompt.text
                request.answer_json = "" if answer is None else json.dumps(answer)
                request.completions.append(scored)
            yield request


def _bad(name: str, detail: str) -> ScorerFailed:
    return ScorerFailed("scorer_error", f"scorer {name} {detail}")
