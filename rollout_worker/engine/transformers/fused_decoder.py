"""Fused decoder for Llama, Mistral, Qwen2 and Qwen3 without sliding windows. The same arithmetic as
the model's own forward, on the model's own weights, with fewer and larger operations: one matrix
product for queries, keys and values, one for gate and up, and attention as two batched products
over the slots in use. The fused matrices, those of adapters among them, share memory with the
model's parameters, so new weights are copied once for both. ``largest_gap`` compares the two paths
at every start."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.lora import LoraLinear
from rollout_worker.engine.transformers.decoder import CacheShape, Prefilled, SlotCache

_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


@dataclass(slots=True)
class _Linear:
    """Linear layers over one input, as one, with the adapters beside them."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None = None  # [ranks of all adapters, in]
    lora_b: Tensor | None = None
    """[out, ranks of all adapters]: a block for each adapter, else zero."""
    scale: float = 1.0

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """[tokens, in] ──► [tokens, out], added to ``onto``."""
        if onto is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = torch.addmm(onto, x, self.weight.t())
            y = y if self.bias is None else y.add_(self.bias)
        if self.lora_a is not None and self.lora_b is not None:
            y.addmm_(F.linear(x, self.lora_a), self.lora_b.t(), alpha=self.scale)
        return y


@dataclass(slots=True)
class _Layer:
    qkv: _Linear
    out: _Linear
    gate_up: _Linear
    down: _Linear
    norm_in: Tensor
    """This and the other gains are made from the model's vectors."""
    norm_mlp: Tensor
    qk_norm: Tensor | None
    """[query heads + key heads, head dim]"""


def supports(model: PreTrainedModel) -> bool:
    """True if this decoder implements the model's architecture and settings."""
    config = model.config
    if type(model).__name__ not in _CLASSES or getattr(config, "hidden_act", "") != "silu":
        return False
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    if type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None:
        return False
    if model.model.rotary_emb.rope_type not in _STATIC_ROPE:
        return False
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    parts = attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj
    return all(nn.Linear in (type(part), *type(part).__bases__) for part in parts) and (
        type(model.lm_head) is nn.Linear
    )


class FusedDecoder:
    routes = None  # Models with experts are not for this decoder

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._model = model
        self._embed = model.model.embed_tokens.weight
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = model.model.layers[0].self_attn.head_dim
        self._scale = model.model.layers[0].self_attn.scaling
        self._eps = config.rms_norm_eps
        self._dtype = self._embed.dtype
        self._floors = {
            size: torch.tensor(math.sqrt(size * self._eps), device=self._embed.device)
            for size in (self._embed.shape[1], self._dim)
        }
        """Lengths of vectors of a size whose mean square is epsilon."""
        self.shape = CacheShape(
            config.num_hidden_layers,
            self._kv_heads,
            self._dim,
            self._dim,
            self._dtype,
            self._embed.device,
        )
        with torch.no_grad():
            self._norm_out = self._gain(model.model.norm.weight)
            self._layers = [self._fuse(layer) for layer in model.model.layers]
        self._cos = self._sin = torch.empty((0, 1, self._dim), device=self._embed.device)

    @torch.no_grad()
    def refresh(self) -> None:
        # Copied, where they do not share the model's memory: a captured step reads them there.
        self._norm_out.copy_(self._gain(self._model.model.norm.weight))
        for layer, module in zip(self._layers, self._model.model.layers, strict=True):
            layer.norm_in.copy_(self._gain(module.input_layernorm.weight))
            layer.norm_mlp.copy_(self._gain(module.post_attention_layernorm.weight))
            if layer.qk_norm is not None:
                layer.qk_norm.copy_(self._qk_gain(module.self_attn))

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        count, longest = tokens.shape
        self.reach(longest)
        cos, sin = (t[:longest].repeat(count, 1, 1) for t in (self._cos, self._sin))
        x = self._embed[tokens.reshape(-1)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer in self._layers:
            qk, v = self._project(layer, x, cos, sin)
            q, k, v = (
                t.view(count, longest, -1, self._dim).transpose(1, 2)
                for t in (qk[:, : self._heads], qk[:, self._heads :], v)
            )
            keys.append(k)
            values.append(v)
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._heads != self._kv_heads
            )
            x = self._finish(layer, x, mixed.transpose(1, 2).reshape(count * longest, -1))
        ends = torch.arange(count, device=tokens.device) * longest + lengths - 1
        return Prefilled(self._logits(x[ends]), torch.stack(keys), torch.stack(values))

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        rows = len(tokens)
        self.reach(length)
        cos, sin = self._cos[positions], self._sin[positions]
        index = cache.token_index(positions)
        at = torch.arange(length, device=positions.device)
        mask = torch.zeros((rows, length), dtype=self._dtype, device=positions.device)
        mask.masked_fill_(at > positions[:, None], -torch.inf)
        mask = mask.repeat_interleave(self._kv_heads, 0)[:, None]
        x = self._embed[tokens]
        for i, layer in enumerate(self._layers):
            qk, v = self._project(layer, x, cos, sin)
            k, v = qk[:, self._heads :], v
            stored_k = self._store(cache.keys[i], index, k, rows, length)
            stored_v = self._store(cache.values[i], index, v, rows, length)
            q = qk[:, : self._heads].reshape(rows * self._kv_heads, -1, self._dim)
            scores = torch.baddbmm(mask, q, stored_k.transpose(1, 2), alpha=self._scale)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(self._dtype)
            x = self._finish(layer, x, torch.bmm(weights, stored_v).view(rows, -1))
        return self._logits(x)

    def _store(self, layer: Tensor, index: Tensor, new: Tensor, rows: int, length: int) -> Tensor:
        """Writes one token per row; returns the rows' contents [rows * heads, length, dim]."""
        layer.view(-1, self._dim).index_copy_(0, index, new.reshape(-1, self._dim))
        return layer.view(-1, layer.shape[2], self._dim)[: rows * self._kv_heads, :length]

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries, keys [tokens, query + key heads, dim], values [tokens, heads, dim]."""
        qkv = layer.qkv(self._norm(x, layer.norm_in))
        qkv = qkv.view(len(x), -1, self._dim)
        turned = self._heads + self._kv_heads
        qk, v = qkv[:, :turned], qkv[:, turned:]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        # The sign of the rotated half is in the table.
        return qk * cos + torch.roll(qk, self._dim // 2, -1) * sin, v

    def _finish(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        x = layer.out(mixed, onto=x)
        gate, up = layer.gate_up(self._norm(x, layer.norm_mlp)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up), onto=x)

    def _fuse(self, module: nn.Module) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        return _Layer(
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=_joined(attention.o_proj),
            gate_up=_joined(mlp.gate_proj, mlp.up_proj),
            down=_joined(mlp.down_proj),
            norm_in=self._gain(module.input_layernorm.weight),
            norm_mlp=self._gain(module.post_attention_layernorm.weight),
            qk_norm=self._qk_gain(attention) if hasattr(attention, "q_norm") else None,
        )

    def _qk_gain(self, attention: nn.Module) -> Tensor:
        q = attention.q_norm.weight.expand(self._heads, -1)
        k = attention.k_norm.weight.expand(self._kv_heads, -1)
        return self._gain(torch.cat([q, k]))

    def _gain(self, weight: Tensor) -> Tensor:
        """Factor that _norm multiplies with."""
        return weight * math.sqrt(weight.shape[-1]) if self._dtype == torch.float32 else weight

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMS norm: in float32 a vector over its length, which is the root of its size times the
        root of its mean square. That takes half the operations of a mean of squares."""
        if self._dtype == torch.float32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x.div(torch.hypot(length, self._floors[x.shape[-1]])).mul_(gain)
        # Rounded where the model rounds.
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return gain * wide.to(self._dtype)

    def _logits(self, x: Tensor) -> Tensor:
        return self._model.lm_head(self._norm(x, self._norm_out)).float()

    def reach(self, length: int) -> None:
        """Extends the rotary tables, from the model's own module, to cover ``length`` positions."""
        if length <= len(self._cos):
            return
        at = torch.arange(max(length, 2 * len(self._cos), 128), device=self._embed.device)
        cos, sin = self._model.model.rotary_emb(self._embed[:1], at[None])
        half = self._dim // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]


def _joined(*layers: nn.Linear) -> _Linear:
    """The layers' parameters become views of the matrices of one."""
    bias = None if layers[0].bias is None else _share([layer.bias for layer in layers])
    joined = _Linear(_share([layer.weight for layer in layers]), bias)
    if adapted := [layer for layer in layers if isinstance(layer, LoraLinear)]:
        joined.scale = adapted[0].scale
        joined.lora_a = _share([layer.lora_A.weight for layer in adapted])
        joined.lora_b = joined.weight.new_zeros(len(joined.weight), len(joined.lora_a))
        row = column = 0
        for layer in layers:
            if isinstance(layer, LoraLinear):
                weight = layer.lora_B.weight
                block = joined.lora_b[row : row + len(weight), column : column + weight.shape[1]]
                weight.data = block.copy_(weight)
                column += weight.shape[1]
            row += layer.out_features
    return joined


def _share(parameters: list[nn.Parameter]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0]
    joined = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined
