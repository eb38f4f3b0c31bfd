"""Memory plan: bytes by part of every kind of process of a run, on its GPU and on its host."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.model_files import positions
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.model_head import head_scratch_bytes
from paceline.model_shape import ModelShape, trainer_dtype

GIB = 1 << 30
GPUS = {
    "l4-24g": 22.0,
    "a10-24g": 22.0,
    "rtx4090-24g": 23.5,
    "l40s-48g": 44.4,
    "a100-40g": 39.4,
    "a100-80g": 79.1,
    "h100-80g": 79.1,
    "h800-80g": 79.1,
    "h20-96g": 95.0,
    "h200-141g": 139.8,
    "b200-180g": 178.0,
}
"""GiB that CUDA reports, below the size in the name, rounded down."""
RESERVE = 0.92
"""Fraction of a GPU that a plan may fill, beside CUDA's context and the allocator's gaps."""
STATE = {"weights": 4, "gradients": 4, "optimizer moments": 8, "reduction scratch": 4}
"""Bytes per trained parameter, divided by the ranks of a replica."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    bytes: int


def named_gpu(name: str) -> Gpu:
    """A GPU of the list, also without the size in its name, or ``NNg`` for one of so many GiB.
    Raises BadInput."""
    known = [full for full in GPUS if name in (full, full.rpartition("-")[0])]
    if len(known) == 1:
        return Gpu(known[0], int(GPUS[known[0]] * GIB))
    if size := re.fullmatch(r"([1-9][0-9]{0,3})g", name):
        return Gpu(name, int(size[1]) * GIB)
    names = " or ".join(known or GPUS)
    raise BadInput(f"--gpu {name}: give {names}, or its size in GiB, as in 80g")


def found_gpu() -> Gpu | None:
    """The smallest GPU that torch sees on this machine; None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = map(torch.cuda.get_device_properties, range(count))
    found = (Gpu(gpu.name, gpu.total_memory) for gpu in seen)
    return min(found, key=lambda gpu: gpu.bytes, default=None)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process, or one GPU of an engine: bytes by part on the device, and in host memory.
    ``changes``: settings that help if it does not fit, the most effective first."""

    name: str
    gpu: dict[str, int]
    host: dict[str, int]
    changes: tuple[str, ...]


def memory_plan(config: Config, shape: ModelShape) -> list[ProcessPlan]:
    """Plans of a policy rank and, unless the data is recorded, of a rollout worker. Other models
    are taken to have the ``shape`` of the policy."""
    return [_policy(config, shape), *([] if config.recorded else [_rollout(config, shape)])]


def problems(plans: list[ProcessPlan], gpu: Gpu) -> Iterator[tuple[str, str]]:
    """Each process that does not fit, and its remedy."""
    room = gpu.bytes * RESERVE
    for plan in plans:
        if (needed := sum(plan.gpu.values())) > room:
            part = max(plan.gpu, key=plan.gpu.__getitem__)
            yield (
                f"a {plan.name} needs {needed / GIB:.1f} GiB, and {gpu.name} has {room / GIB:.1f} "
                f"GiB to give; the largest part is {part}, {plan.gpu[part] / GIB:.1f} GiB",
                "Change one of: " + "; ".join(plan.changes),
            )


def _policy(config: Config, shape: ModelShape) -> ProcessPlan:
    train, memory, ranks = config.train, config.train.memory, config.fleet.policy_ranks
    loss, several, width = config.built_in, ranks > 1, _width(trainer_dtype(config))
    trained = 2 if loss is not None and loss.critic else 1
    frozen = (loss is not None and loss.reference) or train.loss.kl_coef > 0
    weights, roots = trained * shape.parameters, trained * shape.root_parameters
    parts = {name: size * weights // ranks for name, size in STATE.items()}
    # Each rank reads its float32 slices, by way of host memory.
    host = {"loading": 4 * shape.parameters // ranks}
    if memory.offload_optimizer:
        host["optimizer moments"] = parts.pop("optimizer moments")
    if frozen:
        (host if memory.offload_frozen else parts)["reference"] = 4 * shape.parameters // ranks
        if memory.offload_frozen and not several:
            parts["block of the reference"] = 4 * (shape.block_parameters + shape.root_parameters)
    if several:
        # FSDP2 prefetches one block. Embeddings and head stay whole until their backward.
        whole = 2 * shape.block_parameters + roots if memory.reshard_after_forward else weights
        parts["gathered blocks"] = width * whole + 4 * (shape.block_parameters + roots)
        if memory.gradient_sync == "step":
            parts["gradients until the last row"] = 4 * weights
    else:
        # Several ranks gather in the type in which they compute.
        parts["weights converted by autocast"] = trained * shape.weight_copies
    parts["activations"] = trained * activation_bytes(config, shape)
    parts["logits"] = head_scratch_bytes(
        memory.tokens_per_microbatch,
        shape.hidden,
        shape.vocabulary,
        memory.logits_chunk_mb,
        entropy_gradient=bool(train.loss.entropy_coef),
    )
    if not config.recorded:
        # A rank's buckets of two versions: links still send the older, or compare with it.
        wire = _engine_width(config) * shape.parameters // ranks
        (host if memory.offload_publishing else parts)["published weights"] = 2 * wire
        if config.rollout.weight_deltas:
            host["encoded deltas"] = wire
    if memory.offload_activations:
        host["activations"] = trained * memory.tokens_per_microbatch * shape.block_inputs
    checkpointing, published = config.model.gradient_checkpointing, not config.recorded
    changes = {  # docs/trainer-memory.md says what each costs
        "train.memory.reshard_after_forward = true": several and not memory.reshard_after_forward,
        'train.memory.gradient_sync = "row"': several and memory.gradient_sync == "step",
        "model.gradient_checkpointing = true": not checkpointing,
        "fleet.policy_ranks: more": True,
        "train.memory.offload_frozen = true": frozen and not memory.offload_frozen,
        "train.memory.offload_activations = true": checkpointing and not memory.offload_activations,
        "train.memory.offload_publishing = true": published and not memory.offload_publishing,
        "train.memory.offload_optimizer = true": not memory.offload_optimizer,
        "train.memory.tokens_per_microbatch: fewer": True,
        'model.dtype = "bfloat16"': width == 4,
    }
    return ProcessPlan("policy rank", parts, host, _open(changes))


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes that the blocks keep of one row for its backward pass."""
    tokens, memory = config.train.memory.tokens_per_microbatch, config.train.memory
    if not config.model.gradient_checkpointing:
        return tokens * (shape.block_saved * shape.layers + shape.root_saved)
    inputs = 0 if memory.offload_activations else shape.block_inputs
    return tokens * (inputs + shape.block_saved + shape.root_saved)


def _rollout(config: Config, shape: ModelShape) -> ProcessPlan:
    """One rank of an engine, with a cache for one sequence of full length."""
    rollout, devices, width = config.rollout, config.rollout.tensor_parallel, _engine_width(config)
    weights = width * shape.parameters
    context = min(config.longest_sequence, positions(config.model.path) or config.longest_sequence)
    parts = {
        "engine weights": weights // devices,
        "KV cache of one sequence": width * shape.kv_elements * context // devices,
    }
    # Weights that arrive, and those before them, on which deltas build or which a relay still
    # hands on.
    two = (rollout.weight_deltas and width == 2) or config.relay_fanout > 0
    host = {"received weights": (2 if two else 1) * weights}
    if rollout.engine == "vllm":
        host["weights that ranks share"] = weights
    changes = {
        'rollout.dtype = "bfloat16"': width == 4,
        "rollout.tensor_parallel: more": rollout.engine == "vllm",
        "rollout.max_context: less": True,
    }
    return ProcessPlan("rollout worker", parts, host, _open(changes))


def _open(changes: dict[str, bool]) -> tuple[str, ...]:
    """Changes that are not made yet, and help."""
    return tuple(change for change, helps in changes.items() if helps)


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _engine_width(config: Config) -> int:
    dtype = config.rollout.dtype
    return _width(trainer_dtype(config) if dtype == "auto" else dtype)
