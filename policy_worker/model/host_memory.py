"""Copies that are made beside training: those of a state, and those that row forwards ask for.

    training   update ──┬── forward and backward of the next step ──► wait ──► next update
    copies              └──► host memory, page-locked for a GPU ────────┘
    writer                                   └──► files ──► the memory is used again

Training waits for the copies of a state alone, and not before its next update. Their memory is
reserved beforehand: to have 7 GB page-locked takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.process.compute_device import stream_of_its_own


class HostCopies:
    """Copies in host memory of a state that stays as it is until the next update. A thread makes
    them, on a stream of its own; other methods are called from the thread that trains."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "state-copies")
        self._newest: Future[list[Tensor]] | None = None
        self._free: list[Tensor] = []
        """Copies of one state that nobody needs any more."""
        self._reserved = False
        self._keeps = True

    def reserve(self, state: Sequence[Tensor]) -> None:
        """Takes the memory of its copies beside training, unless it was taken before."""
        if not self._reserved:
            self._reserved = True
            self._thread.submit(lambda: self.give_back(self._memory(state)))

    def take(self, state: Sequence[Tensor]) -> Future[list[Tensor]]:
        """The copies, once they are complete."""
        ready, self._reserved, self._keeps = None, True, True
        if self._device.type == "cuda":
            ready = torch.cuda.current_stream(self._device).record_event()
        self._newest = self._thread.submit(self._copy, state, ready)
        return self._newest

    def before_change(self) -> None:
        """Blocks until the state may be overwritten."""
        if self._newest is not None:
            wait([self._newest])
            self._newest = None

    def give_back(self, copies: list[Tensor]) -> None:
        """Any thread: they are no longer in use."""
        self._free = copies if self._keeps else []

    def let_go(self) -> None:
        """Frees the memory, until the next copies; that of copies in use when they are given
        back."""
        self._keeps, self._free = False, []

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(self, state: Sequence[Tensor], ready: Any) -> list[Tensor]:
        copies = self._memory(state)
        with stream_of_its_own(self._device):
            if ready is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)
            torch._foreach_copy_(copies, list(state), non_blocking=True)
            if ready is not None:
                torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _memory(self, state: Sequence[Tensor]) -> list[Tensor]:
        free, self._free = self._free, []
        if [(t.shape, t.dtype) for t in free] == [(t.shape, t.dtype) for t in state]:
            return free
        del free
        # Zeroed, so that its pages are there before the copies.
        locked = self._device.type == "cuda"
        return [torch.zeros(t.shape, dtype=t.dtype, pin_memory=locked) for t in state]


class CopyStream:
    """Copies beside what a CUDA device computes. On other devices each is complete on return.
    Called from the threads of training, never from two at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.end: Any = None
        """End of the newest copies."""

    def reached(self) -> Any:
        """The place of the computing stream after all that it was given until now."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        """Has copies that are made inside begin once the computing stream is at ``after``."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield
            self.end = self._stream.record_event()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Any) -> Any:
        """Copies once the computing stream is at ``after``; returns the end of it, for await_()."""
        with self.beside(after):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
        return self.end

    def await_(self, end: Any) -> None:
        """Has the computing stream go on after ``end`` alone."""
        if end is not None:
            torch.cuda.current_stream(self._device).wait_event(end)

    def host_memory(self, like: Tensor) -> Tensor:
        """Memory on the host that the device copies from and to by itself."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._stream is not None)
