"""Living scorers: those that the newest directive names, with a channel to each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from paceline.config.schema import Config
from paceline.rpc.auth import client_root, worker_token
from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_channel
from paceline.v1 import scorer_pb2, worker_pb2

SCORE = METHODS["ScorerService.Score"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Before a scorer that failed is asked again."""


@dataclass(eq=False)
class LivingScorer:
    """One scorer worker. ``gone`` is set once it is no longer among the living."""

    name: str
    worker_id: str
    address: str
    channel: grpc.aio.Channel
    open_calls: int = 0
    not_before: float = 0.0
    """Monotonic time until which it is not asked, because it failed."""
    trouble: str = ""
    """Why it failed last."""
    pause_s: float = FIRST_PAUSE_S
    gone: asyncio.Event = field(default_factory=asyncio.Event)

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
            channel = open_channel(key[2], tls_ca=self._root, max_message_mb=self._limit_mb)
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


_closings: set[asyncio.Future[None]] = set()
"""Kept from the garbage collector until they are done."""
