"""Memory plan: bytes by part of every kind of process of a run, on its GPU and on its host.

A policy rank holds, of each part that it trains, slices of float32 weights, gradients, two moments
and the scratch buffer of the elastic reduction: 20 bytes a parameter, divided by the ranks of its
replica. What it gathers, keeps for the backward pass and publishes comes on top. Attention and
publishing each have one function here, because their memory depends on how they are done and not on
the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.memory_plan.gpus import GIB, Gpu
from paceline.memory_plan.head_memory import head_scratch_bytes
from paceline.memory_plan.model_shape import ModelShape

RESERVE = 0.92
"""Share of a GPU that a plan may fill. The rest is for CUDA's context and for what its allocator
cannot use."""
STATE = {"weights": 4, "gradients": 4, "optimizer moments": 8, "reduction scratch": 4}
"""Bytes per trained parameter on a rank, before they are divided by the ranks. All of it is
float32."""
MOMENTS_BUCKET = 8 << 24
"""Bytes of both moments that the device holds of parameters under way
(policy_worker.offload.moments)."""
PUBLISHING_BUFFERS = 2 << 24
"""Bytes of the device's buffers through which slices of weights become shares, with several ranks
(policy_worker.ranks.share_exchange)."""
"""Of a chunk in float32: logits, their log-softmax, and in the backward pass the gradients of both;
one more for the gradient of the entropy."""
ENGINE_SHARE = 0.9
"""Share of a GPU that vLLM takes unless rollout.vllm.gpu_memory_utilization says otherwise."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process, or one GPU's share of an engine."""

    name: str
    gpu: dict[str, int]
    """Bytes by part, on the device that computes."""
    host: dict[str, int]
    """Bytes by part, in host memory, at its peak."""
    remedies: tuple[str, ...]
    """What to change if it does not fit, the most effective first."""

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values())

    def fits(self, gpu: Gpu) -> bool:
        return self.gpu_bytes <= gpu.bytes * RESERVE

    def problem(self, gpu: Gpu) -> str | None:
        """Why it cannot run on ``gpu``; None if it can."""
        if self.fits(gpu):
            return None
        part, most = max(self.gpu.items(), key=lambda item: item[1])
        return (
            f"a {self.name} needs {self.gpu_bytes / GIB:.1f} GiB, and {gpu.name} has {gpu.bytes * RESERVE / GIB:.1f} GiB "
            f"to give; the largest part is {part}, {most / GIB:.1f} GiB"
        )


def memory_plan(config: Config, shape: ModelShape) -> list[ProcessPlan]:
    """Of a policy rank and, unless the data is recorded, of a rollout worker. ``shape``: of
    model.path.

    A critic, a reference, a teacher and scorers are taken to have the size of the policy.
    """
    plans = [_policy(config, shape)]
    if not config.recorded:
        plans.append(_rollout(config, shape))
    return plans


def trained_parts(config: Config) -> int:
    """Models of which a rank holds gradients and moments."""
    return 2 if config.train.algorithm == "ppo" else 1


def frozen_parts(config: Config) -> int:
    """Models that a rank holds without gradients: the reference, if there is one."""
    algorithm = config.train.algorithm
    paired = algorithm in ("dpo", "ipo", "kto", "online_dpo")
    return int(paired or config.train.loss.kl_coef > 0)


def _policy(config: Config, shape: ModelShape) -> ProcessPlan:
    ranks, trained = config.fleet.policy_ranks, trained_parts(config)
    parts = {name: size * trained * shape.parameters // ranks for name, size in STATE.items()}
    host = dict[str, int]()
    if config.train.memory.offload_optimizer:
        host["optimizer moments"] = parts.pop("optimizer moments")
        parts["moments during their update"] = MOMENTS_BUCKET
    if frozen := frozen_parts(config):
        where = host if config.train.memory.offload_frozen else parts
        where["reference"] = frozen * 4 * shape.parameters // ranks
        if config.train.memory.offload_frozen and ranks == 1:
            parts["block of the reference"] = 4 * (shape.block_parameters + shape.root_parameters)
    if ranks > 1:
        parts["gathered blocks"] = gathered_bytes(config, shape)
        if config.train.memory.gradient_sync == "step":
            parts["gradients until the last row"] = 4 * trained * shape.parameters
    else:
        # Several ranks gather in the type in which they compute.
        parts["weights converted by autocast"] = trained * shape.weight_copies
    parts["activations"] = trained * activation_bytes(config, shape)
    parts["logits"] = logits_bytes(config, shape)
    if not config.recorded:
        (host if config.train.memory.offload_publishing else parts)["published weights"] = (
            publishing_bytes(config, shape)
        )
        if ranks > 1:
            parts["weights on their way to shares"] = PUBLISHING_BUFFERS
    remedies = ["fleet.policy_ranks: more ranks divide weights, gradients and moments"]
    if not config.model.gradient_checkpointing:
        remedies.insert(
            0, "model.gradient_checkpointing = true: activations of one block at a time"
        )
    if ranks > 1 and config.train.memory.gradient_sync == "step":
        remedies.insert(
            0, 'train.memory.gradient_sync = "row": ranks hold slices of gradients only'
        )
    if ranks > 1 and not config.train.memory.reshard_after_forward:
        remedies.insert(0, "train.memory.reshard_after_forward = true: no whole model on a rank")
    if frozen and not config.train.memory.offload_frozen:
        remedies.append("train.memory.offload_frozen = true: the reference in host memory")
    if config.model.gradient_checkpointing and not config.train.memory.offload_activations:
        remedies.append("train.memory.offload_activations = true: inputs of blocks in host memory")
    if not config.recorded and not config.train.memory.offload_publishing:
        remedies.append("train.memory.offload_publishing = true: published weights in host memory")
    if not config.train.memory.offload_optimizer:
        remedies.append("train.memory.offload_optimizer = true: moments in host memory")
    remedies.append("train.memory.tokens_per_microbatch: fewer tokens in a row")
    if config.model.dtype == "float32":
        remedies.append('model.dtype = "bfloat16": about half of the activations')
    # Each rank reads its float32 slices, by way of host memory.
    host["loading"] = 4 * shape.parameters // ranks
    if config.train.memory.offload_activations:
        host["activations"] = trained * block_input_bytes(config, shape)
    if not config.recorded and config.rollout.weight_deltas:
        host["encoded deltas"] = wire_bytes(config, shape) // ranks
    return ProcessPlan("policy rank", parts, host, tuple(remedies))


def gathered_bytes(config: Config, shape: ModelShape) -> int:
    """Whole weights, and whole gradients of one block, that a rank of a sharded replica holds in a
    row."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    # Embeddings and head stay whole from a model's forward to its backward.
    roots = trained_parts(config) * shape.root_parameters
    gradients = 4 * (shape.block_parameters + roots)
    if config.train.memory.reshard_after_forward:
        # FSDP2 prefetches one block.
        return width * (2 * shape.block_parameters + roots) + gradients
    return trained_parts(config) * width * shape.parameters + gradients


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """What the blocks keep of one row for its backward pass, without shared prompts that attention
    copies."""
    tokens = config.train.memory.tokens_per_microbatch
    if config.model.gradient_checkpointing:
        stored = 0 if config.train.memory.offload_activations else block_input_bytes(config, shape)
        return stored + tokens * (shape.block_saved + shape.root_saved)
    return tokens * (shape.block_saved * shape.layers + shape.root_saved)


def block_input_bytes(config: Config, shape: ModelShape) -> int:
    """What gradient checkpointing keeps of one row."""
    # The residual stream is float32 under autocast too.
    return config.train.memory.tokens_per_microbatch * 4 * shape.hidden * shape.layers


def logits_bytes(config: Config, shape: ModelShape) -> int:
    """Of the chunk of a row that goes through the head and log-softmax at once."""
    train = config.train
    return head_scratch_bytes(
        train.memory.tokens_per_microbatch,
        shape.hidden,
        shape.vocabulary,
        train.memory.logits_chunk_mb,
        entropy_gradient=bool(train.loss.entropy_coef),
    )


def publishing_bytes(config: Config, shape: ModelShape) -> int:
    """A rank's share of two versions: of the newest, and of the one before it, which links still
    send or compare with."""
    return 2 * wire_bytes(config, shape) // config.fleet.policy_ranks


def wire_bytes(config: Config, shape: ModelShape) -> int:
    return engine_width(config) * shape.parameters


def engine_width(config: Config) -> int:
    """Bytes of a weight in the engine."""
    dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    return 2 if dtype == "bfloat16" else 4


def _rollout(config: Config, shape: ModelShape) -> ProcessPlan:
    """The device of one rank of an engine; the least cache with which it can serve is one sequence
    of full length."""
    devices = config.rollout.tensor_parallel
    context = (
        config.rollout.max_context or config.data.max_prompt_tokens + config.rollout.max_tokens
    )
    if shape.positions is not None:
        context = min(context, shape.positions)
    width = engine_width(config)
    parts = {
        "engine weights": wire_bytes(config, shape) // devices,
        "KV cache of one sequence": width * shape.kv_elements * context // devices,
    }
    remedies = ["rollout.max_context: shorter sequences"]
    if config.rollout.engine == "vllm":
        remedies.insert(0, "rollout.tensor_parallel: more GPUs for one engine")
    if width == 4:
        remedies.insert(0, 'rollout.dtype = "bfloat16": half of the weights and of the cache')
    # Those that arrive, and those before them, on which deltas build or which a relay still hands
    # on.
    kept = (config.rollout.weight_deltas and width == 2) or config.relay_fanout > 0
    host = {"received weights": (2 if kept else 1) * wire_bytes(config, shape)}
    if config.rollout.engine == "vllm":
        host["weights that ranks share"] = wire_bytes(config, shape)
    return ProcessPlan("rollout worker", parts, host, tuple(remedies))


def kv_sequences(config: Config, shape: ModelShape, gpu: Gpu) -> int:
    """Sequences of full length whose keys and values fit beside the weights of an engine on such
    GPUs."""
    plan = _rollout(config, shape)
    one = plan.gpu["KV cache of one sequence"]
    share = ENGINE_SHARE
    if config.rollout.engine == "vllm":
        share = float(config.rollout.vllm.get("gpu_memory_utilization", ENGINE_SHARE))
    room = int(gpu.bytes * share) - plan.gpu["engine weights"]
    return max(0, min(config.rollout.max_sequences, room // max(1, one)))


def problems(plans: list[ProcessPlan], gpu: Gpu) -> Iterator[tuple[str, str]]:
    """What does not fit, and the remedies."""
    for plan in plans:
        if why := plan.problem(gpu):
            yield why, "Change one of: " + "; ".join(plan.remedies)
