"""What each of vLLM's worker ranks does with new weights. Mixed into vLLM's worker class
(``worker_extension_cls``); called through ``collective_rpc``.

    paceline_stage ──► own thread: map, check, copy to the device ──► a datagram says how it went
    paceline_swap  ──► between two steps: into the model, fused and sharded as vLLM wants them
    paceline_proof ──► checksums of what the parameters hold after a swap that was to be proven
    paceline_drop  ──► forget weights, also those that are still being staged
    paceline_scrub ──► empty the key-value cache

Staging runs beside the running engine and changes nothing. A swap that fails leaves the model in no
defined state; the engine then asks all ranks to swap back to the weights that are still staged.
Staged weights have a key of their own for each time they are sent: a version may come twice.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from rollout_worker.engine.vllm.readback import CopyPlan, Readback
from rollout_worker.engine.vllm.shared_weights import read


class PacelineRank:
    """Attributes of vLLM's worker used here: rank, device, model_config, vllm_config, model_runner."""

    def paceline_stage(self: Any, key: int, description: str, address: str, token: str) -> None:
        """Returns at once. ``address``: the engine's datagram socket, ``token`` its password."""
        self._paceline_weights().wanted.add(key)
        threading.Thread(
            target=self._paceline_stage,
            args=(key, description, address, token),
            name="stage-weights",
            daemon=True,
        ).start()

    def _paceline_stage(self: Any, key: int, description: str, address: str, token: str) -> None:
        error = ""
        # Survived to be told: the engine must not wait for an answer that never comes.
        try:
            tensors = read(description)
            if self.device.type != "cpu":
                tensors = _to_device(tensors, self.device)
            self._paceline_weights().put(key, tensors)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        answer = {"token": token, "key": key, "rank": self.rank, "error": error[:500]}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(json.dumps(answer).encode(), _address(address))

    def paceline_swap(self: Any, key: int, prove: bool = False) -> tuple[str, float]:
        """("", seconds) or (what went wrong, seconds). Nothing else runs on the rank meanwhile.

        ``prove``: it is noted what went where, for paceline_proof; and if loading turns out to be
        copies alone, every later swap is those copies.
        """
        from vllm.config import set_current_vllm_config

        started = time.perf_counter()
        error = ""
        # Survived to be undone: see the module's docstring.
        try:
            weights = self._paceline_weights()
            tensors = weights.staged[key]
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                if prove:
                    self._paceline_fill_and_note(weights, tensors)
                elif weights.plan is not None:
                    weights.plan.apply(tensors)
                else:
                    self.paceline_fill(self.model_runner.model, tensors)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as problem:
            error = f"rank {self.rank}: {type(problem).__name__}: {problem}"
        return error, time.perf_counter() - started

    def _paceline_fill_and_note(self: Any, weights: _Weights, tensors: dict[str, Tensor]) -> None:
        model = self.model_runner.model

        notes = Readback(tensors)

        def fill() -> set[str] | None:
            nonlocal notes
            notes = weights.notes = Readback(tensors)
            with notes:
                loaded: set[str] | None = self.paceline_fill(model, tensors)
            return loaded

        weights.plan = None
        loaded = fill()
        # Of these something is computed from the weights once they are loaded.
        if loaded is None or self.model_config.quantization or self.model_config.use_mla:
            return
        plan = None if _packed(model) else notes.plan(model, loaded)
        if plan is not None and plan.reproduces(model, tensors):
            weights.plan = plan
        elif plan is not None:
            fill()

    def paceline_fill(self: Any, model: nn.Module, tensors: dict[str, Tensor]) -> set[str] | None:
        """Puts checkpoint weights into vLLM's model. Returns the names of parameters that got some,
        where the model says them. Raises for those that got none."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        # It warns, at every reload, of modules that have nothing to load; what matters is below.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        # Before the reload takes shared parameters (tied embeddings) apart: one name for each.
        wanted = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(tensors.items()))
        finally:
            # In any case: without it the next reload would go on with this one's leftovers.
            finalize_layerwise_reload(model, self.model_config)
            _repack_shared(model)
        # Quantised models have parameters, such as scales, that no checkpoint carries.
        if loaded is not None and self.model_config.quantization is None and wanted - loaded:
            missing = sorted(wanted - loaded)
            raise ValueError(f"{len(missing)} parameters got no weights, among them {missing[0]}")
        return None if loaded is None else set(loaded)

    def paceline_proof(self: Any) -> list[list[Any]]:
        """The pieces of a swap that was to be proven, once."""
        weights = self._paceline_weights()
        notes, weights.notes = weights.notes, None
        return [piece.to_wire() for piece in notes.pieces(self.model_runner.model)]

    def paceline_drop(self: Any, key: int) -> None:
        self._paceline_weights().drop(key)

    def paceline_scrub(self: Any) -> None:
        """Empties the key-value cache, which nobody may be using."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _paceline_weights(self: Any) -> _Weights:
        if not hasattr(self, "_paceline_staged"):
            self._paceline_staged = _Weights()
        weights: _Weights = self._paceline_staged
        return weights


class _Weights:
    """What a rank keeps beside the model. ``put`` comes from a thread of its own, late perhaps:
    the engine may have given the weights up by then, and nobody would drop them again."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self.staged: dict[int, dict[str, Tensor]] = {}
        self.notes: Readback | None = None
        self.plan: CopyPlan | None = None
        self._lock = threading.Lock()

    def put(self, key: int, tensors: dict[str, Tensor]) -> None:
        with self._lock:
            if key in self.wanted:
                self.staged[key] = tensors

    def drop(self, key: int) -> None:
        with self._lock:
            self.wanted.discard(key)
            self.staged.pop(key, None)


def _to_device(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On the device where it has room for them beside the running engine, else in host memory."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    free, _ = torch.cuda.mem_get_info(device)
    if size > free * 0.8:
        return tensors
    # A stream of its own: on the engine's, the copies would stand between its kernels.
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    stream.synchronize()
    return moved


def _repack_shared(model: nn.Module) -> None:
    """Repeats the processing of an output layer whose weight belongs to another module (tied
    embeddings): a reload processes only layers that were given weights, and the CPU kernels work on
    a packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if (
            isinstance(module, VocabParallelEmbedding)
            and hasattr(module, "cpu_linear")
            and method is not None
        ):
            method.process_weights_after_loading(module)


def _packed(model: nn.Module) -> bool:
    """Whether CPU kernels keep a copy of their own beside a parameter: then the function that a layer
    computes with has it in its closure."""
    functions = [getattr(module, "cpu_linear", None) for module in model.modules()]
    return any(getattr(function, "__closure__", None) for function in functions)


def _address(text: str) -> str:
    # Abstract addresses begin with a zero byte, which does not survive every message encoding.
    return "\0" + text[1:] if text.startswith("@") else text
