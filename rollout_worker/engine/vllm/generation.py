"""Requests of the vLLM engine: one vLLM request for each completion, and a report of the running
ones every N tokens: vLLM's own intermediate outputs do not contain the version of each token, and
cost a message each.

A completion that is continued from a prefix is drawn with other random numbers than an
uninterrupted one (``exact_continuation``); greedy completions are equal. The completions of a
request share their prefill through vLLM's prefix cache, in whole blocks. Cache entries are salted
with the version.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.process.structured_log import event, first_line
from paceline.process.threads import all_or_none
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    EngineDied,
    EngineError,
    EngineStats,
    Finish,
    GenerationFailed,
    OnPartial,
    Request,
    first_spans,
    merge_spans,
    token_count,
)
from rollout_worker.engine.stopping import Decode, begun, ended_by
from rollout_worker.engine.transformers.sampler import sample_keys
from rollout_worker.engine.vllm import adapters, internals
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.routes import with_routes

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0
_COUNT_S = 0.01  # Interval between two counts of tokens


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


class Generation:
    """Requests of one engine."""

    def __init__(
        self,
        client: VLLMClient,
        tokenizer: PromptTokenizer,
        slots: int,
        *,
        heal: Callable[[], Coroutine[Any, Any, None]],
        finished: Callable[[str], None],
    ) -> None:
        """``slots``: sequences that run at once. ``heal``: empties the cache of values that are not
        finite. ``finished``: called with a request's id for each of its completions."""
        self.salt = "0"  # Salt of the prefix cache's entries; a new one for each load of weights
        self.closed = False
        self._client, self._tokenizer, self._slots = client, tokenizer, slots
        self._heal, self._finished = heal, finished
        self._groups: dict[str, GroupRequest] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._every = 0
        self._report: OnPartial = lambda request, completions: None
        self._counting = False  # Running requests are being counted
        self._numbers = itertools.count(1)
        self._tokens = self._samples = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None

    async def begin(self) -> None:
        """Once vLLM has started."""
        # Asked now: otherwise vLLM asks during the first request, and an abort in the meantime
        # would find no request to end.
        self._tasks = await self._client.call(self._client.llm.get_supported_tasks())
        internals.quieten()
        self._adapter = adapters.request() if self._client.spec.slots else None
        self._ends = list(self._tokenizer.end_tokens)
        self._idle_since = time.monotonic()

    async def close(self) -> None:
        self.closed = True
        if self._groups:
            self._spawn(self.end_all())
        if self._background:
            await asyncio.wait(set(self._background), timeout=_CLOSE_S)

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        """Like Engine.generate, with whatever weights vLLM has."""
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is already running")
        group = self._groups[request.request_id] = GroupRequest(request)
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
        if self._every and not self._counting:
            self._counting = True
            self._spawn(self._count())
        try:
            completions = await all_or_none(self._complete(group, i) for i in range(request.count))
        finally:
            del self._groups[request.request_id]
            if not self._groups:
                self._idle_since = time.monotonic()
        if group.aborted:
            raise Aborted(request.request_id, tuple(completions))
        return tuple(c for c in completions if c is not None)

    async def _complete(self, group: GroupRequest, index: int) -> Completion | None:
        """One completion of the request. None: aborted without a token."""
        request, params = group.request, group.request.params
        so_far = request.prefix(index)
        whole = complete(so_far, params.max_tokens)
        while whole is None:
            if group.aborted:
                return so_far
            output, prefix = await self._run(group, index, so_far), so_far
            self._tokens += len(output.token_ids)
            try:
                so_far = join(prefix, output, params.stop, self._tokenizer.decode_all)
            except GenerationFailed:
                self._spawn(self._heal())
                raise
            if so_far is not None and (layers := self._client.spec.routed):
                prompt = len(request.prompt_tokens)
                so_far = with_routes(so_far, prefix, output.routed_experts, prompt, layers)
            # Aborted, or ended by a swap before its first token arrived: it restarts under the new
            # version. Or no stop string came of what its prefix had begun: it goes on.
            if so_far is not None and so_far.finish is Finish.LENGTH:
                so_far = replace(so_far, finish=Finish.PARTIAL)
            whole = complete(so_far, params.max_tokens)
        self._samples += 1
        group.done[index] = whole
        self._finished(request.request_id)
        return whole

    async def _run(self, group: GroupRequest, index: int, prefix: Completion | None) -> Any:
        """One vLLM request, to its end. Returns its CompletionOutput, with routes if they are asked
        for."""
        request, key = group.request, group.keys[index]
        name = f"{request.request_id}#{index}.{next(self._numbers)}"
        if prefix is not None:
            have = len(prefix.tokens)
            tokens = np.concatenate([request.prompt_tokens, prefix.tokens])
            most = request.params.max_tokens - have
            # vLLM sees no stop string that the prefix has begun: these tokens are looked at here.
            stops = request.params.stop
            looked_at = begun(stops, prefix.tokens, self._tokenizer.decode_all)
            prepared = self._prepared(request, tokens, min(most, looked_at or most))
            # Not the random numbers that the prefix was drawn with.
            (key,) = sample_keys(key, np.array([have])).tolist()
        else:
            if group.fresh[0] != self.salt:
                fresh = self._prepared(request, request.prompt_tokens, request.params.max_tokens)
                group.fresh = self.salt, fresh
            prepared = group.fresh[1]
        # vLLM takes seeds of 63 bits.
        seed = None if request.params.greedy else key >> 1
        asked = internals.another(prepared, name, seed)
        group.running[index] = name, prefix
        try:
            async for output in self._client.llm.generate(asked, asked.sampling_params, name):
                last = output
        except Exception as error:
            raise self._client.error(error) from error
        finally:
            del group.running[index]
        output, spec = last.outputs[0], self._client.spec
        if spec.routed and spec.ranks_note and output.token_ids:
            output.routed_experts = await self._noted(name)
        return output

    async def _noted(self, name: str) -> NDArray[np.int16] | None:
        """The first rank's notes. All ranks have the same."""
        first, *_ = await self._client.ranks("paceline_routes", name)
        return None if first is None else np.frombuffer(first[1], np.int16).reshape(first[0])

    def _prepared(self, request: Request, tokens: NDArray[np.int32], most: int) -> Any:
        """vLLM's request for ``most`` tokens of a completion."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        prompt, given = tokens_input(tokens.tolist(), cache_salt=self.salt), request.params
        drawn = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
        try:
            params = SamplingParams(
                max_tokens=most,
                **({"temperature": 0.0} if given.greedy else {**drawn, "seed": 0}),
                stop=list(given.stop),
                stop_token_ids=self._ends,
                # Stop strings may contain special tokens.
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                detokenize=bool(given.stop),
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm = self._client.llm
            return internals.prepared(llm, prompt, params, self._tasks, self._adapter)
        except Exception as error:
            failure = self._client.error(error)
            if self.closed or isinstance(failure, EngineDied):
                raise failure from error
            # vLLM's front end refused this one request; the engine goes on.
            raise GenerationFailed(str(failure)) from error

    def abort(self, request_id: str) -> None:
        if (group := self._groups.get(request_id)) is not None:
            self._spawn(self._end([group]))

    def end_all(self) -> Coroutine[Any, Any, None]:
        """Like abort(), for every running request. Returns the call that ends them."""
        return self._end(self._groups.values())

    def _end(self, groups: Collection[GroupRequest]) -> Coroutine[Any, Any, None]:
        """Marks groups as aborted. Returns the call that ends their vLLM requests."""
        for group in groups:
            group.aborted = True
        names = [name for group in groups for name, _ in group.running.values()]
        return self._client.call(self._client.llm.abort(names))

    def watch(self, every: int, report: OnPartial) -> None:
        self._every, self._report = every, report

    async def _count(self) -> None:
        """Counts tokens and reports requests until none runs."""
        try:
            while self._groups and self._client.llm is not None:
                live = {internals.name_of(s): s for s in internals.states(self._client.llm)}
                for group in self._groups.values():
                    self._report_if_due(group, live)
                await asyncio.sleep(_COUNT_S)
        finally:
            self._counting = False

    def _report_if_due(self, group: GroupRequest, live: Mapping[str, Any]) -> None:
        counts = {
            index: token_count(prefix) + internals.tokens_so_far(live[name])
            for index, (name, prefix) in group.running.items()
            if name in live
        }
        if all(count - group.reported[index] < self._every for index, count in counts.items()):
            return
        request = group.request
        so_far = [group.done.get(i, request.prefix(i)) for i in range(request.count)]
        try:
            for index in counts:
                name, prefix = group.running[index]
                output = internals.so_far(live[name])
                so_far[index] = join(
                    prefix, output, request.params.stop, self._tokenizer.decode_all
                )
        except GenerationFailed:
            # The request itself is about to fail with it.
            return
        group.reported |= counts
        self._report(request, tuple(so_far))

    def stats(self) -> EngineStats:
        """Without swaps."""
        llm, since = self._client.llm, self._idle_since
        unfinished = [] if llm is None else list(internals.states(llm))
        return EngineStats(
            tokens=self._tokens + sum(map(internals.tokens_so_far, unfinished)),
            samples=self._samples,
            running=min(len(unfinished), self._slots),
            waiting=max(0, len(unfinished) - self._slots),
            idle_s=self._idle_s + (time.monotonic() - since if since is not None else 0.0),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def over(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            # The requests concerned fail by themselves.
            if not task.cancelled() and (error := task.exception()) is not None:
                event(logger, "background work failed", logging.WARNING, error=first_line(error))

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(over)


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


def complete(so_far: Completion | None, max_tokens: int) -> Completion | None:
    """The completion, if nothing is to be appended to it; else None."""
    if so_far is None or so_far.finish is not Finish.PARTIAL:
        return so_far
    return replace(so_far, finish=Finish.LENGTH) if len(so_far.tokens) >= max_tokens else None


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
