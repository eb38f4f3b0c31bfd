"""A rank whose kernels compute with the parameters themselves, as on a GPU. Imported by vLLM's worker,
before it loads a model; never by a test."""

from __future__ import annotations

from typing import Any

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from rollout_worker.engine.vllm.worker_extension import PacelineRank

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


class UnpackedRank(PacelineRank):
    def paceline_planned(self: Any) -> bool:
        return self._paceline_weights.plan is not None
