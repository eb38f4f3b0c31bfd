"""Decoder for any model: its own transformers forward, over a slot cache."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from rollout_worker.engine.base import EngineError
from rollout_worker.engine.transformers.decoder import CacheShape, Prefilled, SlotCache

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class _SlotLayer(CacheLayerMixin):
    """One layer of the slot cache during one decode step."""

    def __init__(self, keys: Tensor, values: Tensor, index: Tensor, rows: int, length: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._index, self._rows, self._length = index, rows, length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            flat = store.view(-1, store.shape[-1])
            flat.index_copy_(0, self._index, new.reshape(-1, new.shape[-1]))
        rows, length = self._rows, self._length
        return self.keys[:rows, :, :length], self.values[:rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length - 1

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class HFDecoder:
    """Any causal LM of transformers whose layers all cache attention keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        kinds = set(getattr(self._config, "layer_types", None) or ())
        if kinds - _KNOWN_LAYERS:
            raise EngineError(
                f"the transformers engine has no cache for layers of type "
                f"{', '.join(sorted(kinds - _KNOWN_LAYERS))} ({model.config.model_type})"
            )
        self._window: int | None = getattr(self._config, "sliding_window", None)
        self._masks_by_kind = "sliding_attention" in kinds
        if kinds == {"full_attention"}:
            self._window = None
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.shape = self._probe()

    def _probe(self) -> CacheShape:
        device = next(self._model.parameters()).device
        one = torch.zeros((1, 1), dtype=torch.int64, device=device)
        with torch.inference_mode():
            layers = self._run_prefill(one, None)[1]
        sizes = {(k.shape[1], k.shape[3], v.shape[3], k.dtype) for k, v in layers}
        if len(sizes) != 1:
            raise EngineError(
                f"the transformers engine needs the same cache shape in every layer "
                f"({self._model.config.model_type} has {len(sizes)} different ones)"
            )
        heads, key_dim, value_dim, dtype = sizes.pop()
        return CacheShape(len(layers), heads, key_dim, value_dim, dtype, device)

    def refresh(self) -> None:
        pass

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        last = lengths - 1
        kept, where = torch.unique(last, return_inverse=True)
        logits, layers = self._run_prefill(tokens, kept)
        rows = torch.arange(len(tokens), device=tokens.device)
        chosen = logits[rows, where if self._selects else last]
        keys = torch.stack([k for k, _ in layers])
        values = torch.stack([v for _, v in layers])
        return Prefilled(chosen.float(), keys, values)

    def _run_prefill(
        self, tokens: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = Cache(layers=[DynamicLayer() for _ in range(self._config.num_hidden_layers)])
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        # Padding is on the right: the causal mask alone keeps it from every token that counts.
        extra = {"logits_to_keep": kept} if kept is not None and self._selects else {}
        out = self._model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **extra
        )
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        if any(keys is None for keys, _ in layers):
            raise EngineError(
                f"the transformers engine cannot run {self._model.config.model_type}: "
                f"not every layer of it caches keys and values"
            )
        return out.logits, layers

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        rows = len(tokens)
        index = cache.token_index(positions)
        layers = [
            _SlotLayer(cache.keys[i], cache.values[i], index, rows, length)
            for i in range(cache.shape.layers)
        ]
        out = self._model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._mask(positions, length),
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )
        return out.logits[:, -1].float()

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        at = torch.arange(length, device=positions.device)[None]
        full = at <= positions[:, None]
        if self._window is None:
            return full[:, None, None]
        sliding = full & (at > positions[:, None] - self._window)
        if self._masks_by_kind:
            return {
                "full_attention": full[:, None, None],
                "sliding_attention": sliding[:, None, None],
            }
        return sliding[:, None, None]
