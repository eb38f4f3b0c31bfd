"""Adapters in vLLM: its engine arguments, and on each rank the slots that its kernels read.

    rollout worker: scaled() ──► shared memory ──► each rank: fill() ──► one slot of every layer
                                                          slots() ◄── compared with what came

Every request carries the one adapter. Its tensors are replaced in place, between two steps, and
never pass through a file. vLLM says nothing if it has no place for a tensor, and goes on with the
base: so what counts is what the slots hold.

Where a layer has no slot, vLLM knows of no adapters: whole weights are made of each version and of
the base, always anew, and take the way of whole weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from rollout_worker.engine.parameters import ParameterPart
from rollout_worker.engine.vllm import internals

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NUMBER = 1  # vLLM's id of the adapter


def request() -> LoRARequest:
    """The adapter of every request. Its path is never opened: the adapter is loaded already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", NUMBER, "/dev/null")


def obstacle(
    matrices: Mapping[str, Tensor], given: Mapping[str, Any], architectures: Sequence[str] | None
) -> str:
    """The reason why vLLM has no slots for adapters of these ``matrices``, by their names on the
    wire; empty if none is known. ``given``: the user's engine arguments."""
    from vllm.config.lora import MaxLoRARanks

    if given.get("enable_lora") is False:
        return "rollout.vllm.enable_lora is false"
    if (rank := rank_of(matrices)) > (most := max(get_args(MaxLoRARanks))):
        return f"model.lora.rank is {rank}, and vLLM takes at most {most}"
    if given.get("pipeline_parallel_size", 1) > 1:
        return "adapters cannot be compared on the ranks of rollout.vllm.pipeline_parallel_size"
    return "" if internals.takes_adapters(architectures) else f"vLLM has none for {architectures}"


def arguments(matrices: Mapping[str, Tensor]) -> dict[str, Any]:
    """Engine arguments for adapters of these ``matrices``."""
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(r for r in get_args(MaxLoRARanks) if r >= rank_of(matrices)),
        # Others get no slot: a slot takes memory, and time in every step.
        "lora_target_modules": sorted({layer_of(name).rpartition(".")[2] for name in matrices}),
        # The base comes from its path; adapters alone come over the weights link.
        "load_format": "auto",
    }


def rank_of(tensors: Mapping[str, Tensor]) -> int:
    return next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)


def layer_of(name: str) -> str:
    """Name of the layer that the adapter ``name`` on the wire belongs to."""
    return name.rpartition(".lora_")[0]


def scaled(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The adapters with their scale multiplied in: vLLM's kernels multiply with none."""
    return {n: tensor * scale if ".lora_B." in n else tensor for n, tensor in tensors.items()}


# ---- on a rank


def fill(manager: Any, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the adapter in every layer's slot. ``manager``: vLLM's LoRAModelManager."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    rank = rank_of(tensors)
    loaded = LoRAModel.from_lora_tensors(
        NUMBER,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # a scaling of 1
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renamed(manager),
    )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(loaded)
    manager.activate_adapter(NUMBER)


def slots(manager: Any, tensors: Mapping[str, Tensor]) -> tuple[list[ParameterPart], list[str]]:
    """The adapter's slots, with what vLLM should have put there; and the names of the layers among
    ``tensors`` that have no slot."""
    arrived: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, kind = _place(manager, name)
        arrived.setdefault(layer, {})[kind] = tensor
    parts: list[ParameterPart] = []
    if NUMBER not in manager.lora_index_to_id:
        return parts, sorted(arrived)
    slot = manager.lora_index_to_id.index(NUMBER)
    for path, layer in manager.modules.items():
        fused = manager.packed_modules.get(path)
        pairs = [arrived.pop(name, None) for name in fused or [path]]
        if not any(pairs):
            continue
        matrices = [[pair and pair[kind] for pair in pairs] for kind in ("A", "B")]
        # The layer itself lays its slices out, but in memory that no kernel reads.
        empty = copy.copy(layer)
        stacks = layer.lora_a_stacked, layer.lora_b_stacked
        empty.lora_a_stacked, empty.lora_b_stacked = (
            tuple(torch.zeros_like(part[:1]) for part in stack) for stack in stacks
        )
        empty.set_lora(0, *(matrices if fused else [of_kind[0] for of_kind in matrices]))
        expected = (*empty.lora_a_stacked, *empty.lora_b_stacked)
        parts += [
            ParameterPart(path, held[slot], source[0])
            for held, source in zip((*stacks[0], *stacks[1]), expected, strict=True)
        ]
    return parts, sorted(arrived)


def without_slot(manager: Any, names: Iterable[str]) -> list[str]:
    """Layers among those of adapters with these ``names`` that vLLM has no slot for."""
    known: set[str] = set()
    for path, layer in manager.modules.items():
        # Those of the head and of experts are laid out otherwise.
        if isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            known.update(manager.packed_modules.get(path, [path]))
    return sorted({layer_of(name) for name in names if _place(manager, name)[0] not in known})


def _place(manager: Any, name: str) -> tuple[str, str]:
    """Layer in vLLM's model, and A or B, of an adapter's ``name`` on the wire."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    layer, is_a = parse_fine_tuned_lora_name(name, _renamed(manager))
    return layer, "A" if is_a else "B"


def _renamed(manager: Any) -> Any:
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()
