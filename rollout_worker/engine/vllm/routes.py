"""The experts that vLLM's mixtures of experts choose, for ``rollout.router_replay``.

    GPU    vLLM's runner notes them, and its outputs have them (enable_return_routed_experts)
    CPU    vLLM's runner does not: a rank notes them by the slot of the key-value cache that a
           token has. So a prefix that comes from the cache has those with which it was computed.

Either way they are [rows, layers of the model, k], a row for each token but the last, which was no
input. Layers without experts have rows that mean nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.expert_routes import expert_layers
from paceline.payloads.routes import UNKNOWN
from rollout_worker.engine.base import Completion, EngineError, token_count
from rollout_worker.engine.vllm import internals


def layers_with_experts(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the layers of transformers' ``model`` that have experts. Raises EngineError if
    none has."""
    layers = expert_layers(model)
    names = [name for name, module in model.named_modules() if any(module is x for x in layers)]
    found = [int(part) for name in names for part in re.findall(r"\.(\d+)(?:\.|$)", name)[:1]]
    if not found:
        kind = type(model).__name__
        raise EngineError(f"rollout.router_replay: {kind} has no layer of experts. Set it to false")
    return tuple(found)


def with_routes(
    made: Completion,
    prefix: Completion | None,
    noted: NDArray[Any] | None,
    prompt: int,
    layers: Sequence[int],
) -> Completion:
    """``made``, which goes on from ``prefix``, with its routes. ``noted``: of its vLLM request;
    None if nobody has them. ``prompt``: tokens of the prompt. What the prefix has stays, but for
    its last token, which was no input then."""
    before = None if prefix is None else prefix.prompt_routes
    if noted is None:
        old = None if prefix is None else prefix.routes
        if old is not None and (lacking := len(made.tokens) - len(old)):
            old = np.pad(old, ((0, lacking), (0, 0)), constant_values=UNKNOWN)
        return replace(made, routes=old, prompt_routes=before)
    rows = noted[:, list(layers)].reshape(len(noted), -1).astype(np.uint16)
    routes = np.full((len(made.tokens), rows.shape[1]), UNKNOWN, np.uint16)
    start = max(token_count(prefix) - 1, 0)
    if prefix is not None and prefix.routes is not None:
        routes[:start] = prefix.routes[:start]
    inputs = rows[prompt + start : prompt + len(made.tokens) - 1]
    routes[start : start + len(inputs)] = inputs
    return replace(made, routes=routes, prompt_routes=rows[:prompt] if before is None else before)


class SlotRoutes:
    """Notes of a rank. vLLM calls ``capture`` in each layer with experts."""

    MOST_KEPT = 4096
    """Requests that have ended and are not asked for, because they have failed."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        model = runner.model_config
        layers, chosen = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        # One more than there are: -1 is the slot of no token.
        slots = internals.cache_slots(runner) + 1
        # A layer of another stage of a pipeline stays -1, which is UNKNOWN as uint16.
        self._slots = torch.full((slots, layers, chosen), -1, dtype=torch.int16)
        self._runner = runner
        self._ended: dict[str, NDArray[np.int16]] = {}
        internals.before_requests_end(runner, self._keep)
        bind_routed_experts_capturer(runner.model, self)

    def capture(self, layer: int, experts: Tensor) -> None:
        slots = internals.slots_of_step()
        if slots is not None:
            self._slots[slots, layer] = experts[: len(slots)].to(torch.int16)

    def take(self, name: str) -> NDArray[np.int16] | None:
        """The notes of the request that was passed to generate() as ``name``; None if it never ran.
        Those of one that has ended are forgotten."""
        running = self._runner.requests
        request = internals.request_named(name, [*self._ended, *running])
        if request in running:
            return self._read(running[request])
        return self._ended.pop(request, None)

    def _read(self, state: Any) -> NDArray[np.int16]:
        found: NDArray[np.int16] = self._slots[internals.slots_of(self._runner, state)].numpy()
        if not internals.is_scheduled(self._runner, state):
            found.fill(-1)  # It was preempted: its slots may be those of others
        return found

    def _keep(self, request: str, state: Any) -> None:
        """Before its slots are those of others."""
        self._ended[request] = self._read(state)
        while len(self._ended) > self.MOST_KEPT:
            del self._ended[next(iter(self._ended))]
