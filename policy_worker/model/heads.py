"""Heads over packed rows: log-probabilities of target tokens, and one number for each token.

Only positions that predict a target reach the language-model head. They do so in chunks, so that
vocabulary times tokens stays bounded: a chunk's logits are recomputed in the backward pass.

A transformers sequence classifier pools the last token of a padded sequence. Here its backbone runs
on a packed row, and its head on the hidden states that are asked for, always in float32: a value
that is rounded to bfloat16 loses the differences that an advantage is made of.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model_head import DEFAULT_CHUNK_MB, logits_of, tokens_per_chunk
from policy_worker.model.attention import MicroBatch
from policy_worker.objectives.columns import TokenScores


class Headless(ValueError):
    """A model without the head that it needs. The message is a reason for people."""


class _ScoresTokens:
    """Adds to a causal language model: called with ``microbatch``, it returns TokenScores. It is
    the model's own forward rather than a function beside it, so that wrappers which work by hooks
    on the root module (FSDP) see every call."""

    def forward(
        self: Any,
        *args: Any,
        microbatch: MicroBatch | None = None,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        routers: bool = False,
        chunk_mb: float = DEFAULT_CHUNK_MB,
        **kwargs: Any,
    ) -> Any:
        if microbatch is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        base = getattr(self, self.base_model_prefix)
        more = {"output_router_logits": True} if routers else {}
        output = forward_row(base, microbatch, **more)
        places = microbatch.predict_from
        chosen = output.last_hidden_state[0].index_select(0, places)
        head = partial(_score_chunk, self, temperature, entropy_gradient)
        scores = _score_in_chunks(self, head, chosen, microbatch.targets, chunk_mb)
        if not routers:
            return scores
        of_layers = tuple(logits.index_select(0, places) for logits in output.router_logits)
        return replace(scores, routers=of_layers)


def make_scorer(model: nn.Module) -> None:
    """Teaches ``model`` (a transformers causal LM) to score packed rows, in place. Raises Headless.
    ``rows.probe`` finds what its layers do with packed rows."""
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise Headless(f"{type(model).__name__} has no language-model head")
    _mix_in(_ScoresTokens, model)


def _mix_in(kind: type, model: nn.Module) -> None:
    # Same name: exports write it to config.json as the architecture.
    name = type(model).__name__
    model.__class__ = type(name, (kind, type(model)), {"__module__": __name__})


def forward_row(base: nn.Module, microbatch: MicroBatch, **more: Any) -> Any:
    """The output of a model without its head over the row."""
    return base(
        input_ids=microbatch.input_ids,
        position_ids=microbatch.position_ids,
        packing=microbatch.packing,
        use_cache=False,
        **more,
    )


def score(
    model: nn.Module, microbatch: MicroBatch, temperature: float, **settings: Any
) -> TokenScores:
    """TokenScores of the micro-batch's targets under ``model``, which make_scorer has prepared.
    ``entropy_gradient``: the entropy has a graph. ``routers``: with the logits of its experts'
    routers. ``chunk_mb``: most logits held at once, in MiB of float32; those of larger rows are
    computed in chunks, and again in the backward pass."""
    scores: TokenScores = model(microbatch=microbatch, temperature=temperature, **settings)
    return scores


_Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _score_in_chunks(
    model: Any, head: _Head, hidden: Tensor, targets: Tensor, chunk_mb: float
) -> TokenScores:
    rows = tokens_per_chunk(model.get_output_embeddings().weight.shape[0], chunk_mb)
    if len(targets) <= rows:
        logprobs, entropy = head(hidden, targets)
    else:
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        parts = [checkpoint(head, h, t, use_reentrant=False) for h, t in chunks]
        logprobs, entropy = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TokenScores(logprobs, entropy, logprobs.detach())


def _score_chunk(
    model: Any, temperature: float, entropy_gradient: bool, hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """hidden [c, D], targets int64 [c] -> log-probs and entropies, float32 [c]."""
    logits = logits_of(model, hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropy


HEAD = "score"


class _ScoresStates:
    """Adds to a sequence classifier: with ``microbatch`` it returns float32 [C]."""

    def forward(
        self: Any,
        *args: Any,
        microbatch: MicroBatch | None = None,
        at: Literal["token", "before"] = "token",
        **kwargs: Any,
    ) -> Any:
        if microbatch is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        base = getattr(self, self.base_model_prefix)
        hidden = forward_row(base, microbatch).last_hidden_state[0]
        rows = microbatch.predict_from if at == "before" else microbatch.token_at
        assert rows is not None  # RowForwards packs the last tokens for such a head
        with torch.autocast(hidden.device.type, enabled=False):
            return getattr(self, HEAD)(hidden.index_select(0, rows).float())[:, 0]


def make_value_head(model: nn.Module) -> None:
    """Teaches ``model`` (a classifier of one label) to score packed rows. Raises Headless."""
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
        name = type(model).__name__
        raise Headless(f"{name} has no linear head with one output, without bias")
    _mix_in(_ScoresStates, model)


def values(model: nn.Module, microbatch: MicroBatch, at: Literal["token", "before"]) -> Tensor:
    """float32 [C]: output of make_value_head()'s model for each completion token; see Part.at."""
    found: Tensor = model(microbatch=microbatch, at=at)
    return found
