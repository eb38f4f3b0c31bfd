"""Reports of running requests, every N tokens. vLLM's own intermediate outputs do not contain the
version of each token, and cost a message each."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine.base import Completion, Finish, GenerationFailed, OnPartial, token_count
from rollout_worker.engine.stopping import Decode
from rollout_worker.engine.vllm import internals
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.outputs import GroupRequest, join

_LEAST_S, _MOST_S = 0.01, 0.05
"""Limits of the interval between two counts of tokens. The upper one bounds the delay of a report
after sequences suddenly grow faster."""
_FAST = 10_000.0
"""Tokens/s of a sequence until it is measured: high, so that tokens are counted often at first."""


@dataclass
class ProgressReporter:
    groups: Mapping[str, GroupRequest]  # The running ones, by request id; the engine changes it
    client: VLLMClient
    decode_text: Decode
    every: int
    report: OnPartial
    _watching: bool = False
    _rate: float = _FAST  # Recent tokens/s of the fastest sequence

    async def watch(self) -> None:
        """Counts tokens and reports requests until none runs. A second call returns at once."""
        if self._watching:
            return
        self._watching = True
        pause, before, counted_at = _LEAST_S, dict[str, int](), time.monotonic()
        try:
            while self.groups:
                await asyncio.sleep(pause)
                llm = self.client.llm
                if llm is None:
                    return
                live = {internals.name_of(s): s for s in internals.states(llm)}
                counts = {name: internals.tokens_so_far(s) for name, s in live.items()}
                missing = self.every
                for group in list(self.groups.values()):
                    missing = min(missing, await self._report_if_due(group, live, counts))
                now = time.monotonic()
                grown = max((n - before.get(name, 0) for name, n in counts.items()), default=0)
                if grown:
                    self._rate = max(grown / (now - counted_at), 0.95 * self._rate)
                # After half the time that the fastest sequence needs for the missing tokens:
                # counting costs more with more sequences.
                ahead = missing / self._rate / 2 if grown else _LEAST_S
                pause, before, counted_at = min(max(ahead, _LEAST_S), _MOST_S), counts, now
        finally:
            self._watching = False

    async def _report_if_due(
        self, group: GroupRequest, live: Mapping[str, Any], tokens: Mapping[str, int]
    ) -> int:
        """Returns the number of tokens missing until the next report of this group."""
        counts = {
            index: token_count(prefix) + tokens[name]
            for index, (name, prefix) in group.running.items()
            if name in live
        }
        news = max((count - group.reported[index] for index, count in counts.items()), default=0)
        if news < self.every:
            return self.every - news
        completions: list[Completion | None] = []
        straddled = []
        try:
            for index in range(group.request.count):
                completion = group.done.get(index, group.request.prefix(index))
                if index in counts:
                    name, prefix = group.running[index]
                    output = internals.so_far(live[name])
                    stop = group.request.params.stop
                    completion = join(prefix, output, stop, self.decode_text)
                    if completion is not None and completion.finish is Finish.STOP:
                        # The stop string began in the prefix: vLLM itself would go on.
                        straddled.append(name)
                completions.append(completion)
        except GenerationFailed:
            # The request itself is about to fail with it.
            return self.every
        group.reported |= counts
        self.report(group.request, tuple(completions))
        if straddled:
            await self.client.llm.abort(straddled)
        return self.every
