"""One call for scores: sent to a living scorer, repeated elsewhere if it fails, dies or is slow.

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
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from paceline.config.schema import Config
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.auth import client_root, worker_token
from paceline.rpc.client import call_error
from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_channel
from paceline.v1 import scorer_pb2, worker_pb2
from rollout_worker.rewards.score import AttemptFailed

SCORE = METHODS["ScorerService.Score"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # Before a scorer that failed is asked again


@dataclass(eq=False)
class LivingScorer:
    """One scorer worker. ``gone`` is set once it is no longer among the living."""

    name: str
    worker_id: str
    address: str
    channel: grpc.aio.Channel
    open_calls: int = 0
    not_before: float = 0.0  # Monotonic time until which it is not asked, because it failed
    trouble: str = ""  # Reason of the last failure
    pause_s: float = FIRST_PAUSE_S
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def over(self, call: object) -> None:
        self.open_calls -= 1

    def failed(self, now: float, why: str) -> None:
        self.trouble, self.not_before = why, now + self.pause_s
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
        self.changed = asyncio.Event()

    def set(self, directed: Iterable[worker_pb2.Scorer]) -> None:
        """``directed``: of a directive. A process that was started again has another address."""
        wanted = {(one.name, one.worker_id, one.address) for one in directed}
        if wanted == self._living.keys():
            return
        for key in self._living.keys() - wanted:
            self._remove(key)
        for key in sorted(wanted - self._living.keys()):
            channel = open_channel(
                key[2], self._token, tls_ca=self._root, max_message_mb=self._limit_mb
            )
            self._living[key] = LivingScorer(*key, channel)
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    def of(self, name: str) -> list[LivingScorer]:
        return [one for one in self._living.values() if one.name == name]

    async def ask(
        self, scorer: LivingScorer, request: scorer_pb2.ScoreRequest
    ) -> scorer_pb2.ScoreReply:
        """One call without a time limit. Raises grpc.aio.AioRpcError."""
        method = bind_method(scorer.channel, SCORE)
        reply: scorer_pb2.ScoreReply = await method(request, metadata=call_metadata(self._token))
        return reply

    async def close(self) -> None:
        channels = [one.channel for one in self._living.values()]
        self._living.clear()
        for channel in channels:
            await channel.close()

    def _remove(self, key: tuple[str, str, str]) -> None:
        scorer = self._living.pop(key)
        scorer.gone.set()
        closing = asyncio.ensure_future(scorer.channel.close())
        _closings.add(closing)
        closing.add_done_callback(_closings.discard)


_closings: set[asyncio.Future[None]] = set()  # Kept from the garbage collector until they are done


_ITS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)  # Statuses that another scorer would answer with, too
LOOK_S = 0.5  # How often a call looks whether a paused scorer may be asked again


class ScorerFailed(AttemptFailed):
    """The attempt has no score. ``reason``: scorer_error."""


class ScoreCall:
    def __init__(
        self, living: LivingScorers, name: str, request: scorer_pb2.ScoreRequest, timeout_s: float
    ) -> None:
        """``timeout_s``: after this time another scorer is asked as well."""
        self._living, self._name, self._request = living, name, request
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._asked: dict[asyncio.Task[scorer_pb2.ScoreReply], LivingScorer] = {}
        self._ask_more_at = 0.0
        self._slow: set[LivingScorer] = set()
        """Scorers that have not answered in time, or were asked already."""
        self._broke_down = False  # A scorer failed on it in a way that another one may not

    async def reply(self) -> scorer_pb2.ScoreReply:
        """Waits for a scorer without limit. Raises ScorerFailed."""
        try:
            while True:
                self._ask()
                if (found := await self._answer()) is not None:
                    return found
        finally:
            for task in self._asked:
                task.cancel()

    def _ask(self) -> None:
        """Sends the request to one more scorer if none has it, or if all that have it are slow."""
        now = time.monotonic()
        if self._asked and now < self._ask_more_at:
            return
        having = set(self._asked.values())
        able = [s for s in self._living.of(self._name) if s not in having and s.not_before <= now]
        if not able:
            return
        chosen = min(able, key=lambda s: (s in self._slow, s.open_calls, s.worker_id))
        self._slow.add(chosen)
        self._ask_more_at = now + self._timeout_s
        chosen.open_calls += 1
        task = asyncio.ensure_future(self._living.ask(chosen, self._request))
        task.add_done_callback(chosen.over)
        self._asked[task] = chosen

    async def _answer(self) -> scorer_pb2.ScoreReply | None:
        """Waits for a reply, for a change of the living, or a while. Raises ScorerFailed."""
        changed = asyncio.ensure_future(self._living.changed.wait())
        try:
            what = self._what()
            with waiting(WaitKind.SCORER, what, self._name, since=self._began):
                await asyncio.wait(
                    {*self._asked, changed},
                    timeout=LOOK_S if self._living.of(self._name) else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            changed.cancel()
        for task, scorer in list(self._asked.items()):
            if task.done():
                del self._asked[task]
                if (found := self._result(task, scorer)) is not None:
                    return found
            elif scorer.gone.is_set():
                del self._asked[task]
                task.cancel()
        return None

    def _result(
        self, task: asyncio.Task[scorer_pb2.ScoreReply], scorer: LivingScorer
    ) -> scorer_pb2.ScoreReply | None:
        """The reply; None if another scorer is to be asked. Raises ScorerFailed."""
        try:
            found = task.result()
        except grpc.aio.AioRpcError as error:
            details = call_error(error)
            if error.code() in _ITS_FAULT or self._is_last_hope(error, scorer):
                raise ScorerFailed(
                    "scorer_error", f"scorer {self._name} ({scorer.worker_id}): {details}"
                ) from None
            scorer.failed(time.monotonic(), details)
            return None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # Its channel was closed, because it is no longer among the living.
            return None
        scorer.answered()
        return found

    def _is_last_hope(self, error: grpc.aio.AioRpcError, scorer: LivingScorer) -> bool:
        """Its scorer broke down, and there is no other one, or one broke down before."""
        if error.code() is not grpc.StatusCode.UNKNOWN:
            return False
        others = [other for other in self._living.of(self._name) if other is not scorer]
        last = self._broke_down or not others
        self._broke_down = True
        return last

    def _what(self) -> str:
        living = self._living.of(self._name)
        if not living:
            return f"waiting for scorer {self._name}: none is alive"
        if self._asked:
            ids = ", ".join(sorted(scorer.worker_id for scorer in self._asked.values()))
            return f"waiting for scorer {self._name} ({ids})"
        why = next((s.trouble for s in living if s.trouble), "it is asked again soon")
        return f"waiting for scorer {self._name}: {why}"
