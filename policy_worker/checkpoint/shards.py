"""Shards of a checkpoint: slices of tensors as safetensors, through torch.distributed.checkpoint.

Every rank writes the slices it stores, with their offsets in the file's header, and knows nothing of
the other ranks. A reader combines the headers of all files and reads, for each slice it needs, the
overlapping parts of stored slices.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

FILE_BYTES = 1 << 30
"""A file is serialised in memory before it is written: more tensors than this go to another file."""

# Each rank saves by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    data: Tensor
    """In host memory, owned by the snapshot."""
    offset: tuple[int, ...]
    """Of the slice in the whole tensor."""
    shape: torch.Size
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The slices that one rank has to write, copied so that the next step can begin."""

    pieces: dict[str, TensorSlice]
    shapes: dict[str, torch.Size]
    """Of every whole tensor of the state, whichever rank writes it."""

    @classmethod
    def take(cls, named: Iterable[tuple[str, Tensor]], rank: int) -> StateSnapshot:
        """Copies this rank's slices; of tensors that every rank holds whole, rank 0 copies all."""
        pieces: dict[str, TensorSlice] = {}
        shapes: dict[str, torch.Size] = {}
        on_device = False
        for name, tensor in named:
            if tensor.numel() == 0:
                continue
            shapes[name] = tensor.shape
            local, offset = _slice_of(tensor)
            if local.numel() == 0 or (rank and not isinstance(tensor, DTensor)):
                continue
            on_device |= local.is_cuda
            pieces[name] = TensorSlice(_copy(local), offset, tensor.shape)
        if on_device:
            torch.cuda.synchronize()
        return cls(pieces, shapes)


def write_shards(snapshot: StateSnapshot, directory: Path, rank: int) -> list[str]:
    """Writes and fsyncs the snapshot's slices. Returns the names of the new files."""
    if not snapshot.pieces:
        return []
    writer = _Writer(str(directory), _file_indices(snapshot.pieces), rank)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(snapshot.pieces), no_dist=True)
    return sorted(path.name for path in directory.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read_shards(directory: Path, targets: Mapping[str, Tensor]) -> None:
    """Fills ``targets`` (whole tensors or DTensors, any device) in place. No communication.

    Raises KeyError for a name that is not stored and ValueError for another shape.
    """
    wanted = {name: t.detach() for name, t in targets.items() if _slice_of(t)[0].numel()}
    stored = stored_tensors(directory)
    for name, target in wanted.items():
        if stored[name][0] != target.shape:
            raise ValueError(f"{name} is {list(stored[name][0])} there, {list(target.shape)} here")
    reader = HuggingFaceStorageReader(str(directory))
    dcp.load(wanted, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)


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


class _Writer(HuggingFaceStorageWriter):  # type: ignore[misc]
    def __init__(self, path: str, indices: dict[str, int], rank: int) -> None:
        super().__init__(path, fqn_to_index_mapping=indices, save_distributed=True)
        self._rank_index = rank + 1

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The base class numbers the plans it is given; here a rank only ever sees its own.
        data = {
            "fqn_to_index_mapping": self.fqn_to_index_mapping,
            "shard_index": self._rank_index,
        }
        return [dataclasses.replace(plan, storage_data=data) for plan in plans]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        pass  # the files' headers say everything


class _SavePlanner(SavePlanner):  # type: ignore[misc]
    """Writes exactly the given pieces; first_gap() checks afterwards that all ranks' pieces add up."""

    def __init__(self, pieces: Mapping[str, TensorSlice]) -> None:
        self._pieces = pieces

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, piece) for name, piece in self._pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata(state_dict_metadata={})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index.fqn].data


def _write_item(name: str, piece: TensorSlice) -> WriteItem:
    offset = torch.Size(piece.offset)
    chunk = ChunkStorageMetadata(offsets=offset, sizes=piece.data.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece.data), piece.shape)
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def _file_indices(pieces: Mapping[str, TensorSlice]) -> dict[str, int]:
    indices, file, filled = {}, 1, 0
    for name, piece in pieces.items():
        if filled and filled + piece.data.nbytes > FILE_BYTES:
            file, filled = file + 1, 0
        filled += piece.data.nbytes
        indices[name] = file
    return indices


def _slice_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return tensor.to_local(), tuple(chunk.offsets)
    return tensor, (0,) * tensor.ndim


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; one from a CUDA device is still under way on return."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)
