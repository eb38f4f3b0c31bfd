"""A scorer behind a real gRPC server, whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from paceline.config.schema import Config
from paceline.v1 import worker_pb2
from scorer_worker.scorer import CompletionScorer, Item, Score
from scorer_worker.server import ScorerServer

TOKEN = "a-token-of-sixteen-or-more-characters"
Answer = Callable[[Sequence[Item]], Awaitable[list[Score]]]


class ScriptedScorer(CompletionScorer):
    """``async with`` starts and ends its server. ``asked``: completions of each request so far."""

    def __init__(
        self, config: Config, worker_id: str, answer: Answer, name: str = "helpful"
    ) -> None:
        self._answer, self.asked = answer, list[int]()
        self.was_asked = asyncio.Event()
        self.server = ScorerServer(config, name, self, TOKEN)
        self.directed = worker_pb2.Scorer(name=name, worker_id=worker_id)

    async def score(self, items: Sequence[Item]) -> list[Score]:
        self.asked.append(len(items))
        self.was_asked.set()
        return await self._answer(items)

    async def __aenter__(self) -> ScriptedScorer:
        self.directed.address = await self.server.start("127.0.0.1")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()


async def lengths(items: Sequence[Item]) -> list[Score]:
    """The number of tokens of each completion."""
    return [float(len(item.tokens)) for item in items]


async def never(items: Sequence[Item]) -> list[Score]:
    await asyncio.Event().wait()
    return []
