"""Copies from a GPU to host memory, on a stream of their own beside training.

training stream   update ──┬── forward and backward of the next step ──► wait ──► next update
copy stream                └──► wait ──► copies to page-locked memory ──────┘
writer's thread                                                  event ──► files

The host waits for no kernel, and no kernel but the next update waits for the copies. Their buffers
are page-locked memory of torch's host allocator, which hands them out again once they are let go
of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class DeviceCopies:
    """Copies of tensors that stay where they are until the next update. On a CPU each is complete
    when it returns.

    Called from the thread that trains, except for what ``queued`` hands out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._newest: Any = None

    @contextmanager
    def queued(self) -> Iterator[CopiesDone]:
        """Within: ``copy_to_host`` comes after everything that the current stream has been given
        until now."""
        done = CopiesDone()
        if self._device.type != "cuda":
            yield done
            return
        cuda = torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self._device)
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self._stream):
            yield done
        self._newest = done.event = self._stream.record_event()

    def before_change(self) -> None:
        """What the current stream is given from now on may overwrite the sources: it waits, on the
        device, for the copies."""
        if self._newest is not None:
            torch.cuda.current_stream(self._device).wait_event(self._newest)
            self._newest = None


class CopiesDone:
    """The end of the copies of one ``queued`` block."""

    event: Any = None

    def wait(self) -> None:
        """Blocks the calling thread until the copies are complete."""
        if self.event is not None:
            self.event.synchronize()


def copy_to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; one from a CUDA device is still under way on return."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)
