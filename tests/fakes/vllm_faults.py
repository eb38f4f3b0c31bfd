"""A vLLM rank with faulty swaps: the file that FAULT names contains the kind of fault."""

import os
from pathlib import Path
from typing import Any

import torch

from rollout_worker.engine.vllm.worker_extension import PacelineRank

FAULT = "PACELINE_TEST_FAULT"
EXTENSION = f"{__name__}.FaultyRank"


class FaultyRank(PacelineRank):
    def paceline_stage(self: Any, *arguments: Any) -> None:
        if Path(os.environ[FAULT]).read_text() != "never staged":
            super().paceline_stage(*arguments)

    def paceline_without_slot(self: Any, names: list[str]) -> list[str]:
        fault = Path(os.environ[FAULT])
        if fault.exists() and fault.read_text() == "no slot":
            return ["model.layers.1.mlp.up_proj"]
        return super().paceline_without_slot(names)

    def paceline_fill_slots(self: Any, tensors: dict[str, torch.Tensor]) -> None:
        match Path(os.environ[FAULT]).read_text().split(": "):
            case ["renamed"]:
                tensors = {f"base_model.model.wrong.{n}": matrix for n, matrix in tensors.items()}
            case ["left out", layer]:
                tensors = {n: matrix for n, matrix in tensors.items() if layer not in n}
            case ["scaled twice"]:
                tensors = {n: m * 2 if ".lora_B." in n else m for n, m in tensors.items()}
        super().paceline_fill_slots(tensors)

    def paceline_fill(self: Any, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        fault = Path(os.environ[FAULT]).read_text()
        wrong = fault == "kernels that compute something else"
        if wrong:
            tensors = tensors | {"model.norm.weight": tensors["model.norm.weight"].clone()}
        if fault.startswith("held back: "):
            layer = model.get_submodule(fault.removeprefix("held back: "))
            before = layer.weight.detach().clone()
        if fault.startswith("left out: "):
            # A fused parameter: vLLM misses no parameter of its own.
            name = fault.removeprefix("left out: ")
            rest = {k: v for k, v in tensors.items() if k != name or self.rank}
            super().paceline_fill(model, rest)
        elif fault == f"half a swap on rank {self.rank}":
            # Once: swapping back is to work.
            Path(os.environ[FAULT]).write_text("")
            some = dict(list(tensors.items())[: len(tensors) // 2])
            super().paceline_fill(model, some)
        else:
            super().paceline_fill(model, tensors)
        if fault.startswith("held back: "):
            layer = model.get_submodule(fault.removeprefix("held back: "))
            layer.weight.data.copy_(before)
        if fault == "a wrong last layer":
            next(p for n, p in model.named_parameters() if "norm" in n).data.mul_(1.5)
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 10.0 if wrong else 1e-6
