"""Heads over packed rows: log-probabilities of target tokens, and one number for each token.

Only positions that predict a target reach the language-model head. They do so in chunks, so that
vocabulary times tokens stays bounded. torch's own linear_cross_entropy and others like it give no
entropy, and its gradient needs the logits a third time.

A transformers sequence classifier pools the last token of a padded sequence. Here its backbone runs
on a packed row, and its head on the hidden states that are asked for, always in float32: a value
that is rounded to bfloat16 loses the differences that an advantage is made of.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.model_head import DEFAULT_CHUNK_MB, logits_of, mix_in, tokens_per_chunk
from paceline.process.structured_log import event, first_line
from policy_worker.model.attention import MicroBatch
from policy_worker.objectives.columns import TokenScores

log = logging.getLogger(__name__)

COMPILED = "_compiles"
"""Attribute of a model whose head is compiled, too."""


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
        head = self.get_output_embeddings()
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        rows = tokens_per_chunk(head.weight.shape[0], chunk_mb)
        given = (temperature, entropy_gradient), rows, microbatch.targets, chosen, *weights
        logprobs, entropy = _TokenScores.apply(self, *given)
        scores = TokenScores(logprobs, entropy, logprobs.detach())
        if not routers:
            return scores
        of_layers = tuple(logits.index_select(0, places) for logits in output.router_logits)
        return replace(scores, routers=of_layers)


def make_scorer(model: nn.Module) -> None:
    """Teaches ``model`` (a transformers causal LM) to score packed rows, in place. Raises Headless.
    ``rows.probe`` finds what its layers do with packed rows."""
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise Headless(f"{type(model).__name__} has no language-model head")
    mix_in(_ScoresTokens, model)


def forward_row(base: nn.Module, microbatch: MicroBatch, **more: Any) -> Any:
    """The output of a model without its head over the row."""
    # transformers takes a mask of four dimensions as it is. Without one, it asks the device in each
    # row if this is a packed one, and waits for the answer.
    no_mask = microbatch.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
    return base(
        input_ids=microbatch.input_ids,
        position_ids=microbatch.position_ids,
        attention_mask=no_mask,
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


class _TokenScores(torch.autograd.Function):  # type: ignore[misc]
    """Log-probs and entropies [C] of targets [C], by chunks of ``rows`` hidden states [C, D].

    Logits are not kept, except of a row that is one chunk: the backward pass computes them again,
    and their gradient in closed form, with the entropy that the forward pass has found."""

    @staticmethod
    def forward(
        ctx: Any,
        model: Any,
        settings: tuple[float, bool],
        rows: int,
        targets: Tensor,
        hidden: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``settings``: the temperature, and True if the entropy has a gradient."""
        ctx.model, ctx.settings, ctx.rows, ctx.weights = model, settings, rows, weights
        keep = len(targets) <= rows and any(ctx.needs_input_grad)
        parts = []
        for states, tokens in zip(hidden.split(rows), targets.split(rows), strict=True):
            with torch.set_grad_enabled(keep):
                states = states.detach().requires_grad_(keep)
                logits = logits_of(model, states)
            parts.append(_kernels(model)[0](logits.detach(), tokens, settings[0]))
        logprobs, entropy = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.kept = (states, logits) if keep else None
        ctx.save_for_backward(targets, hidden, logprobs, entropy)
        if not settings[1]:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        targets, hidden, logprobs, entropy = ctx.saved_tensors
        columns = (hidden, targets, logprobs, entropy, *given)
        chunks = [*zip(*(column.split(ctx.rows) for column in columns), strict=True)]
        of_hidden, sums = [], list[Tensor]()
        for states, *chunk in chunks:
            if ctx.kept is None:
                with torch.enable_grad():
                    states = states.detach().requires_grad_()
                    logits = logits_of(ctx.model, states)
            else:
                (states, logits), ctx.kept = ctx.kept, None
            gradient = _kernels(ctx.model)[1](logits.detach(), *chunk, *ctx.settings)
            found, *more = torch.autograd.grad(logits, [states, *ctx.weights], gradient)
            of_hidden.append(found)
            if sums:
                torch._foreach_add_(sums, more)
            else:  # of many chunks in float32
                sums = more if len(chunks) == 1 else [*map(_wide, more)]
            del logits, gradient, more
        of_weights = [s.to(w.dtype) for s, w in zip(sums, ctx.weights, strict=True)]
        return None, None, None, None, torch.cat(of_hidden), *of_weights


def _kernels(model: Any) -> tuple[Callable[..., Any], ...]:
    return _compiled() if getattr(model, COMPILED, False) else (_scores, _gradient)


@cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    options: dict[str, Any] = {"dynamic": True, "backend": inductor}
    return tuple(torch.compile(kernel, **options) for kernel in (_scores, _gradient))


def inductor(graph: Any, inputs: Any) -> Any:
    """torch's compiler, for both directions at once; what it cannot compile is run as it is, with a
    warning."""
    from torch._dynamo.exc import RestartAnalysis  # a second to import
    from torch._functorch.config import patch
    from torch._inductor.compile_fx import compile_fx

    try:
        with patch(force_non_lazy_backward_lowering=True):
            return compile_fx(graph, inputs)
    except RestartAnalysis:  # is no failure
        raise
    except Exception as error:  # of a compiler, which is another on each machine
        event(log, "compilation failed", logging.WARNING, why=first_line(error))
        return graph.forward


def _scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [c, V], targets int64 [c] -> log-probs and entropies, float32 [c]."""
    distribution = _tempered(logits, temperature).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    return logprobs, -distribution.exp().mul_(distribution).sum(-1)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> Tensor:
    """The gradient of the logits, from what _scores() gave and the gradients of it, [c] each: with
    p the distribution, that of its log-prob of t is 1_t - p, that of its entropy H is
    -p (log p + H)."""
    wide, places = _tempered(logits, temperature), targets[:, None]
    log_p = wide - (wide.gather(1, places) - logprobs[:, None])
    of_target = (of_logprobs / temperature)[:, None]
    if entropy_gradient:
        p, share = log_p.exp(), (of_entropy / temperature)[:, None]
        found = log_p.add_(entropy[:, None]).mul_(share).add_(of_target).mul_(p).neg_()
    else:
        found = log_p.exp_().mul_(-of_target)
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own, on float32
        chosen = torch.arange(found.shape[1], device=found.device) == places
        return torch.where(chosen, found + of_target, found).to(logits.dtype)
    return found.scatter_add_(1, places, of_target).to(logits.dtype)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return _wide(logits) if temperature == 1.0 else _wide(logits) / temperature


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


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
        return getattr(self, HEAD)(hidden.index_select(0, rows).float())[:, 0]


def make_value_head(model: nn.Module) -> None:
    """Teaches ``model`` (a classifier of one label) to score packed rows. Raises Headless."""
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
        name = type(model).__name__
        raise Headless(f"{name} has no linear head with one output, without bias")
    mix_in(_ScoresStates, model)


def values(model: nn.Module, microbatch: MicroBatch, at: Literal["token", "before"]) -> Tensor:
    """float32 [C]: output of make_value_head()'s model for each completion token; see Part.at."""
    found: Tensor = model(microbatch=microbatch, at=at)
    return found
