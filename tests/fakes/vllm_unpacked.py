"""A rank whose kernels compute with the parameters themselves, as on a GPU. Imported by vLLM's
worker, before it loads a model; never by a test."""

import os
from pathlib import Path
from typing import Any

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from rollout_worker.engine.vllm.worker_extension import PacelineRank
from tests.fakes.vllm_faults import FAULT

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


class UnpackedRank(PacelineRank):
    def paceline_swap(self: Any, *arguments: Any) -> str:
        """The file that FAULT names may name a weight that the swap leaves out, on the last
        rank."""
        plan, name = self._paceline_weights.plan, Path(os.environ[FAULT]).read_text()
        kept = {
            key: memory.clone()
            for key, memory in (plan.views.items() if plan and self.rank else ())
            if key[0] == name
        }
        error: str = super().paceline_swap(*arguments)
        for key, memory in kept.items():
            plan.views[key].copy_(memory)
        return error

    def paceline_stages_apart(self: Any) -> bool:
        """As if its device had memory of its own."""
        return True

    def paceline_staged_slices(self: Any) -> tuple[int, int]:
        """Elements of the newest weights that this rank has staged apart, and of the whole; (0, 0):
        none are."""
        staged = list(self._paceline_weights.staged.values())[-1]
        whole = sum(t.numel() for t in staged.tensors.values()) if staged.slices else 0
        return sum(t.numel() for t in staged.slices.values()), whole

    def paceline_planned(self: Any) -> bool:
        """It has a plan, and nothing of what the plan was made with."""
        weights = self._paceline_weights
        return weights.plan is not None and not hasattr(weights, "quantised")
