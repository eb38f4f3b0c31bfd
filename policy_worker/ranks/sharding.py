"""FSDP2 inside a replica: every rank stores a slice of each parameter, gradient and moment.

    blocks ─ fully_shard ─┐
                          ├─ one device mesh over the ranks, for the life of the process
    root ─── fully_shard ─┘   (embeddings and head; tied ones stay together here)

A forward gathers one block's weights at a time; a backward leaves each rank the sum over ranks of
its slice of the gradient. Rank i of every replica slices the same way, so the elastic mesh that
joins rank i of all replicas can add, transfer and compare slices without gathering them.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from paceline.config.model_files import difference, positions
from paceline.config.schema import Config
from paceline.ids import Step
from paceline.lora import SUFFIXES, LoraError
from paceline.model_shape import blocks_of
from paceline.process.compute_device import compute_dtype
from paceline.process.structured_log import event, first_line
from policy_worker.model.heads import HEAD
from policy_worker.model.host_weights import buffers_to, keep_on_host
from policy_worker.model.policy_model import ModelError, empty_model, load_model
from policy_worker.model.precision import in_bfloat16
from policy_worker.model.train_state import NO_VERSION, TrainState, local_tensor
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.objective import Part
from policy_worker.ranks.sliced_weights import SlicedWeights, begin_adapters, tensors_of
from policy_worker.rows.probe import Unfit, probe
from policy_worker.rows.replica import Replica
from policy_worker.step.optimizer import build_optimizer

log = logging.getLogger(__name__)

# The warning is about in-place operations on the root's output; nothing here does any.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

HOST = torch.device("cpu")
_STAYS = OffloadPolicy()
_MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    cast_forward_inputs=False,  # they are bfloat16 already
)


def load_sharded_state(config: Config, replica: Replica, device: torch.device) -> TrainState:
    """The initial state of one rank of a replica: the weights of the objective's parts, zero
    optimizer state, step 0, version NO_VERSION. Collective in its first use, not in loading. Each
    rank reads its slices of the weights (sliced_weights). Raises ModelError if a model cannot be
    read, and ObjectiveError."""
    torch.manual_seed(config.run.seed)
    objective = load_objective(config)
    tokens = config.model.tokenizer or config.model.path
    for part in objective.trains:
        if part.path and (why := difference(tokens, part.path)):
            raise ModelError(
                f"{part.field or part.name} = {part.path!r} has other tokens than model.path "
                f"({why}): name a model with the tokenizer of model.path"
            )
    parts = {
        part.name: load_sharded(part, config, replica, device, trainable=True)
        for part in objective.trains
    }
    scales = {part.name: part.lr_scale for part in objective.trains}
    optimizer = build_optimizer(parts, config.train, scales)
    scalars = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in objective.scalars.items()
    }
    return TrainState(parts, optimizer, Step(0), NO_VERSION, config, scalars)


def load_again(
    state: TrainState,
    replica: Replica,
    device: torch.device,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Makes ``state`` what load_sharded_state() gave, but for step and version. In place: a second
    state may not fit on ``device``. Raises ModelError."""
    config = state.config
    torch.manual_seed(config.run.seed)
    objective = load_objective(config)
    with torch.no_grad():
        for part in objective.trains:
            model, weights = state.parts[part.name], dict(state.weights_of(part.name))
            _begin_adapters(part, weights, config)
            if config.model.lora is not None and part.head == "lm":
                continue  # nothing has changed its base
            path, _ = _source(part, config)
            stored = SlicedWeights.of(path, model, scalar=part.head == "scalar")
            if stored is not None:
                stored.fill(weights, on_progress)
                continue
            place = HOST if replica.mesh is None else device
            fresh = _load_slices(part, config, replica, place, on_progress)
            found = tensors_of(fresh)
            for name, weight in weights.items():
                local_tensor(weight).copy_(local_tensor(found[name]))
        for moments in state.optimizer.state.values():
            for moment in moments.values():
                local_tensor(moment).zero_()
        for name, value in objective.scalars.items():
            state.scalars[name].fill_(value)


def load_sharded(
    part: Part, config: Config, replica: Replica, device: torch.device, *, trainable: bool
) -> nn.Module:
    """The model of ``part``; of a replica with several ranks, this rank's slices. Raises
    ModelError, also if it cannot be trained on packed rows. With train.memory.offload_frozen the
    weights of a part that is not trainable are in host memory, and come to ``device`` for their
    pass."""
    path, field = _source(part, config)
    # Rows fit model.path: another part may take fewer tokens.
    longest = min(config.longest_sequence, positions(config.model.path) or 0)
    limit = positions(path)
    if limit is not None and limit < longest:
        raise ModelError(
            f"{field} = {path!r} takes {limit} tokens, and sequences of this run have up to "
            f"{longest}: name a model that takes as many, or set rollout.max_context = {limit}"
        )
    model = _load_slices(part, config, replica, device, trainable=trainable)
    half = compute_dtype(config.model, device.type) == "bfloat16"
    tried = partial(probe, model, part.head, device, longest=config.longest_sequence)
    try:
        if not (half and trainable and replica.mesh is None):
            tried(mixed=half)
        else:
            if config.model.lora is None:
                tried()  # in float32, where small differences are no rounding
            with in_bfloat16(model):  # as one rank trains it
                tried(mixed=True)
    except Unfit as error:
        raise ModelError(f"{field} = {path!r} cannot be trained: {error}") from error
    return model


def _source(part: Part, config: Config) -> tuple[str, str]:
    """Path of the model of ``part``, and the setting that gives it."""
    if part.path:
        return part.path, part.field or part.name
    return config.model.path, "model.path"


def _load_slices(
    part: Part,
    config: Config,
    replica: Replica,
    device: torch.device,
    on_progress: Callable[[], None] = lambda: None,
    *,
    trainable: bool = True,
) -> nn.Module:
    on_host = config.train.memory.offload_frozen and not trainable
    place = HOST if on_host else device
    dtype = compute_dtype(config.model, device.type)
    path, field = _source(part, config)
    kind: dict[str, Any] = {"head": part.head, "trainable": trainable}
    kind["frozen"] = getattr(torch, dtype)
    load = partial(load_model, path, config.model, field=field)
    adapted = trainable and config.model.lora is not None
    if replica.mesh is None and not adapted:
        model = load(place, **kind)
        if on_host:
            keep_on_host(model, blocks_of(model), device)
        return model
    shard = partial(
        shard_model,
        mesh=replica.mesh,
        mixed=dtype == "bfloat16",
        # Of a frozen part no backward comes that would let go of what a forward keeps.
        reshard_after_forward=config.train.memory.reshard_after_forward or not trainable,
        offload=CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else _STAYS,
    )
    try:
        model = empty_model(path, config.model, **kind)
        stored = SlicedWeights.of(path, model, scalar=part.head == "scalar")
    except LoraError:
        raise
    except Exception as error:  # of a user's files or model code: loading the whole says what it is
        event(log, "no empty model", logging.WARNING, why=first_line(error))
        stored = None
    if stored is not None:
        # Also of one rank, if its base is bfloat16: the host never holds it in float32.
        stored.read(shard(model) if replica.mesh is not None else model, place, on_progress)
    else:
        event(
            log, "weights read whole, names of files and model differ", logging.WARNING, path=path
        )
        model = load(HOST, **kind)
        if replica.mesh is not None:
            shard(model)
        if not on_host:
            model.to(device)  # buffers
    buffers_to(model, device)
    if adapted:
        _begin_adapters(part, tensors_of(model), config)
    return model


def _begin_adapters(part: Part, weights: Mapping[str, Tensor], config: Config) -> None:
    """The first part alone begins with the adapters of model.lora.path."""
    if (settings := config.model.lora) is None:
        return
    path, _ = _source(part, config)
    if part.name != load_objective(config).trains[0].name:
        settings = settings.model_copy(update={"path": None})
    adapters = {name: weight for name, weight in weights.items() if name.endswith(SUFFIXES)}
    begin_adapters(adapters, settings, config.run.seed, path)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mixed: bool = False,
    reshard_after_forward: bool = True,
    offload: OffloadPolicy = _STAYS,
) -> nn.Module:
    """Turns the parameters of ``model`` (equal on all ranks) into this rank's slices, in place.

    ``mixed``: weights are gathered in bfloat16, which is half the bytes, and computed with as such.
    Slices stay float32, and so do the sums of gradients, over rows and over ranks.
    ``reshard_after_forward``: if false, the blocks stay gathered until their backward; after a
    forward without one, slices_again() has to be called. ``offload``: where the slices are.
    """
    policy = _MIXED if mixed else MixedPrecisionPolicy()
    head = getattr(model, HEAD, None)
    if isinstance(head, nn.Module):
        fully_shard(head, mesh=mesh, offload_policy=offload)  # it computes in float32 (value_head)
    for block in blocks_of(model):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
        )
    # By default the root stays gathered, because its backward comes first. Without one, it would
    # fill the device.
    root = True if isinstance(offload, CPUOffloadPolicy) else None
    fully_shard(
        model, mesh=mesh, mp_policy=policy, reshard_after_forward=root, offload_policy=offload
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are normalised by the whole step's counts, so gradients add up: no mean over
            # ranks. A plain sum also is what gloo can do.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def local_weights(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """``state.named_weights()`` as this rank stores them: views of its slices, no communication."""
    for name, tensor in state.named_weights():
        yield name, local_tensor(tensor)
