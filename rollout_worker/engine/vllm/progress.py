"""Reports what running requests have so far, every so many tokens.

vLLM's own intermediate outputs do not say which version made which token, and cost a message each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rollout_worker.engine.base import Completion, Finish, GenerationFailed, OnPartial
from rollout_worker.engine.stopping import Decode
from rollout_worker.engine.vllm import internals
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.outputs import join
from rollout_worker.engine.vllm.request import GroupRequest

_LEAST_S, _MOST_S = 0.01, 0.05
"""Between two looks. The least is less than a step of any model that takes long enough for it; the most
bounds how late a report may be once sequences suddenly grow faster."""
_FAST = 10_000.0
"""Tokens a second of a sequence, until it is known better: looked at often at first."""


class ProgressReporter:
    """``groups``: those that run, by request id; changes meanwhile."""

    def __init__(
        self,
        groups: Mapping[str, GroupRequest],
        client: VLLMClient,
        decode_text: Decode,
        every: int,
        report: OnPartial,
    ) -> None:
        self._groups = groups
        self._client = client
        self._decode_text = decode_text
        self._every = every
        self._report = report
        self._looking = False
        self._rate = _FAST
        """Tokens a second of the fastest sequence, of late."""

    async def look(self) -> None:
        """Counts the tokens of running sequences as long as there are any, and reports those due.
        Returns at once where that is being done."""
        if self._looking:
            return
        self._looking = True
        pause, before, looked = _LEAST_S, dict[str, int](), time.monotonic()
        try:
            while self._groups:
                await asyncio.sleep(pause)
                llm = self._client.llm
                if llm is None:
                    return
                live = {internals.name_of(s): s for s in internals.states(llm)}
                counts = {name: internals.tokens_so_far(s) for name, s in live.items()}
                missing = self._every
                for group in list(self._groups.values()):
                    missing = min(missing, await self._tell_if_due(group, live, counts))
                now = time.monotonic()
                grown = max((n - before.get(name, 0) for name, n in counts.items()), default=0)
                if grown:
                    self._rate = max(grown / (now - looked), 0.95 * self._rate)
                # At half the time that the fastest needs for what is missing: looking costs more
                # the more sequences there are.
                ahead = missing / self._rate / 2 if grown else _LEAST_S
                pause, before, looked = min(max(ahead, _LEAST_S), _MOST_S), counts, now
        finally:
            self._looking = False

    async def _tell_if_due(
        self, group: GroupRequest, live: Mapping[str, Any], tokens: Mapping[str, int]
    ) -> int:
        """How many tokens are missing until the next report of this group."""
        prefixes = group.request.prefixes
        counts: dict[int, int] = {}
        for index, (name, prefix) in group.running.items():
            if index not in group.done and name in live:
                had = 0 if prefix is None else len(prefix.tokens)
                counts[index] = had + tokens[name]
            begun = prefixes[index] if prefixes else None
            group.told.setdefault(index, 0 if begun is None else len(begun.tokens))
        news = max((count - group.told[index] for index, count in counts.items()), default=0)
        if news < self._every:
            return self._every - news
        samples: list[Completion | None] = []
        straddled = []
        try:
            for index in range(group.request.count):
                name, prefix = group.running.get(index, ("", prefixes[index] if prefixes else None))
                sample = group.done.get(index, prefix)
                if index in counts:
                    output = internals.so_far(live[name])
                    sample = join(prefix, output, group.request.params.stop, self._decode_text)
                    if sample is not None and sample.finish is Finish.STOP:
                        # It straddles two owners' tokens: vLLM itself would go on.
                        straddled.append(name)
                samples.append(sample)
        except GenerationFailed:
            # The request is about to be told so itself.
            return self._every
        group.told |= counts
        self._report(group.request, tuple(samples))
        if straddled:
            await self._client.llm.abort(straddled)
        return self._every
