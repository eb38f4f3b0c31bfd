"""One call for scores: sent to a living scorer, repeated elsewhere if it fails, dies or is slow.

    living scorers ── least busy ──► call ──► reply
                        │ UNAVAILABLE, connection lost ──► pause it, ask another │ no longer living
                        ──────────────► give it up, ask another │ no reply for timeout_s ────────►
                        ask another as well; the first reply counts │ UNKNOWN
                        ───────────────────────► ask one other: its device may be at fault └ any
                        other status ──────────────► ScorerFailed: this attempt fails
    no living scorer ──► wait for one, however long: nobody's fault

A score has no side effect, so a request that reaches two scorers, or is answered twice, does no
harm: the first reply counts. A judge that samples may answer the second differently.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from paceline.process.waits import WaitKind, waiting
from paceline.v1 import scorer_pb2
from rollout_worker.failures import AttemptFailed
from rollout_worker.scorers.living_scorers import LivingScorer, LivingScorers

_ITS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses that another scorer would answer with, too."""
LOOK_S = 0.5
"""How often a call looks whether a paused scorer may be asked again."""


class ScorerFailed(AttemptFailed):
    """This attempt has no score. ``reason``: scorer_error."""


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
        """Those that have not answered in time, or were asked already."""
        self._broke_down = False
        """A scorer failed on it in a way that another one may not."""

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
        task.add_done_callback(lambda _: self._done(chosen))
        self._asked[task] = chosen

    @staticmethod
    def _done(scorer: LivingScorer) -> None:
        scorer.open_calls -= 1

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
            details = error.details() or error.code().name
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
