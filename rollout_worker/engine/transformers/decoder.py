"""The decoder interface: one forward for new prompts, one for the next token of every row. And the
decoder for any model: its own transformers forward, over a slot cache."""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from rollout_worker.engine.base import EngineError

_LENGTH_STEP = 32
_ROWS_STEP = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        per_head = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return int(self.layers * self.heads * per_head)


class SlotCache:
    """``keys`` and ``values``: [layers, rows, heads, length, dim]."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.keys = self._empty(0, 0, shape.key_dim)
        self.values = self._empty(0, 0, shape.value_dim)

    @property
    def rows(self) -> int:
        return int(self.keys.shape[1])

    @property
    def length(self) -> int:
        return int(self.keys.shape[3])

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Makes room for ``rows`` sequences of ``length`` tokens; used entries are kept."""
        if rows <= self.rows and length <= self.length:
            return
        rows = self.rows if rows <= self.rows else _round_up(rows, _ROWS_STEP)
        # Doubling keeps the copying linear in the final length.
        longer = _round_up(max(length, min(2 * self.length, 2 * length)), _LENGTH_STEP)
        length = self.length if length <= self.length else longer
        keys, values = self.keys, self.values
        self.keys = self._empty(rows, length, self.shape.key_dim)
        self.values = self._empty(rows, length, self.shape.value_dim)
        if used_rows:
            span = (slice(None), slice(used_rows), slice(None), slice(used_length))
            self.keys[span] = keys[span]
            self.values[span] = values[span]

    def fill(self, rows: slice, sources: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copies sequence ``sources[i]`` of a prefill into the i-th of ``rows``. ``keys`` and
        ``values``: [layers, sequences, heads, tokens, dim]. One prefill may fill many rows."""
        tokens = keys.shape[3]
        self.keys[:, rows, :, :tokens] = keys.index_select(1, sources)
        self.values[:, rows, :, :tokens] = values.index_select(1, sources)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first ``length`` positions of rows ``sources`` over rows ``targets``."""
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]

    def clear(self, rows: Tensor) -> None:
        self.keys[:, rows] = 0
        self.values[:, rows] = 0

    def token_index(self, positions: Tensor) -> Tensor:
        """Index of position ``positions[i]`` of row i in a layer flattened to [-1, dim]. int64
        [rows * heads], heads fastest."""
        heads = self.shape.heads
        base = torch.arange(len(positions) * heads, device=positions.device) * self.length
        return base + positions.repeat_interleave(heads)

    def _empty(self, rows: int, length: int, dim: int) -> Tensor:
        # Zeroed: positions that were never written are masked, but 0 * NaN would still be NaN.
        size = (self.shape.layers, rows, self.shape.heads, length, dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``logits`` float32 [sequences, vocabulary] after each sequence's last token; ``keys`` and
    ``values`` [layers, sequences, heads, tokens, dim], meaningless beyond a sequence's length."""

    logits: Tensor
    keys: Tensor
    values: Tensor


class Decoder(Protocol):
    @property
    def shape(self) -> CacheShape: ...

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        """``tokens`` int64 [sequences, longest], padded on the right; ``lengths`` int64
        [sequences]."""

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Feeds one token to each of rows 0 .. n-1 and stores its keys and values. ``tokens``,
        ``positions`` int64 [n]; ``length``: 1 + the largest position. Returns logits float32 [n,
        vocabulary]."""

    def refresh(self) -> None:
        """The model's weights have changed in place."""


def largest_gap(decoder: Decoder, model: torch.nn.Module, vocabulary: int) -> float:
    """Largest difference between the decoder's log-probs and those of the model's own plain
    forward. Over two sequences of unequal length, one of them decoded token by token at the end. It
    is checked at every start: no test can cover all architectures and settings."""
    device = decoder.shape.device
    lengths = torch.tensor([7, 4], device=device)
    steps = 2
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (2, 7 + steps), generator=generator).to(device)
    with torch.inference_mode():
        prefilled = decoder.prefill(tokens[:, :7], lengths)
        cache = SlotCache(decoder.shape)
        cache.reserve(2, 7 + steps, 0, 0)
        rows = torch.arange(2, device=device)
        cache.fill(slice(2), rows, prefilled.keys, prefilled.values)
        mine = [prefilled.logits]
        for step in range(steps):
            positions = lengths + step
            fed = tokens[rows, positions]
            mine.append(decoder.decode(cache, fed, positions, 8 + step))
        gap = 0.0
        for row in range(2):
            n = int(lengths[row])
            plain = model(input_ids=tokens[row : row + 1, : n + steps], use_cache=False).logits
            expected = torch.log_softmax(plain[0, n - 1 :].float(), -1)
            got = torch.log_softmax(torch.stack([logits[row] for logits in mine]), -1)
            gap = max(gap, (got - expected).abs().max().item())
    return gap


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
        device = next(model.parameters()).device
        one = torch.zeros((1, 1), dtype=torch.int64, device=device)
        with torch.inference_mode():
            layers = self._run_prefill(one, None)[1]
        sizes = {(k.shape[1], k.shape[3], v.shape[3], k.dtype) for k, v in layers}
        if len(sizes) != 1:
            raise EngineError(
                f"the transformers engine needs the same cache shape in every layer "
                f"({model.config.model_type} has {len(sizes)} different ones)"
            )
        self.shape = CacheShape(len(layers), *sizes.pop(), device)

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
        at, newest = torch.arange(length, device=positions.device), positions[:, None, None, None]
        full = at <= newest
        if self._window is None:
            return full
        sliding = full & (at > newest - self._window)
        if self._masks_by_kind:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding
