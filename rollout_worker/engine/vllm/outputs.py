"""Completions from vLLM's outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rollout_worker.engine.base import Completion, Finish, GenerationFailed, Spans, merge_spans
from rollout_worker.engine.stopping import Decode, ended_by

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.PARTIAL}


def join(
    prefix: Completion | None, output: Any, stop: tuple[str, ...], decode: Decode
) -> Completion | None:
    """The prefix with vLLM's tokens appended; None if there is no token at all.

    ``output``: a finished CompletionOutput with flat log-probs. Raises GenerationFailed if a
    log-probability is not finite or vLLM ended the sequence with an error.
    """
    if output.finish_reason not in _FINISH:
        raise GenerationFailed(f"vLLM ended a sequence with {output.finish_reason!r}")
    tokens = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array(output.logprobs.logprobs if len(tokens) else [], dtype=np.float32)
    if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
        raise GenerationFailed("the model's logits are not finite")
    spans = [(int(s.version), s.end - s.start) for s in output.weight_versions or ()]
    finish = _FINISH[output.finish_reason]
    found = output.stop_reason if isinstance(output.stop_reason, str) else None
    if prefix is not None:
        tokens = np.concatenate([prefix.tokens, tokens])
        logprobs = np.concatenate([prefix.logprobs, logprobs])
        spans = [*prefix.versions, *spans]
    elif not len(tokens):
        return None
    whole = Completion(tokens, logprobs, merge_spans(spans), finish, found)
    if prefix is None or not stop:
        return whole
    start = len(prefix.tokens)
    # A stop string that began in the prefix cannot reach further.
    return _cut(whole, start, start + max(len(s.encode()) for s in stop), stop, decode)


def complete(
    prefix: Completion | None, max_tokens: int, stop: tuple[str, ...], decode: Decode
) -> Completion | None:
    """The prefix, if nothing is to be appended to it; else None.

    The prefix may have run past a stop string: its worker's vLLM did not see a stop string that
    began in an even earlier worker's tokens.
    """
    if prefix is None:
        return None
    if prefix.finish is Finish.PARTIAL and stop:
        text = decode(prefix.tokens.tolist())
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
                _first(completion.versions, end),
                Finish.STOP,
                found,
            )
    return completion


def _first(spans: Spans, count: int) -> Spans:
    kept = []
    for version, length in spans:
        if count > 0:
            kept.append((version, min(length, count)))
        count -= length
    return tuple(kept)
