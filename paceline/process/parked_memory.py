"""Memory of a device that a process gives up while another one computes there, and takes again.

    park      kept ─────► host memory, page-locked for a GPU
              dropped ──► nothing
    unpark    all have memory again, and kept tensors their bits; dropped ones are zero, and whoever
              owns them fills them again

Tensors stay the same objects, and only their storage is empty meanwhile: so modules, an optimizer,
FSDP's slices, fused matrices and compiled code find them as they were. The host memory is used
again at the next turn, because having it page-locked takes longer than the copies.

A CPU has no memory of its own: kept tensors stay where they are, and dropped ones make room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.errors import UserError
from paceline.memory_plan import room_of_a_turn
from paceline.process.compute_device import give_back_freed
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

TAKE_S = 60.0
"""The process that had the device before may have been killed: its driver frees the memory late."""
AGAIN_S = 0.2


class StillInUse(UserError):
    """The device has no room for what this process had there before."""


def await_room(
    read: Callable[[], tuple[int, int]], beside: int = 0, limit_s: float = TAKE_S
) -> None:
    """Waits, before the first load in a turn, until the device is free but for what the other
    worker of the pair keeps, and for ``beside`` bytes of scorers. ``read``: its bytes that are
    free, and all. After ``limit_s`` the load has to do
    with what there is."""
    deadline = time.monotonic() + limit_s
    while True:
        free, total = read()
        if free >= room_of_a_turn(total) - beside:
            return
        if time.monotonic() >= deadline:
            event(log, "device still in use", logging.WARNING, gib=(total - free) / (1 << 30))
            return
        time.sleep(AGAIN_S)


def in_its_room(
    device: torch.device,
    take: Callable[[], object],
    undo: Callable[[], object] = lambda: None,
    limit_s: float = TAKE_S,
) -> None:
    """Calls ``take``, and again if the device has no room for what it takes, after ``undo``. Raises
    StillInUse if it has none for so long."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            take()
            return
        except torch.OutOfMemoryError as error:
            undo()
            give_back_freed(device)
            if time.monotonic() >= deadline:
                raise StillInUse(
                    f"the device has no room for this worker's turn after {limit_s:g} s: another "
                    "process computes there. End it, or give the pair a device of its own"
                ) from error
            time.sleep(AGAIN_S)  # nothing tells that another process has freed memory


class ParkedMemory:
    """Memory of one process on ``device``. ``moves``: kept tensors go to host memory; default: if
    the device has memory of its own."""

    def __init__(self, device: torch.device, *, moves: bool | None = None) -> None:
        self._device = device
        self.moves = device.type != "cpu" if moves is None else moves
        self._host: dict[StorageWeakRef, Tensor] = {}
        """Copies of kept storages: uint8 [bytes]. No storage has the address of another one that
        is referred to here, even if that one is gone."""
        self._constant: set[StorageWeakRef] = set()
        self._kept: list[torch.UntypedStorage] = []
        self._empty: list[tuple[torch.UntypedStorage, int]] = []
        """Storages without memory, and the bytes that they had."""
        self.parked = False

    def copy(self, kept: Iterable[Tensor], constant: Iterable[Tensor] = ()) -> None:
        """Copies to the host, before park(): nothing is given up yet. ``constant``: kept tensors
        that never change, so that one copy serves all turns. Raises RuntimeError if the host lacks
        memory."""
        if not self.moves:
            return
        lasting = list(_storages(constant))
        self._kept = [*_storages(kept), *lasting]
        given = {StorageWeakRef(storage) for storage in self._kept}
        self._host = {ref: copy for ref, copy in self._host.items() if ref in given}
        self._constant &= self._host.keys()
        for storage in self._kept:
            self._copy(storage)
        self._constant |= {StorageWeakRef(storage) for storage in lasting}
        self._wait()

    def park(self, dropped: Iterable[Tensor] = ()) -> None:
        """Gives up the memory of what was copied, and of ``dropped``."""
        for storage in [*self._kept, *_storages(dropped)]:
            self._empty.append((storage, storage.nbytes()))
            storage.resize_(0)
        give_back_freed(self._device)
        self.parked = True

    def unpark(self, limit_s: float = TAKE_S) -> None:
        """Takes it again. Raises StillInUse if the device has no room for so long."""

        def take() -> None:
            for storage, size in self._empty:
                storage.resize_(size)

        def undo() -> None:
            for storage, _ in self._empty:
                storage.resize_(0)

        in_its_room(self._device, take, undo, limit_s)
        kept = {storage._cdata for storage in self._kept}
        for storage, _ in self._empty:
            if storage._cdata not in kept:  # a fused matrix has places that nobody fills
                _bytes_of(storage).zero_()
        for storage in self._kept:
            _bytes_of(storage).copy_(self._host[StorageWeakRef(storage)], non_blocking=True)
        self._wait()
        self._empty, self._kept, self.parked = [], [], False

    def on_host(self, tensor: Tensor) -> Tensor:
        """``tensor`` if it has memory, else its copy in host memory: not to be written to."""
        storage = tensor.untyped_storage()
        stored = self._host.get(StorageWeakRef(storage))
        if not self.parked or storage.nbytes() or stored is None:
            return tensor
        copy, source = torch.empty(0, dtype=tensor.dtype), stored.untyped_storage()
        return copy.set_(source, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _copy(self, storage: torch.UntypedStorage) -> None:
        key = StorageWeakRef(storage)
        if key in self._constant:
            return
        if key not in self._host:
            locked = self._device.type == "cuda"
            self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=locked)
        self._host[key].copy_(_bytes_of(storage), non_blocking=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage once: fused and tied tensors share one."""
    found = {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}
    return (storage for storage in found.values() if storage.nbytes())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
