"""Probe of a model: it has to score packed rows as its own forward scores each sequence alone.

    row     prompt a a a b b | prompt c c c d     attention of packed rows, in the mode of training
    alone   prompt a a a,  prompt b b,  ...       the model's own forward, with eager attention

Architectures differ in more ways than a list of names keeps up with: dropout and noise of routers
that training mode switches on, layers that read their neighbours in the row, layers that do not
hand the row's packing to attention, masks, windows, positions and prediction heads of their own. So
no architecture is listed. What a model computes decides, before the first step.

Attention windows are lowered meanwhile, so that a row of a hundred tokens is longer than any.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import one_line
from paceline.lora import LoraLinear
from policy_worker.model.heads import HEAD, score, values
from policy_worker.model.train_state import local_tensor, slices_again
from policy_worker.objectives.batch import Ints, TokenBatch
from policy_worker.rows.packing import pack

CLOSE, MOST_APART = 1e-3, 0.05
"""Difference of float32 log-probs, in nats, that is rounding, and the share of tokens that may
differ by more: which of two equal experts a router takes is rounding, too."""
MIXED_CLOSE, MIXED_MOST_APART = 0.3, 0.5
"""The same of weights in bfloat16. A token that sees others is off by whole nats."""
WINDOW = 8
PROMPTS, COMPLETIONS = (5, 3), ((1.0, 0.4, 0.7), (0.3, 0.8))
"""Tokens of each prompt, and the completions of each as shares of the longest."""
_WINDOW = re.compile(r"window(_size)?$|attention_chunk_size$")
_REMEDY = "name a model of another architecture, or mend the model's own code"


class Unfit(ValueError):
    """A model that cannot be trained on packed rows. The message says why, and what to do."""


def probe(
    model: nn.Module,
    head: Literal["lm", "scalar"],
    device: torch.device,
    *,
    longest: int = sys.maxsize,
    mixed: bool = False,
) -> None:
    """Raises Unfit. ``model``: prepared for its use, with weights; of a sharded one all ranks call
    it. ``longest``: tokens of a sequence in this run; a window that none reaches is of no matter.
    ``mixed``: it computes in bfloat16."""
    found = _Probe(model, head, device, longest, mixed)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
        _short_windows(model, longest),
        _early_turn(model, longest, int(found.batch.length.max()) // 2),
        _visible_head(model, head),
    ):
        try:
            found.run()
        finally:
            slices_again(model)


class _Probe:
    def __init__(
        self, model: Any, head: str, device: torch.device, reached: int, mixed: bool
    ) -> None:
        self.model, self.head, self.device = model, head, device
        limits = (MIXED_CLOSE, MIXED_MOST_APART) if mixed else (CLOSE, MOST_APART)
        self.close, self.most_apart = limits
        config = model.config.get_text_config()
        rng = np.random.default_rng(0)
        # A classifier's own forward looks for the last token that is no padding.
        padding = getattr(model.config, "pad_token_id", None)
        ids = [i for i in range(min(config.vocab_size, 1000)) if i != padding]
        # About a second on a CPU: of a large model a shorter row.
        parameters = sum(p.numel() for p in model.parameters())
        longest = int(np.clip(1e10 / parameters, 24, 160))
        positions = getattr(config, "max_position_embeddings", None) or longest
        longest = max(4, min(longest, min(positions, reached) - max(PROMPTS)))
        length = np.array([max(2, int(s * longest)) for group in COMPLETIONS for s in group])
        tokens = rng.choice(ids, length.sum())
        zeros = np.zeros(len(tokens), np.float32)
        self.batch = TokenBatch(
            prompt_length=np.array(PROMPTS),
            sequences=np.array([len(group) for group in COMPLETIONS]),
            length=length,
            prefix=np.repeat(PROMPTS, [len(group) for group in COMPLETIONS]),
            parent=np.repeat(np.arange(len(PROMPTS)), [len(group) for group in COMPLETIONS]),
            sample_of=np.arange(len(length)),
            prompt_tokens=rng.choice(ids, sum(PROMPTS)),
            tokens=tokens,
            behaviour=zeros,
            trained=zeros + 1,
            version=np.zeros(len(tokens), np.int64),
            reward=np.zeros(len(length)),
            rewarded=np.zeros(0, np.int64),
            token_reward=np.zeros(0),
            truncated=np.zeros(len(length), np.bool_),
        )
        self.other_tokens = rng.permutation(tokens)

    def run(self) -> None:
        try:
            with _idle_adapters(self.model) as idle:
                first = self._packed(self.batch.tokens)
            before = self._random_state()
            again = self._packed(self.batch.tokens)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code
            raise Unfit(
                f"its forward fails on packed rows ({one_line(error)}): {_REMEDY}"
            ) from error
        if not all(map(torch.equal, before, self._random_state())) or self._differ(first, again):
            raise Unfit(
                "it draws random numbers in training, such as dropout or the noise of a router, "
                "and a step that is computed again would be another one: set their probability to "
                "0 in its config.json, or model.gradient_checkpointing = false"
            )
        if idle:
            raise Unfit(
                f"the adapter of {min(idle)} is never asked: the code around it reads the layer's "
                "weight. Name other layers in model.lora.targets"
            )
        ends = np.cumsum(self.batch.length)
        for end, length in zip(ends, self.batch.length, strict=True):
            kept = slice(end - length, end)
            changed = self.other_tokens.copy()
            changed[kept] = self.batch.tokens[kept]
            if self._differ(first[kept], self._packed(changed)[kept]):
                raise Unfit(
                    "completions of one row see one another: a layer reads other tokens without "
                    "the attention function (a recurrence, a convolution), or does not pass it "
                    f"the row's packing: {_REMEDY}"
                )
        alone = self._alone()
        # Of a scalar head, a classifier's own forward gives the last token of a sequence alone.
        if by := self._differ(first[ends - 1] if self.head == "scalar" else first, alone):
            raise Unfit(
                "packed rows are not scored as its own forward scores a sequence (off by "
                f"{by:.2g}): it has a mask, an attention window, positions or a prediction head "
                f"that packed rows do not get: {_REMEDY}"
            )

    def _packed(self, tokens: Ints) -> Tensor:
        """Float32 [C]: log-probs, or values, of the row with ``tokens``."""
        batch = replace(self.batch, tokens=tokens)
        every = np.arange(len(batch.length))
        micro = pack(batch, every, self.device, last_tokens=self.head == "scalar")
        if self.head == "scalar":
            return values(self.model, micro, "token").float()
        return score(self.model, micro, 1.0).logprobs

    def _alone(self) -> Tensor:
        """The same of each sequence by itself; of a scalar head, [S] of their last tokens."""
        batch, found = self.batch, []
        prompts = np.split(batch.prompt_tokens, np.cumsum(batch.prompt_length)[:-1])
        completions = np.split(batch.tokens, np.cumsum(batch.length)[:-1])
        with _eager_attention(self.model):
            for group, tokens in zip(batch.group_of, completions, strict=True):
                prompt = prompts[group]
                ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None].to(self.device)
                try:
                    logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # the model's own code
                    raise Unfit(f"its own forward fails ({one_line(error)}): {_REMEDY}") from error
                if self.head == "scalar":
                    found.append(logits.reshape(-1)[-1:])
                    continue
                logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
                found.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0])
        return torch.cat(found)

    def _differ(self, one: Tensor, other: Tensor) -> float:
        """Largest difference; 0 if it is rounding."""
        apart = (one - other).abs() / one.abs().clamp(min=10.0) * 10.0
        # NaN is no rounding.
        if float((~(apart <= self.close)).float().mean()) <= self.most_apart:
            return 0.0
        return float(apart.nan_to_num(torch.inf).max())

    def _random_state(self) -> list[Tensor]:
        if self.device.type != "cuda":
            return [torch.get_rng_state()]
        return [torch.get_rng_state(), torch.cuda.get_rng_state(self.device)]


@contextlib.contextmanager
def _idle_adapters(model: nn.Module) -> Iterator[set[str]]:
    """Names of the layers with an adapter that no forward inside has called."""
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    idle = {*adapted}
    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: idle.discard(name))
        for name, layer in adapted.items()
    ]
    try:
        yield idle
    finally:
        for hook in hooks:
            hook.remove()


def _configs(model: nn.Module) -> list[Any]:
    found = [m.config for m in model.modules() if getattr(m, "config", None) is not None]
    return list({id(config): config for config in found}.values())


@contextlib.contextmanager
def _short_windows(model: nn.Module, longest: int) -> Iterator[None]:
    """Inside, attention windows that a sequence reaches are at most WINDOW tokens."""
    with contextlib.ExitStack() as undo:
        for owner in (*_configs(model), *model.modules()):
            for name, value in list(vars(owner).items()):
                within = type(value) is int and WINDOW < value < longest
                if within and _WINDOW.search(name):
                    undo.callback(setattr, owner, name, value)
                    setattr(owner, name, WINDOW)
        yield


@contextlib.contextmanager
def _early_turn(model: nn.Module, longest: int, turn: int) -> Iterator[None]:
    """Inside, positions that are others once a sequence of this run has more tokens than the model
    was first trained on are so from ``turn`` tokens on. A row has one kind of them."""
    name = "original_max_position_embeddings"
    with contextlib.ExitStack() as undo:
        for config in _configs(model):
            own = getattr(config, "rope_parameters", None) or {}
            ropes = [r for r in (own, *own.values()) if isinstance(r, dict)]
            ropes = [r for r in ropes if r.get("rope_type") == "longrope"]
            # transformers writes the one of the configuration over the others now and then.
            for place in (*ropes, vars(config)):
                if ropes and WINDOW < place.get(name, 0) < longest:
                    undo.callback(place.__setitem__, name, place[name])
                    place[name] = turn
        yield


@contextlib.contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for config in _configs(model):
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = "eager"
        yield


@contextlib.contextmanager
def _visible_head(model: Any, head: str) -> Iterator[None]:
    """Inside, a scalar head has weights: a new one has zeros, which show nothing. It computes in
    float32 in the model's own forward, too."""
    if head != "scalar":
        yield
        return
    layer = getattr(model, HEAD)
    weight = local_tensor(layer.weight.data)
    before = weight.clone()
    weight.copy_(torch.arange(weight.numel()).sin().view_as(weight))
    wide = layer.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    try:
        yield
    finally:
        wide.remove()
        weight.copy_(before)
