"""Activations that wait in host memory from the forward pass of a row until its backward pass.

    forward    block 1 ──► block 2 ──► block 3            backward   block 3 ──► block 2 ──► block 1
                  └─ leaves   └─ leaves   └─ leaves                 2 comes ─┘  1 comes ─┘

Each leaves, and comes back, while the next block computes. With gradient checkpointing these are
the inputs of the blocks. What a block computes again in its backward pass stays on the device, and
so do the weights, which a linear layer saves too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from policy_worker.model.host_memory import CopyStream

IN_FLIGHT = 2
"""Activations that stay on the device while their copies are made. The host runs far ahead of the
device: without a limit it would ask for the memory of all of them."""


@dataclass(eq=False)
class _Saved:
    """A tensor that the forward pass saved: its copy on the host, and the next one to come back."""

    copy: Tensor
    device: torch.device
    before: _Saved | None


class HostActivations:
    """Host memory for what the forward passes of rows on ``device`` save. Called from the threads
    of training and of its backward, never from both at once."""

    def __init__(self, device: torch.device) -> None:
        self._copies = CopyStream(device)
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        """Tensors that are being copied, and the end of it."""
        self._coming: tuple[_Saved, Tensor, Any] | None = None
        self._newest: _Saved | None = None

    @contextmanager
    def of_row(self, tokens: int) -> Iterator[None]:
        """Around a forward pass of one row of so many tokens: what it saves of shape [1, tokens,
        features] goes to host memory, page-locked if the device is a GPU. The copies are the saved
        values bit for bit."""
        self._drop_coming()  # of a row whose backward did not end

        def pack(saved: Tensor) -> Tensor | _Saved:
            if saved.dim() != 3 or saved.shape[:2] != (1, tokens) or not saved.is_floating_point():
                return saved
            return self._leave(saved.detach())

        def unpack(packed: Tensor | _Saved) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._back(packed)

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._newest = None
            while self._leaving:
                self._let_go()

    def _leave(self, saved: Tensor) -> _Saved:
        copy = self._copies.host_memory(saved)
        end = self._copies.copy([copy], [saved], self._copies.reached())
        self._leaving.append((saved, end))
        if len(self._leaving) > IN_FLIGHT:
            self._let_go()
        self._newest = _Saved(copy, saved.device, self._newest)
        return self._newest

    def _let_go(self) -> None:
        """Forgets the oldest that leaves: its memory is used again by what computes later."""
        _, end = self._leaving[0]
        self._copies.await_(end)
        self._leaving.popleft()

    def _back(self, packed: _Saved) -> Tensor:
        if self._coming is None or self._coming[0] is not packed:
            self._drop_coming()
            self._fetch(packed)
        assert self._coming is not None
        _, found, end = self._coming
        self._coming = None
        self._copies.await_(end)
        if packed.before is not None:
            self._fetch(packed.before)
        return found

    def _fetch(self, packed: _Saved) -> None:
        there = torch.empty(packed.copy.shape, dtype=packed.copy.dtype, device=packed.device)
        # After all that was computed: the memory of it may be what an earlier tensor had.
        end = self._copies.copy([there], [packed.copy], self._copies.reached())
        self._coming = packed, there, end

    def _drop_coming(self) -> None:
        if self._coming is not None:
            self._copies.await_(self._coming[2])
            self._coming = None
