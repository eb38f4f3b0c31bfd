"""The decoder for any causal language model of transformers: its own forward over the slot cache.

    layer             keeps of a sequence              in the slot cache
    attention         keys and values of every token   keys, values
    recurrent         a convolution's last inputs      states
                      and a recurrent state
    both side by side both (Falcon-H1, Zamba)          all three

A weight swap leaves them as they are: later tokens are made by the new weights from what the old
ones have kept, as attention's keys and values are.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from paceline.expert_routes import RouteNotes, routes_width
from rollout_worker.engine.base import EngineError
from rollout_worker.engine.transformers.decoder import CacheShape, Prefilled, SlotCache

_KNOWN_LAYERS = {
    *("full_attention", "sliding_attention"),
    *("linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"),
}


_NO_STATE = {"mlp", "moe"}


class _SlotLayer(CacheLayerMixin):
    """One attention layer of the slot cache during one decode step."""

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


class _SlotStates(LinearAttentionLayer):
    """One recurrent layer during one decode step. Its states are views of the slot cache's, which
    the model overwrites."""

    def hold(self, places: list[tuple[str, int]], states: list[Tensor]) -> None:
        for (kind, index), state in zip(places, states, strict=True):
            getattr(self, f"{kind}_states")[index] = state
            getattr(self, f"is_{kind}_states_initialized")[index] = True
            self.has_previous_state[index] = True
            if kind == "conv":
                self.conv_kernel_size[index] = state.shape[-1]


class _SlotBoth(_SlotStates, _SlotLayer):
    """One layer with attention and recurrence."""

    def __init__(self, number_of_states: int, *attention: Any) -> None:
        _SlotLayer.__init__(self, *attention)
        _SlotStates.__init__(self, number_of_states)  # type: ignore[call-arg]
        self.is_initialized = True


def _states_of(layer: Any) -> Iterator[tuple[str, int, Tensor]]:
    """Kind, index and tensor of what a recurrent layer has kept."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind in ("conv", "recurrent"):
            for index, state in getattr(layer, f"{kind}_states").items():
                if state is not None:
                    yield kind, index, state


class HFDecoder:
    """Any causal LM of transformers whose layers are of known types. ``notes_routes``: the experts
    of every token are noted."""

    def __init__(self, model: PreTrainedModel, *, notes_routes: bool = False) -> None:
        self._model = model
        self.routes: Tensor | None = None
        self._notes = RouteNotes(model) if notes_routes else None
        self._config = model.config.get_text_config(decoder=True)
        kinds = set(getattr(self._config, "layer_types", None) or ())
        if kinds - _KNOWN_LAYERS:
            raise EngineError(
                f"the transformers engine has no cache for layers of type "
                f"{', '.join(sorted(kinds - _KNOWN_LAYERS))} ({model.config.model_type})"
            )
        self._window: int | None = getattr(self._config, "sliding_window", None)
        self._masks_by_kind = "sliding_attention" in kinds
        if kinds and not any("sliding" in kind for kind in kinds):
            self._window = None
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        device = next(model.parameters()).device
        one = torch.zeros((1, 1), dtype=torch.int64, device=device)
        with torch.inference_mode():
            layers = self._run_prefill(one, None)[1]
            noted = self._noted()
        if notes_routes and (noted is None or noted.shape[1] != routes_width(model)):
            raise EngineError(
                f"rollout.router_replay: the choices of {type(model).__name__}'s routers are not "
                "seen. Set it to false"
            )
        self._states = [[(kind, i) for kind, i, _ in _states_of(layer)] for layer in layers]
        self._attends = [number for number, layer in enumerate(layers) if _keys(layer) is not None]
        attention = [layers[number] for number in self._attends]
        sizes = {
            (a.keys.shape[1], a.keys.shape[3], a.values.shape[3], a.keys.dtype) for a in attention
        }
        if not sizes:
            raise EngineError(
                f"the transformers engine needs a layer of attention ({model.config.model_type})"
            )
        if len(sizes) != 1:
            raise EngineError(
                f"the transformers engine needs the same cache shape in every attention layer "
                f"({model.config.model_type} has {len(sizes)} different ones)"
            )
        states = tuple((s.shape[1:], s.dtype) for layer in layers for _, _, s in _states_of(layer))
        self.shape = CacheShape(len(attention), *sizes.pop(), device, states)

    def refresh(self) -> None:
        pass

    def reach(self, length: int) -> None:
        pass

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        if not self.shape.states:
            return self._prefill(tokens, lengths)
        # Padding would enter a recurrent state: sequences of one length at a time.
        found: list[Prefilled] = []
        order: list[Tensor] = []
        for length in lengths.unique().tolist():
            order.append((lengths == length).nonzero()[:, 0])
            part = self._prefill(tokens[order[-1], :length], lengths[order[-1]])
            missing = (0, 0, 0, tokens.shape[1] - length)
            keys, values = (torch.nn.functional.pad(x, missing) for x in (part.keys, part.values))
            routes = part.routes
            if routes is not None:
                routes = torch.nn.functional.pad(routes, (0, 0, 0, tokens.shape[1] - length))
            found.append(Prefilled(part.logits, keys, values, part.states, routes))
        back = torch.cat(order).argsort()
        noted = [part.routes for part in found if part.routes is not None]
        return Prefilled(
            torch.cat([part.logits for part in found])[back],
            torch.cat([part.keys for part in found], 1)[:, back],
            torch.cat([part.values for part in found], 1)[:, back],
            tuple(torch.cat(parts)[back] for parts in zip(*(p.states for p in found), strict=True)),
            torch.cat(noted)[back] if noted else None,
        )

    def _prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        last = lengths - 1
        kept, where = torch.unique(last, return_inverse=True)
        logits, layers = self._run_prefill(tokens, kept)
        rows = torch.arange(len(tokens), device=tokens.device)
        chosen = logits[rows, where if self._selects else last]
        keys = torch.stack([layers[number].keys for number in self._attends])
        values = torch.stack([layers[number].values for number in self._attends])
        states = tuple(state for layer in layers for _, _, state in _states_of(layer))
        routes = self._noted()
        if routes is not None:
            routes = routes.view(*tokens.shape, -1)
        return Prefilled(chosen.float(), keys, values, states, routes)

    def _forward(self, **inputs: Any) -> Any:
        if self._notes is not None:
            self._notes.clear()  # what a plain forward of the model has left
        return self._model(**inputs)

    def _noted(self) -> Tensor | None:
        return None if self._notes is None else self._notes.take()

    def _run_prefill(self, tokens: Tensor, kept: Tensor | None) -> tuple[Tensor, list[Any]]:
        cache = Cache(
            layers=[_without_window(layer) for layer in DynamicCache(config=self._config).layers]
        )
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        # Padding is on the right: the causal mask alone keeps it from every token that counts.
        extra = {"logits_to_keep": kept} if kept is not None and self._selects else {}
        out = self._forward(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **extra
        )
        kinds = getattr(self._config, "layer_types", None) or ["full_attention"] * len(cache.layers)
        for kind, layer in zip(kinds, cache.layers, strict=True):
            keeps = _keys(layer) is not None or any(_states_of(layer))
            if kind not in _NO_STATE and not keeps:
                raise EngineError(
                    "the transformers engine cannot run a model of which a layer caches nothing "
                    f"({self._model.config.model_type})"
                )
        return out.logits, list(cache.layers)

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        rows = len(tokens)
        index = cache.token_index(positions)
        states = iter(cache.states)
        layers: list[Any] = []
        for number, places in enumerate(self._states):
            attention: tuple[Any, ...] = ()
            if number in self._attends:
                i = self._attends.index(number)
                attention = cache.keys[i], cache.values[i], index, rows, length
            if attention and not places:
                layers.append(_SlotLayer(*attention))
                continue
            count = 1 + max((i for _, i in places), default=0)
            layer = _SlotBoth(count, *attention) if attention else _SlotStates(count)
            layer.hold(places, [next(states)[:rows] for _ in places])
            layers.append(layer)
        out = self._forward(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._mask(positions, length),
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )
        self.routes = self._noted()
        return out.logits[:, -1].float()

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        at, newest = torch.arange(length, device=positions.device), positions[:, None, None, None]
        full = at <= newest
        if self._window is None:
            return self._as_asked(full)
        sliding = full & (at > newest - self._window)
        if self._masks_by_kind:
            masks = {"full_attention": full, "sliding_attention": sliding}
            return {kind: self._as_asked(mask) for kind, mask in masks.items()}
        return self._as_asked(sliding)

    def _as_asked(self, mask: Tensor) -> Tensor:
        """Eager attention, which a model with sinks has by default, adds its mask."""
        if self._model.config._attn_implementation != "eager":
            return mask
        lowest = torch.finfo(self.shape.dtype).min
        return torch.zeros_like(mask, dtype=self.shape.dtype).masked_fill_(~mask, lowest)


def _keys(layer: Any) -> Tensor | None:
    return getattr(layer, "keys", None)


def _without_window(layer: Any) -> Any:
    """A layer for a whole prompt: the slot cache keeps all of it, and masks have the window."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return DynamicLayer()
    kind = (
        LinearAttentionAndFullAttentionLayer
        if isinstance(layer, CacheLayerMixin)
        else LinearAttentionLayer
    )
    return kind(number_of_states=layer.number_of_states)
