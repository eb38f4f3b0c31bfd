"""Has every rank got the new weights ready? Asked beside the running engine.

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
    """To be made inside the event loop, once the engine is started."""

    def __init__(self, client: VLLMClient, limit_s: float = _STAGE_S) -> None:
        self._client = client
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[str, int], _Open] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # An abstract address: no file is left behind, however this process ends. Written with "@",
        # as its zero byte does not survive every message encoding.
        self._address = f"@paceline-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind("\0" + self._address[1:])
        self._loop.add_reader(self._socket.fileno(), self._on_answer)

    async def stage(self, segment: SharedWeights) -> None:
        """Returns once every rank has it ready. Raises SwapFailed, then none keeps it, and
        EngineError where the engine has ended."""
        token = secrets.token_hex(16)
        opened = _Open(self._loop.create_future(), set(range(self._client.facts.ranks)))
        self._open[token, segment.key] = opened
        try:
            await self._client.ranks(
                "paceline_stage", segment.key, segment.describe(), self._address, token
            )
            async with asyncio.timeout(self._limit_s):
                await self._client.unless_dead(opened.done)
        except TimeoutError:
            opened.errors.append(f"ranks {sorted(opened.missing)} did not answer")
        finally:
            del self._open[token, segment.key]
        if opened.errors:
            await self._client.ranks("paceline_drop", segment.key)
            raise SwapFailed(f"weights {segment.version} not staged: {opened.errors[0]}")

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _on_answer(self) -> None:
        try:
            answer = json.loads(self._socket.recv(1 << 16))
            opened = self._open[answer["token"], answer["key"]]
            rank, error = int(answer["rank"]), str(answer["error"])
        except (BlockingIOError, ValueError, KeyError, TypeError):
            # Anybody on this machine may write to the address; only the ranks know the token.
            return
        opened.missing.discard(rank)
        if error:
            opened.errors.append(f"rank {rank}: {error}")
        if not opened.missing and not opened.done.done():
            opened.done.set_result(None)
