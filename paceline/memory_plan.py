"""Memory plan: bytes by part of every kind of process of a run, on its GPU and on its host."""

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from paceline.config.model_files import positions
from paceline.config.schema import Config
from paceline.config.sections.training import ROW_TOKENS
from paceline.errors import BadInput
from paceline.model_head import DEFAULT_CHUNK_MB, tokens_per_chunk
from paceline.model_shape import ModelShape, trainer_dtype
from paceline.worker_pools import (
    POLICY,
    ROLLOUT,
    SCORER,
    desired_workers,
    pool_of,
    pool_of_worker,
)

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
STAGED = 0.8
"""Fraction of an engine's free GPU memory that weights which are staged may take."""
PARKED = 1 << 30
"""Bytes that a process without its turn keeps on a GPU: CUDA's context, kernels and libraries."""
SETTLED = 0.8
"""Fraction of a GPU that rows may fill whose size is not given. Plans of long rows were not
measured on a GPU."""
ROWS = (32_768, 16_384, ROW_TOKENS, 4096, 2048, 1024)
"""Tokens of a row to choose from."""
SHARES_GPU = "PACELINE_SHARES_GPU"
"""Environment variable of a worker whose GPU other workers of the fleet compute on, too."""
IN_FLIGHT = 3
"""Inputs of blocks that are on the device while they leave for the host, or come back."""
NCCL = 500 << 20
"""Bytes of a communicator on its GPU: 390 to 500 MiB on an H200, 766 MiB the first of a process."""
REMEDIES = {
    "weights": "fleet.policy_ranks: more",
    "frozen base": "fleet.policy_ranks: more",
    "optimizer moments": "train.memory.offload_optimizer = true",
    "reference": "train.memory.offload_frozen = true",
    "gathered weights": "train.memory.reshard_after_forward = true",
    "activations": "model.gradient_checkpointing = true",
    "inputs of blocks": "train.memory.offload_activations = true",
    "activations outside blocks": "train.memory.tokens_per_microbatch: fewer",
    "published weights": "train.memory.offload_publishing = true",
    "engine weights": 'rollout.tensor_parallel: more, with rollout.engine = "vllm"',
    "KV cache of one sequence": "rollout.max_context: less",
    "scorer weights": "takes_turns = false of the scorer, with a device of its own",
    "scorer activations": "batch_size of the scorer: less",
}
"""Settings that shrink a part or have the host hold it; docs/trainer-memory.md has their prices."""


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
    """One process, or one GPU of an engine: bytes by part on the device, and in host memory."""

    name: str
    pool: str
    gpu: dict[str, int]
    host: dict[str, int]
    beside: int = 0
    """Bytes on its GPU of other processes: that take turns with it, or are there in its turn."""

    @property
    def remedies(self) -> list[str]:
        """Settings that help if it does not fit: those of the largest parts first."""
        largest_first = sorted(self.gpu, key=self.gpu.__getitem__, reverse=True)
        return [REMEDIES[part] for part in largest_first if part in REMEDIES]


Shapes = Mapping[str, ModelShape]
"""Shapes of scorers' models, by name."""
NONE: Shapes = MappingProxyType({})


def memory_plan(config: Config, shape: ModelShape, scorers: Shapes = NONE) -> list[ProcessPlan]:
    """Plans of a policy rank, of a rollout worker unless the data is recorded, and of those of
    ``scorers`` that share devices. Other models are taken to have the ``shape`` of the policy."""
    plans = [_policy(config, shape), *([] if config.recorded else [_rollout(config, shape)])]
    if not config.takes_turns:
        return plans
    parked = [PARKED + plan.gpu.get("communicators", 0) for plan in plans]
    counts, room = scorers_of_a_pair(config), scorer_room(config, scorers)
    policy = replace(plans[0], beside=parked[1] + PARKED * sum(counts.values()))
    engine = replace(plans[1], beside=parked[0] + room)
    scored = [_scorer(config, name, scorers[name]) for name in counts if name in scorers]
    others = engine.beside + sum(engine.gpu.values())  # and PARKED, as this one has in ``room``
    scored = [replace(plan, beside=others - sum(plan.gpu.values())) for plan in scored]
    return [policy, engine, *scored]


def scorers_of_a_pair(config: Config) -> dict[str, int]:
    """Workers of each scorer at the devices of the pair that has the most."""
    counts, pairs = config.scorer_workers, config.fleet.policy
    return {name: -(-n // pairs) for name, n in counts.items() if config.scorer_shares(name)}


def scorer_room(config: Config, scorers: Shapes) -> int:
    """Bytes of a pair's GPU that scorers have in generation's turn."""
    counts = scorers_of_a_pair(config)
    plans = {name: _scorer(config, name, scorers[name]) for name in counts if name in scorers}
    return sum(counts[name] * (sum(plan.gpu.values()) + PARKED) for name, plan in plans.items())


def fits_side_by_side(config: Config, shape: ModelShape, gpu: Gpu, scorers: Shapes = NONE) -> bool:
    """True if a policy rank, an engine and all workers of ``scorers`` have room on one GPU at the
    same time."""
    plans, counts = memory_plan(config, shape), config.scorer_workers
    for name in scorers:
        plans += counts[name] * [_scorer(config, name, scorers[name])]
    return sum(sum(plan.gpu.values()) + PARKED for plan in plans) <= gpu.bytes * RESERVE


def host_bytes(
    config: Config, shape: ModelShape, here: Collection[str] | None = None, scorers: Shapes = NONE
) -> dict[str, int]:
    """Host memory by kind of process, without programs: of the workers named ``here``, or of all of
    [fleet]."""
    counts = desired_workers(config) if here is None else Counter(map(pool_of_worker, here))
    found = {}
    for plan in memory_plan(config, shape, scorers):
        ranks = config.fleet.policy_ranks if plan.pool == POLICY else 1
        found[plan.name] = ranks * counts.get(plan.pool, 0) * sum(plan.host.values())
    return found


def room_of_a_turn(total: int) -> int:
    """Bytes of a GPU of ``total`` that are free when a turn begins: the other worker has parked."""
    return int(RESERVE * total) - PARKED - 2 * NCCL


def settled(config: Config, shape: ModelShape, gpu: Gpu) -> Config:
    """``config`` with values in place of "auto" for the size of a row and for recomputation: the
    longest rows that ``gpu`` has room for without recomputation; if it has none for rows of the
    default size, the longest with it; if none of these fits, the shortest. No row is shorter than
    the longest sequence."""
    memory, again = config.train.memory, config.model.gradient_checkpointing
    given, longest = memory.tokens_per_microbatch, _longest(config)
    rows = sorted({max(row, longest) for row in ROWS}, reverse=True) if given == "auto" else [given]
    choices = [(row, False) for row in rows if row >= min(ROW_TOKENS, rows[0])]
    choices += [(row, True) for row in rows]
    if again != "auto":
        choices = [(row, again) for row in rows]
    for row, recomputes in choices:
        chosen = with_rows(config, row, recomputes)
        policy = memory_plan(chosen, shape)[0]
        if sum(policy.gpu.values()) + policy.beside <= SETTLED * gpu.bytes:
            break
    return chosen


def with_rows(config: Config, tokens: int, recomputes: bool) -> Config:
    """``config`` with rows of so many tokens, and with recomputation or without."""
    model = config.model.model_copy(update={"gradient_checkpointing": recomputes})
    memory = config.train.memory.model_copy(update={"tokens_per_microbatch": tokens})
    train = config.train.model_copy(update={"memory": memory})
    return config.model_copy(update={"model": model, "train": train})


def problems(plans: list[ProcessPlan], gpu: Gpu) -> Iterator[tuple[str, str]]:
    """Each process that does not fit, and its remedy."""
    for plan in plans:
        room = gpu.bytes * RESERVE - plan.beside
        if (needed := sum(plan.gpu.values())) > room:
            part = max(plan.gpu, key=plan.gpu.__getitem__)
            yield (
                f"a {plan.name} needs {needed / GIB:.1f} GiB, and {gpu.name} has {room / GIB:.1f} "
                f"GiB to give; the largest part is {part}, {plan.gpu[part] / GIB:.1f} GiB",
                "Change one of: " + "; ".join(plan.remedies),
            )


def _policy(config: Config, shape: ModelShape) -> ProcessPlan:
    train, memory, ranks = config.train, config.train.memory, config.fleet.policy_ranks
    loss, tokens = config.built_in, memory.row_tokens
    width = _width(trainer_dtype(config))
    models = 2 if loss is not None and loss.critic else 1
    weights = models * (shape.adapters or shape.parameters)  # That are trained
    whole, roots = models * shape.parameters, models * shape.root_parameters
    gpu = dict.fromkeys(("weights", "gradients", "reduction scratch"), 4 * weights // ranks)
    host = {"loading": (width if shape.adapters else 4) * shape.parameters // ranks}
    if shape.adapters:
        gpu["frozen base"] = width * whole // ranks
    (host if memory.offload_optimizer else gpu)["optimizer moments"] = 8 * weights // ranks
    reference = (loss is not None and loss.reference) or train.loss.kl_coef > 0
    is_base = shape.adapters and train.loss.reference_path in (None, config.model.path)
    if reference and not is_base:
        frozen = width * shape.parameters // ranks
        (host if memory.offload_frozen else gpu)["reference"] = frozen
        if memory.offload_frozen and ranks == 1:
            # The block that computes, and the next one.
            blocks = width * (2 * shape.block_parameters + shape.root_parameters)
            gpu["blocks of the reference"] = blocks
    if ranks == 1 and width == 2:
        gpu["copies of the weights"] = width * weights
    elif ranks > 1:
        # FSDP2 prefetches one block, and gathers in the type in which it computes. Embeddings and
        # head stay whole until their backward.
        if memory.reshard_after_forward:
            gpu["gathered blocks"] = width * (2 * shape.block_parameters + roots)
        else:
            gpu["gathered weights"] = width * whole
        of_a_block = shape.adapters // shape.layers or shape.block_parameters + roots
        gpu["gradients of a block"] = 4 * of_a_block
    if config.model.recomputes:
        inputs = models * tokens * shape.block_inputs
        (host if memory.offload_activations else gpu)["inputs of blocks"] = inputs
        if memory.offload_activations:
            gpu["inputs on their way"] = IN_FLIGHT * inputs // (models * shape.layers)
        gpu["activations of a block"] = models * tokens * shape.block_saved
    else:
        gpu["activations"] = models * tokens * shape.blocks_saved
    gpu["activations outside blocks"] = models * tokens * shape.root_saved
    gpu["logits"] = head_scratch_bytes(
        tokens,
        shape.hidden,
        shape.vocabulary,
        DEFAULT_CHUNK_MB,
        entropy_gradient=bool(train.loss.entropy_coef),
    )
    host["checkpoint"] = 12 * weights // ranks  # Weights and moments
    if config.takes_turns:
        state = ("weights", "frozen base", "optimizer moments", "reference")
        host["state without a turn"] = sum(gpu.get(part, 0) for part in state)
    gpu["communicators"] = NCCL * ((config.fleet.policy > 1) + (ranks > 1))
    if not config.recorded:
        # A rank's buckets of two versions: links still send the older, or compare with it.
        wire = _engine_width(config) * (shape.adapters or shape.parameters) // ranks
        there = memory.offload_publishing or config.takes_turns
        (host if there else gpu)["published weights"] = 2 * wire
        if config.rollout.weight_deltas:
            host["encoded deltas"] = wire
    return ProcessPlan("policy rank", POLICY, gpu, host)


def head_scratch_bytes(
    tokens: int, hidden: int, vocabulary: int, chunk_mb: float, *, entropy_gradient: bool = False
) -> int:
    """Most bytes that scoring ``tokens`` targets of a row and its backward pass hold beside weights
    and gradients.

    Three times the logits of a chunk, four with the gradient of the entropy (measured), and with
    several chunks the gradient of the head twice more. Caps and scales of logits (Gemma, Cohere,
    Granite) are not in it, nor are sharded heads.
    """
    chunk = min(tokens, tokens_per_chunk(vocabulary, chunk_mb))
    logits = (4 if entropy_gradient else 3) * chunk * vocabulary * 4
    return logits + (2 * vocabulary * hidden * 4 if chunk < tokens else 0)


def _rollout(config: Config, shape: ModelShape) -> ProcessPlan:
    """One rank of an engine, with a cache for one sequence of full length."""
    rollout, devices, width = config.rollout, config.rollout.tensor_parallel, _engine_width(config)
    weights, published = width * shape.parameters, width * (shape.adapters or shape.parameters)
    gpu = {
        "engine weights": (weights + width * shape.adapters) // devices,
        "KV cache of one sequence": width * shape.kv_elements * _longest(config) // devices,
    }
    # Weights that arrive, and those before them, on which deltas build or which a relay still
    # hands on.
    two = (rollout.weight_deltas and width == 2) or config.relay_fanout > 0
    host = {"received weights": (2 if two else 1) * published}
    if rollout.engine == "vllm":
        host["weights that ranks share"] = 2 * published  # Those of a swap, and those before
    return ProcessPlan("rollout worker", ROLLOUT, gpu, host)


def _scorer(config: Config, name: str, shape: ModelShape) -> ProcessPlan:
    """A scorer of a model, with a batch of the longest completions."""
    scorer = config.scorers.by_name[name]
    width = _width(trainer_dtype(config) if scorer.dtype == "auto" else scorer.dtype)
    tokens = scorer.batch_size * min(_longest(config), scorer.max_context or sys.maxsize)
    weights = width * shape.parameters
    gpu = {"scorer weights": weights, "scorer activations": tokens * shape.block_saved}
    if scorer.kind == "logprobs":
        gpu["logits"] = head_scratch_bytes(tokens, 0, shape.vocabulary, DEFAULT_CHUNK_MB)
    return ProcessPlan(f"scorer {name}", pool_of(SCORER, name), gpu, {"state": weights})


def _longest(config: Config) -> int:
    """Tokens of the longest sequence that the model takes."""
    return min(config.longest_sequence, positions(config.model.path) or config.longest_sequence)


def engine_share(weights: int, version: int, gpu: int, beside: int = 0) -> float:
    """Fraction of a GPU of ``gpu`` bytes that an engine may fill with its ``weights`` and its
    cache, if others have ``beside`` bytes in its turn. There is room for the ``version`` that comes
    next, too, if that leaves the cache at least half of what it could have; else a rank takes the
    next version from host memory."""
    room, staged = RESERVE * gpu - beside, version / STAGED
    cache = room - weights
    return (room - staged if staged <= cache / 2 else room) // (gpu / 100) / 100


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _engine_width(config: Config) -> int:
    dtype = config.rollout.dtype
    return _width(trainer_dtype(config) if dtype == "auto" else dtype)
