"""Completions from vLLM's outputs, and reports of running requests every N tokens: vLLM's own
intermediate outputs do not contain the version of each token, and cost a message each."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout_worker.engine.base import (
    Completion,
    Finish,
    GenerationFailed,
    OnPartial,
    Request,
    first_spans,
    merge_spans,
    token_count,
)
from rollout_worker.engine.stopping import Decode, ended_by
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.engine.vllm import internals
from rollout_worker.engine.vllm.client import VLLMClient


@dataclass(slots=True)
class GroupRequest:
    """One request and the names of the vLLM requests that make its completions."""

    request: Request
    aborted: bool = False
    running: dict[int, tuple[str, Completion | None]] = field(default_factory=dict)
    """By completion: the running vLLM request, and the prefix it started from."""
    done: dict[int, Completion] = field(default_factory=dict)
    reported: dict[int, int] = field(init=False)
    """Tokens of each completion at the group's last report, at first of its prefix."""
    fresh: tuple[str, Any] = ("", None)  # Salt and vLLM request of a completion without a prefix
    keys: list[int] = field(init=False)  # Seed of each completion, 64 bits

    def __post_init__(self) -> None:
        request, numbers = self.request, range(self.request.count)
        self.keys = sample_keys(request.params.seed, np.array(numbers)).tolist()
        self.reported = {index: token_count(request.prefix(index)) for index in numbers}


_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.PARTIAL}


def join(
    prefix: Completion | None, output: Any, stop: tuple[str, ...], decode: Decode
) -> Completion | None:
    """The prefix with vLLM's tokens appended; None if there is no token at all. ``output``: a
    finished CompletionOutput with flat log-probs. Raises GenerationFailed if a log-probability is
    not finite or vLLM ended the sequence with an error."""
    if output.finish_reason not in _FINISH:
        raise GenerationFailed(f"vLLM ended a sequence with {output.finish_reason!r}")
    tokens = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array(output.logprobs.logprobs if len(tokens) else [], dtype=np.float32)
    if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
        raise GenerationFailed("the model's logits are not finite")
    spans = [(int(s.version), s.end - s.start) for s in output.weight_versions or ()]
    finish = _FINISH[output.finish_reason]
    stopped_by = output.stop_reason if isinstance(output.stop_reason, str) else None
    if prefix is not None:
        tokens = np.concatenate([prefix.tokens, tokens])
        logprobs = np.concatenate([prefix.logprobs, logprobs])
        spans = [*prefix.versions, *spans]
    elif not len(tokens):
        return None
    whole = Completion(tokens, logprobs, merge_spans(spans), finish, stopped_by)
    if prefix is None or not stop:
        return whole
    start = len(prefix.tokens)
    # A stop string that began in the prefix cannot reach further.
    return _cut(whole, start, start + max(len(s.encode()) for s in stop), stop, decode)


def complete(
    prefix: Completion | None, max_tokens: int, stop: tuple[str, ...], decode: Decode
) -> Completion | None:
    """The prefix, if nothing is to be appended to it; else None. The prefix may have run past a
    stop string: its worker's vLLM did not see a stop string that began in an even earlier worker's
    tokens."""
    if prefix is None or prefix.finish is not Finish.PARTIAL:
        return prefix
    text = decode(prefix.tokens.tolist()) if stop else ""
    if any(s in text for s in stop):
        prefix = _cut(prefix, 0, len(prefix.tokens), stop, decode)
    if prefix.finish is Finish.PARTIAL and len(prefix.tokens) >= max_tokens:
        return replace(prefix, finish=Finish.LENGTH)
    return None if prefix.finish is Finish.PARTIAL else prefix


def _cut(
    completion: Completion, start: int, reach: int, stop: tuple[str, ...], decode: Decode
) -> Completion:
    """Ends the completion at the first stop string that a token after ``start`` and up to ``reach``
    completes: vLLM sees only the tokens that it made itself."""
    for end in range(start + 1, min(len(completion.tokens), reach) + 1):
        if (found := ended_by(stop, completion.tokens[:end], decode)) is not None:
            return Completion(
                completion.tokens[:end],
                completion.logprobs[:end],
                first_spans(completion.versions, end),
                Finish.STOP,
                found,
            )
    return completion


_COUNT_S = 0.01  # Interval between two counts of tokens


@dataclass
class ProgressReporter:
    groups: Mapping[str, GroupRequest]  # The running ones, by request id; the engine changes it
    client: VLLMClient
    decode_text: Decode
    every: int
    report: OnPartial
    _watching: bool = False

    async def watch(self) -> None:
        """Counts tokens and reports requests until none runs. A second call returns at once."""
        if self._watching:
            return
        self._watching = True
        try:
            while self.groups and self.client.llm is not None:
                live = {internals.name_of(s): s for s in internals.states(self.client.llm)}
                for group in self.groups.values():
                    self._report_if_due(group, live)
                await asyncio.sleep(_COUNT_S)
        finally:
            self._watching = False

    def _report_if_due(self, group: GroupRequest, live: Mapping[str, Any]) -> None:
        counts = {
            index: token_count(prefix) + internals.tokens_so_far(live[name])
            for index, (name, prefix) in group.running.items()
            if name in live
        }
        if all(count - group.reported[index] < self.every for index, count in counts.items()):
            return
        request = group.request
        so_far = [group.done.get(i, request.prefix(i)) for i in range(request.count)]
        try:
            for index in counts:
                name, prefix = group.running[index]
                output = internals.so_far(live[name])
                so_far[index] = join(prefix, output, request.params.stop, self.decode_text)
        except GenerationFailed:
            # The request itself is about to fail with it.
            return
        group.reported |= counts
        self.report(request, tuple(so_far))
