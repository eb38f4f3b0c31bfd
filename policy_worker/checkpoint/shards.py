"""Shards of a checkpoint: slices of tensors as safetensors, in the format of
torch.distributed.checkpoint.

model.<name>  optimizer.<name>.<moment>                 of the main part
model.<part>/<name>  optimizer.<part>/<name>.<moment>   of another one
scalar.<name>                                           a number of the objective

Every rank writes the slices it stores, with their offsets in the file's header, and knows nothing
of the other ranks. torch's reader combines the headers of all files and reads, for each slice it
needs, the overlapping parts of stored slices.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from paceline.payloads.transfer_limits import slices
from paceline.process.files import write_durably
from policy_worker.model.host_memory import CopiesDone, DeviceCopies, copy_to_host
from policy_worker.model.train_state import TrainState

FILE_BYTES = 1 << 30
"""A file is serialised in memory: more tensors than this go to another file."""

# Each rank saves by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The slices that one rank has to write, copied so that the next step can begin."""

    pieces: dict[str, tuple[Tensor, tuple[int, ...]]]
    """In host memory, owned by the snapshot, with their offsets."""
    shapes: dict[str, torch.Size]
    copied: CopiesDone = field(default_factory=CopiesDone)

    @classmethod
    def take(
        cls, named: Iterable[tuple[str, Tensor]], rank: int, copies: DeviceCopies
    ) -> "StateSnapshot":
        """Copies this rank's slices; of tensors that every rank holds whole, rank 0 copies all. The
        state may be computed with at once. Call ``copies.before_change()`` before it is changed."""
        pieces: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        shapes: dict[str, torch.Size] = {}
        with copies.queued() as copied:
            for name, tensor in named:
                if tensor.numel() == 0:
                    continue
                shapes[name] = tensor.shape
                local, offset = _slice_of(tensor)
                if local.numel() == 0 or (rank and not isinstance(tensor, DTensor)):
                    continue
                pieces[name] = copy_to_host(local), offset
        return cls(pieces, shapes, copied)


def write_shards(snapshot: StateSnapshot, directory: Path, rank: int) -> list[str]:
    """Writes and fsyncs the snapshot's slices, once copied. Returns the names of the files."""
    snapshot.copied.wait()
    sized = ((name, piece.nbytes) for name, (piece, _) in snapshot.pieces.items())
    files, names = list(slices(sized, FILE_BYTES)), []
    for number, stored in enumerate(files, start=1):
        offsets = {name: {"saved_offsets": snapshot.pieces[name][1]} for name in stored}
        # What HuggingFaceStorageReader looks for in the header.
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        names.append(f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors")
        tensors = {name: snapshot.pieces[name][0] for name in stored}
        write_durably(directory / names[-1], save(tensors, header))
    return names


def read_shards(
    directory: Path,
    targets: Mapping[str, Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills ``targets`` (whole tensors or DTensors, any device) in place. No communication. Calls
    ``on_progress`` after every ``FILE_BYTES`` or so. Raises KeyError for a name that is not stored
    and ValueError for another shape."""
    wanted = {name: t.detach() for name, t in targets.items() if _slice_of(t)[0].numel()}
    stored = stored_tensors(directory)
    for name, target in wanted.items():
        if stored[name][0] != target.shape:
            raise ValueError(f"{name} is {list(stored[name][0])} there, {list(target.shape)} here")
    sized = ((name, _slice_of(target)[0].nbytes) for name, target in wanted.items())
    for names in slices(sized, FILE_BYTES):
        part = {name: wanted[name] for name in names}
        reader = HuggingFaceStorageReader(str(directory))
        dcp.load(part, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        on_progress()


def stored_tensors(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor stored in ``directory``, from the files' headers."""
    stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: (found.size, found.properties.dtype) for name, found in stored.items()}


def first_gap(directory: Path, shapes: Mapping[str, torch.Size]) -> str | None:
    """Name of a tensor that the stored slices do not make up; None if they make up all of them."""
    stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    for name, shape in shapes.items():
        found = stored.get(name)
        if found is None or found.size != shape:
            return name
        if sum(math.prod(chunk.sizes) for chunk in found.chunks) != math.prod(shape):
            return name
    return None


def _slice_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return tensor.to_local(), tuple(chunk.offsets)
    return tensor, (0,) * tensor.ndim


WEIGHTS = "model."


def named_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, by its name in a checkpoint."""
    for name, tensor in state.named_weights():
        yield WEIGHTS + name, tensor
    for name, parameter in state.named_parameters():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{moment}", value
    for name, value in state.scalars.items():
        yield f"scalar.{name}", value


def weights_of_part(names: Iterable[str], part: str) -> dict[str, str]:
    """The weights of ``part`` ("": the main one) among ``names``, with their names in the model."""
    prefix = f"{WEIGHTS}{part}/" if part else WEIGHTS
    mine = [name for name in names if name.startswith(prefix) and (part or "/" not in name)]
    return {name: name.removeprefix(prefix) for name in mine}
