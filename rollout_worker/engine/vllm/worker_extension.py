"""Weight staging and swaps on a vLLM rank. Mixed into vLLM's worker class
(``worker_extension_cls``) and called through ``collective_rpc``.

    paceline_stage ──► own thread: map, check, copy this rank's slices
    paceline_staged ──► what became of it, when it is over
    paceline_swap  ──► between two steps: into the model, fused and sharded by vLLM, or into the
                       slots of adapters
    paceline_check ──► the weights that the parameters, or the slots, differ from, after a swap
    paceline_untraced ──► the weights that cannot be compared
    paceline_leave_device ──► staged weights stay in host memory alone
    paceline_drop  ──► forget weights, also those that are still being staged
    paceline_scrub ──► empty the key-value cache
    paceline_without_slot ──► the layers that vLLM has no place for an adapter in
    paceline_routes ──► the experts that the tokens of a request went to

Staging runs while the engine generates and changes nothing. A failed swap leaves the model
undefined; then the engine asks all ranks to swap back to the old weights, which are still staged.
Each transfer has its own key: a version may come twice.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rollout_worker.engine.parameters import differing
from rollout_worker.engine.vllm import adapters, internals
from rollout_worker.engine.vllm.quantised import QuantisedLayers
from rollout_worker.engine.vllm.rank_weights import CopyPlan, Place, RankWeights, read, stage_for
from rollout_worker.engine.vllm.readback import Readback
from rollout_worker.engine.vllm.routes import SlotRoutes


class PacelineRank:
    """Attributes of vLLM's worker used here: rank, device, model_config, vllm_config,
    model_runner."""

    def paceline_stage(self: Any, key: int, description: str) -> None:
        """Returns at once; see paceline_staged()."""
        weights = self._paceline_weights
        weights.wanted.add(key)

        def stage() -> None:
            # Caught and kept: the engine must not wait for an answer that never comes.
            try:
                staged = RankWeights(read(description))
                if self.paceline_stages_apart():
                    weights.leave_device()
                    ranks = self.vllm_config.parallel_config.world_size
                    if self.vllm_config.lora_config is not None:
                        ranks = 1  # adapters are small: every rank stages them whole
                    staged = stage_for(self.device, staged.tensors, weights.plan, ranks=ranks)
                with weights.lock:
                    # Late, when the engine has given them up, they are not kept.
                    if key in weights.wanted:
                        weights.staged[key] = staged
            except Exception as problem:
                weights.failed[key] = f"rank {self.rank}: {type(problem).__name__}: {problem}"[:500]

        threading.Thread(target=stage, name="stage-weights", daemon=True).start()

    def paceline_staged(self: Any, key: int) -> str | None:
        """None while the weights are being staged; then the error, empty after success."""
        weights = self._paceline_weights
        return "" if key in weights.staged else weights.failed.get(key)

    def paceline_stages_apart(self: Any) -> bool:
        """Its device has memory of its own."""
        return bool(self.device.type != "cpu")

    def paceline_swap(
        self: Any, key: int, note: bool = False, first: bool = False, complete: bool = False
    ) -> str:
        """The error; empty after success. Nothing else runs on the rank meanwhile. ``note``:
        records the copies for paceline_check; what is quantised is compared before, ``complete`` or
        a sample. ``first``: if loading turns out to be only copying, later swaps repeat these
        copies."""
        from vllm.config import set_current_vllm_config

        # Caught, because the swap can be undone: see the module's docstring.
        try:
            weights = self._paceline_weights
            staged = weights.staged[key]
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                if first:
                    weights.plan = None
                if self.vllm_config.lora_config is not None:
                    self.paceline_fill_slots(staged.tensors)
                elif weights.plan is not None:
                    weights.plan.apply(staged)
                elif note:
                    loaded = self._paceline_noted_fill(weights, staged.tensors, complete)
                    if first:
                        weights.noted = weights.notes.places()
                        self._paceline_plan(weights, staged, loaded)
                    if weights.plan is not None:  # it has the views; these keep this version
                        del weights.notes, weights.quantised
                else:
                    self.paceline_fill(self.model_runner.model, staged.tensors)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as problem:
            return f"rank {self.rank}: {type(problem).__name__}: {problem}"
        return ""

    def _paceline_plan(
        self: Any, weights: _Weights, staged: RankWeights, loaded: set[str] | None
    ) -> None:
        model = self.model_runner.model
        # These models compute further values from the loaded weights.
        computes = self.model_config.quantization or self.model_config.use_mla or _packed(model)
        if loaded is None or computes:
            return
        if (plan := weights.notes.plan(model, loaded)) is None:
            return
        if plan.reproduces(model, staged):
            weights.plan = plan
        else:
            self._paceline_noted_fill(weights, staged.tensors)

    def _paceline_noted_fill(
        self: Any, weights: _Weights, tensors: dict[str, Tensor], complete: bool = False
    ) -> set[str] | None:
        weights.notes = notes = Readback(tensors)
        model: nn.Module = self.model_runner.model
        weights.quantised = QuantisedLayers(notes, RankWeights(tensors), complete=complete)
        with weights.quantised.watched(model), notes:
            filled: set[str] | None = self.paceline_fill(model, tensors)
        return filled

    def paceline_fill(self: Any, model: nn.Module, tensors: dict[str, Tensor]) -> set[str] | None:
        """Loads checkpoint weights into vLLM's model. Returns the names of the loaded parameters,
        if the model reports them. Raises for parameters that got no weights."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        # It warns at every reload about modules without weights; missing ones are checked below.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        # The reload separates shared parameters (tied embeddings); before it, each has one name.
        expected = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(tensors.items()))
        finally:
            # Also after an error: otherwise the next reload would continue this one.
            finalize_layerwise_reload(model, self.model_config)
            _repack_shared(model)
            for experts, layer in _packed_experts(model):
                experts.process_weights_after_loading(layer)
        # Quantised models have parameters, such as scales, that no checkpoint carries.
        if loaded is not None and self.model_config.quantization is None and expected - loaded:
            missing = sorted(expected - loaded)
            raise ValueError(f"{len(missing)} parameters got no weights, among them {missing[0]}")
        return None if loaded is None else set(loaded)

    def paceline_fill_slots(self: Any, tensors: dict[str, Tensor]) -> None:
        adapters.fill(internals.adapter_manager(self.model_runner), tensors)

    def paceline_without_slot(self: Any, names: list[str]) -> list[str]:
        return adapters.without_slot(internals.adapter_manager(self.model_runner), names)

    def paceline_check(self: Any, key: int, complete: bool) -> list[str]:
        """Names of the weights that the parameters differ from, after a swap with ``note``. Call it
        once per such swap, before the next step."""
        weights = self._paceline_weights
        left_out: list[str] = []
        if self.vllm_config.lora_config is not None:
            manager = internals.adapter_manager(self.model_runner)
            parts, left_out = adapters.slots(manager, weights.staged[key].tensors)
            return left_out + differing(parts, complete=complete)
        if weights.plan is not None:
            views = weights.plan.views
        else:
            # A part that was copied at the first sync and is copied no more keeps its old bits.
            left_out = sorted({name for name, *_ in weights.noted - weights.notes.places()})
            left_out += weights.quantised.differing()
            views = weights.notes.views
            del weights.notes, weights.quantised
        return left_out + differing(weights.staged[key].parts(views), complete=complete)

    def paceline_untraced(self: Any, key: int) -> list[str]:
        """Names of the weights of which the first sync copied nothing: a loader computes something
        from them, or another rank has them."""
        weights = self._paceline_weights
        if self.vllm_config.lora_config is not None:
            return []
        return sorted(weights.staged[key].tensors.keys() - {name for name, *_ in weights.noted})

    def paceline_leave_device(self: Any) -> None:
        """Gives the memory of staged weights back, before the rank sleeps."""
        self._paceline_weights.leave_device()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def paceline_drop(self: Any, key: int) -> None:
        weights = self._paceline_weights
        with weights.lock:
            weights.wanted.discard(key)
            weights.staged.pop(key, None)
            weights.failed.pop(key, None)

    def paceline_note_routes(self: Any) -> None:
        """From now on. On a CPU only: on a GPU vLLM's runner notes them."""
        self._paceline_routes = SlotRoutes(self.model_runner)

    def paceline_routes(self: Any, name: str) -> tuple[list[int], bytes] | None:
        """See SlotRoutes.take: shape and int16 values."""
        noted = self._paceline_routes.take(name)
        return None if noted is None else (list(noted.shape), noted.tobytes())

    def paceline_scrub(self: Any) -> None:
        """Empties the key-value cache. No sequence may be using it."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    @cached_property
    def _paceline_weights(self) -> _Weights:
        return _Weights()


@dataclass(slots=True)
class _Weights:
    lock: threading.Lock = field(default_factory=threading.Lock)  # Guards ``wanted`` and ``staged``
    wanted: set[int] = field(default_factory=set)
    staged: dict[int, RankWeights] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """The error of each transfer that could not be staged."""
    notes: Readback = field(init=False)
    """Copies of the newest swap that records copies, until they are compared."""
    quantised: QuantisedLayers = field(init=False)
    """The layers that this swap quantised."""
    noted: Counter[Place] = field(default_factory=Counter)
    """Parts of the weights that the first sync copied, each as often as it did."""
    plan: CopyPlan | None = None

    def leave_device(self) -> None:
        """Makes room for the next version. Those that were swapped in are the parameters now; a
        swap back takes them from host memory."""
        with self.lock:
            for key, weights in self.staged.items():
                self.staged[key] = weights.off_device()


def _repack_shared(model: nn.Module) -> None:
    """Repacks an output layer whose weight belongs to another module (tied embeddings): a reload
    processes only layers that it loads weights into, and CPU kernels use a packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        packed = isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear")
        if packed and method is not None:
            method.process_weights_after_loading(module)


def _packed_experts(model: nn.Module) -> list[tuple[Any, nn.Module]]:
    """The kernel of each layer of experts, and the layer, on a CPU: the kernel packs the layer's
    weights in place. vLLM 0.32 does so at the first load only."""
    kernels = [
        (getattr(getattr(layer, "quant_method", None), "moe_kernel", None), layer)
        for layer in model.modules()
        if isinstance(weight := getattr(layer, "w13_weight", None), Tensor)
        and weight.device.type == "cpu"
    ]
    return [(kernel.fused_experts, layer) for kernel, layer in kernels if kernel is not None]


def _packed(model: nn.Module) -> bool:
    """True if CPU kernels compute with another form of a parameter: packed in place, or a copy in
    the closure of the layer's compute function."""
    if _packed_experts(model):
        return True
    functions = [getattr(module, "cpu_linear", None) for module in model.modules()]
    return any(getattr(function, "__closure__", None) for function in functions)
