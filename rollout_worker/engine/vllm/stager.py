"""Staging of new weights on every rank while the engine runs.

stage ──► paceline_stage on each rank (returns at once) ──► a datagram from each ──► done
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from dataclasses import dataclass, field

from rollout_worker.engine.base import SwapFailed
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.shared_weights import SharedWeights

_STAGE_S = 600.0
"""Longest wait for the ranks. Seconds."""


@dataclass(slots=True)
class _Open:
    done: asyncio.Future[None]
    missing: set[int]
    """Ranks that have not answered."""
    errors: list[str] = field(default_factory=list)


class Stager:
    """Create it in the event loop, once the engine is started."""

    def __init__(self, client: VLLMClient, limit_s: float = _STAGE_S) -> None:
        self._client = client
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[str, int], _Open] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # An abstract address: no file is left behind, however this process ends. It is written with "@"
        # because not every message encoding preserves its zero byte.
        self._address = f"@paceline-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind("\0" + self._address[1:])
        self._loop.add_reader(self._socket.fileno(), self._on_answer)

    async def stage(self, weights: SharedWeights) -> None:
        """Returns once every rank has staged the weights. Raises SwapFailed, and then no rank keeps
        them; EngineError if the engine has ended."""
        token = secrets.token_hex(16)
        opened = _Open(self._loop.create_future(), set(range(self._client.spec.ranks)))
        self._open[token, weights.key] = opened
        try:
            await self._client.ranks(
                "paceline_stage", weights.key, weights.describe(), self._address, token
            )
            async with asyncio.timeout(self._limit_s):
                await self._client.unless_dead(opened.done)
        except TimeoutError:
            opened.errors.append(f"ranks {sorted(opened.missing)} did not answer")
        finally:
            del self._open[token, weights.key]
        if opened.errors:
            await self._client.ranks("paceline_drop", weights.key)
            raise SwapFailed(f"weights {weights.version} not staged: {opened.errors[0]}")

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _on_answer(self) -> None:
        try:
            answer = json.loads(self._socket.recv(1 << 16))
            opened = self._open[answer["token"], answer["key"]]
            rank, error = int(answer["rank"]), str(answer["error"])
        except (BlockingIOError, ValueError, KeyError, TypeError):
            # Any process on this machine may write to the address; only the ranks know the token.
            return
        opened.missing.discard(rank)
        if error:
            opened.errors.append(f"rank {rank}: {error}")
        if not opened.missing and not opened.done.done():
            opened.done.set_result(None)
