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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from paceline.payloads.transfer_limits import slices
from paceline.process.files import sync_file
from policy_worker.checkpoint.atomic_directory import fingerprint
from policy_worker.model.train_state import TrainState, local_slice

FILE_BYTES = 1 << 30
"""More tensors than this go to another file."""
WRITERS = 4
"""Files that a rank writes at once: one is summed up while the disk writes another."""

# Each rank saves by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True, slots=True)
class StateSlices:
    """The slices that one rank has to write, and the shapes of the tensors that they are of."""

    tensors: dict[str, Tensor]
    offsets: dict[str, tuple[int, ...]]
    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, state: TrainState, rank: int) -> "StateSlices":
        """The live ones; of tensors that every rank holds whole, rank 0 has all."""
        mine = cls({}, {}, {})
        for name, tensor in named_tensors(state):
            if tensor.numel() == 0:
                continue
            mine.shapes[name] = tensor.shape
            local, offset = local_slice(tensor)
            if local.numel() and (not rank or isinstance(tensor, DTensor)):
                mine.tensors[name], mine.offsets[name] = local.detach(), offset
        return mine


def write_shards(
    mine: StateSlices, copies: Sequence[Tensor], directory: Path, rank: int
) -> dict[str, dict[str, int]]:
    """Writes and fsyncs the ``copies`` of the slices. Returns the fingerprints of the files."""
    named = dict(zip(mine.tensors, copies, strict=True))
    files = list(slices(((name, copy.nbytes) for name, copy in named.items()), FILE_BYTES))

    def write(number: int) -> tuple[str, dict[str, int]]:
        names = files[number]
        offsets = {name: {"saved_offsets": mine.offsets[name]} for name in names}
        # What HuggingFaceStorageReader looks for in the header.
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        count = f"{number + 1:05d}-of-{len(files):05d}"
        path = directory / f"shard-{rank + 1:05d}-model-{count}.safetensors"
        # Not by way of bytes: that would hold up Python, and so training, for seconds a GiB.
        save_file({name: named[name] for name in names}, path, header)
        # It was a temporary file, which is closed to others whatever the umask says.
        path.chmod(directory.stat().st_mode & 0o666)
        sync_file(path)
        return path.name, fingerprint(path)

    with ThreadPoolExecutor(WRITERS, "checkpoint-file") as pool:
        return dict(pool.map(write, range(len(files))))


def read_shards(
    directory: Path,
    targets: Mapping[str, Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills ``targets`` (whole tensors or DTensors, any device) in place. No communication. Calls
    ``on_progress`` after every ``FILE_BYTES`` or so. Raises KeyError for a name that is not stored
    and ValueError for another shape."""
    wanted = {name: t.detach() for name, t in targets.items() if local_slice(t)[0].numel()}
    stored = stored_tensors(directory)
    for name, target in wanted.items():
        if stored[name][0] != target.shape:
            raise ValueError(f"{name} is {list(stored[name][0])} there, {list(target.shape)} here")
    sized = ((name, local_slice(target)[0].nbytes) for name, target in wanted.items())
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
