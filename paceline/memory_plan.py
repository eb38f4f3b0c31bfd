"""Memory plan: bytes by part of every kind of process of a run, on its GPU and on its host."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.model_shape import ModelShape, head_scratch_bytes

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
    names = " or ".join(known) or f"one of {', '.join(GPUS)}, or its size in GiB, as in 80g"
    raise BadInput(f"--gpu {name}: give {names}")


def found_gpu() -> Gpu | None:
    """The smallest GPU that torch sees on this machine; None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [torch.cuda.get_device_properties(i) for i in range(count)]
    return min(
        (Gpu(gpu.name, gpu.total_memory) for gpu in seen), key=lambda g: g.bytes, default=None
    )


RESERVE = 0.92
"""Fraction of a GPU that a plan may fill, beside CUDA's context and the allocator's gaps."""
STATE = {"weights": 4, "gradients": 4, "optimizer moments": 8, "reduction scratch": 4}
"""Bytes per trained parameter, divided by the ranks of a replica."""
MOMENTS_BUCKET = 8 << 24
"""Bytes of both moments that the device holds of parameters under way."""
PUBLISHING_BUFFERS = 2 << 24
"""Bytes of the buffers through which slices of weights become shares, with several ranks."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process, or one GPU of an engine: bytes by part on the device, and in host memory.

    ``remedies``: changes that help if it does not fit, the most effective first.
    """

    name: str
    gpu: dict[str, int]
    host: dict[str, int]
    remedies: tuple[str, ...]

    def fits(self, gpu: Gpu) -> bool:
        return sum(self.gpu.values()) <= gpu.bytes * RESERVE


def memory_plan(config: Config, shape: ModelShape) -> list[ProcessPlan]:
    """Plans of a policy rank and, unless the data is recorded, of a rollout worker. Other models
    are taken to have the ``shape`` of the policy."""
    return [_policy(config, shape), *([] if config.recorded else [_rollout(config, shape)])]


def problems(plans: list[ProcessPlan], gpu: Gpu) -> Iterator[tuple[str, str]]:
    for plan in plans:
        if plan.fits(gpu):
            continue
        part, most = max(plan.gpu.items(), key=lambda item: item[1])
        yield (
            f"a {plan.name} needs {sum(plan.gpu.values()) / GIB:.1f} GiB, and {gpu.name} has "
            f"{gpu.bytes * RESERVE / GIB:.1f} GiB to give; the largest part is {part}, "
            f"{most / GIB:.1f} GiB",
            "Change one of: " + "; ".join(plan.remedies),
        )


def _policy(config: Config, shape: ModelShape) -> ProcessPlan:
    train, memory, ranks = config.train, config.train.memory, config.fleet.policy_ranks
    trained = 2 if config.built_in and config.built_in.critic else 1
    paired = config.built_in is not None and config.built_in.reference
    frozen = paired or train.loss.kl_coef > 0
    wire = 0 if config.recorded else _engine_width(config) * shape.parameters // ranks
    parts = {name: size * trained * shape.parameters // ranks for name, size in STATE.items()}
    # Each rank reads its float32 slices, by way of host memory.
    host = {"loading": 4 * shape.parameters // ranks}
    if memory.offload_optimizer:
        host["optimizer moments"] = parts.pop("optimizer moments")
        parts["moments during their update"] = MOMENTS_BUCKET
    if frozen:
        (host if memory.offload_frozen else parts)["reference"] = 4 * shape.parameters // ranks
        if memory.offload_frozen and ranks == 1:
            parts["block of the reference"] = 4 * (shape.block_parameters + shape.root_parameters)
    if ranks > 1:
        parts["gathered blocks"] = _gathered_bytes(config, shape, trained)
        if memory.gradient_sync == "step":
            parts["gradients until the last row"] = 4 * trained * shape.parameters
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
        (host if memory.offload_publishing else parts)["published weights"] = 2 * wire
        if ranks > 1:
            parts["weights on their way to shares"] = PUBLISHING_BUFFERS
        if config.rollout.weight_deltas:
            host["encoded deltas"] = wire
    if memory.offload_activations:
        host["activations"] = trained * _block_input_bytes(config, shape)
    return ProcessPlan("policy rank", parts, host, _remedies(config, frozen))


def _remedies(config: Config, frozen: bool) -> tuple[str, ...]:
    """Changes that are not made yet; docs/trainer-memory.md says what each costs."""
    model, memory, several = config.model, config.train.memory, config.fleet.policy_ranks > 1
    offloads = model.gradient_checkpointing and not memory.offload_activations
    changes = {
        "train.memory.reshard_after_forward = true": several and not memory.reshard_after_forward,
        'train.memory.gradient_sync = "row"': several and memory.gradient_sync == "step",
        "model.gradient_checkpointing = true": not model.gradient_checkpointing,
        "fleet.policy_ranks: more": True,
        "train.memory.offload_frozen = true": frozen and not memory.offload_frozen,
        "train.memory.offload_activations = true": offloads,
        "train.memory.offload_publishing = true": not (
            config.recorded or memory.offload_publishing
        ),
        "train.memory.offload_optimizer = true": not memory.offload_optimizer,
        "train.memory.tokens_per_microbatch: fewer": True,
        'model.dtype = "bfloat16"': trainer_dtype(config) == "float32",
    }
    return tuple(change for change, helps in changes.items() if helps)


def trainer_dtype(config: Config) -> str:
    """The precision of the trainer on a GPU, for which the plan is made."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def _gathered_bytes(config: Config, shape: ModelShape, trained: int) -> int:
    """Whole weights, and whole gradients of one block, of a rank of a sharded replica."""
    width = 2 if trainer_dtype(config) == "bfloat16" else 4
    # Embeddings and head stay whole from a model's forward to its backward.
    roots = trained * shape.root_parameters
    gradients = 4 * (shape.block_parameters + roots)
    if config.train.memory.reshard_after_forward:
        # FSDP2 prefetches one block.
        return width * (2 * shape.block_parameters + roots) + gradients
    return trained * width * shape.parameters + gradients


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes that the blocks keep of one row for its backward pass."""
    tokens = config.train.memory.tokens_per_microbatch
    if config.model.gradient_checkpointing:
        stored = 0 if config.train.memory.offload_activations else _block_input_bytes(config, shape)
        return stored + tokens * (shape.block_saved + shape.root_saved)
    return tokens * (shape.block_saved * shape.layers + shape.root_saved)


def _block_input_bytes(config: Config, shape: ModelShape) -> int:
    # The residual stream is float32 under autocast too.
    return config.train.memory.tokens_per_microbatch * 4 * shape.hidden * shape.layers


def _engine_width(config: Config) -> int:
    dtype = trainer_dtype(config) if config.rollout.dtype == "auto" else config.rollout.dtype
    return 2 if dtype == "bfloat16" else 4


def _rollout(config: Config, shape: ModelShape) -> ProcessPlan:
    """One rank of an engine, with a cache for one sequence of full length."""
    rollout, devices, width = config.rollout, config.rollout.tensor_parallel, _engine_width(config)
    context = min(config.longest_sequence, shape.positions or config.longest_sequence)
    weights = width * shape.parameters
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
    remedies = tuple(change for change, helps in changes.items() if helps)
    return ProcessPlan("rollout worker", parts, host, remedies)
