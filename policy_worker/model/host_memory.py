"""Host memory beside the device: copies of a state, activations, and the weights of frozen models.

    training   update ──┬── forward and backward of the next step ──► wait ──► next update
    copies              └──► host memory, page-locked for a GPU ────────┘
    writer                                   └──► files ──► the memory is used again

Training waits for the copies of a state alone, and not before its next update. Their memory is
reserved beforehand: to have 7 GB page-locked takes seconds.

Activations of a row stay in host memory from the forward pass until the backward pass needs them.
With gradient checkpointing this is the input of each block. What a block computes again in its
backward pass stays on the device, and so do the weights, which a linear layer saves too.

Weights of a frozen model: each block's are on the device only while it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.process.compute_device import stream_of_its_own


class DeviceCopies:
    """Copies that a device makes of tensors which stay where they are until the next update. On a
    CPU each is complete when it returns. Called from the thread that trains."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._newest: Any = None

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Within: copies come after all that the current stream was given until now."""
        if self._device.type != "cuda":
            yield
            return
        cuda = torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self._device)
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self._stream):
            yield
        self._newest = self._stream.record_event()

    def before_change(self) -> None:
        """Has the current stream go on after the copies alone: it may overwrite their sources."""
        if self._newest is not None:
            torch.cuda.current_stream(self._device).wait_event(self._newest)
            self._newest = None


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

    def reserve(self, state: Sequence[Tensor]) -> None:
        """Takes the memory of its copies beside training, unless it was taken before."""
        if not self._reserved:
            self._reserved = True
            self._thread.submit(lambda: self.give_back(self._memory(state)))

    def take(self, state: Sequence[Tensor]) -> Future[list[Tensor]]:
        """The copies, once they are complete."""
        ready, self._reserved = None, True
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
        self._free = copies

    def let_go(self) -> None:
        """Frees the memory that no copy is in."""
        self._free = []

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


def copy_to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; one from a CUDA device is still under way on return."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def activations_on_host(tokens: int) -> AbstractContextManager[object]:
    """Around a forward pass of one row of so many tokens: what it saves of shape [1, tokens,
    features] goes to host memory. The copies are page-locked if the row is on a GPU. They are the
    saved values bit for bit."""

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, torch.device]:
        if saved.dim() != 3 or saved.shape[:2] != (1, tokens) or not saved.is_floating_point():
            return saved
        return copy_to_host(saved), saved.device  # later work of the stream waits for it

    def unpack(packed: Tensor | tuple[Tensor, torch.device]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy, device = packed
        return copy.to(device, non_blocking=True)

    hooks: AbstractContextManager[object] = saved_tensors_hooks(pack, unpack)
    return hooks


def keep_on_host(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Keeps the parameters of ``model`` in host memory, and has each forward bring them to
    ``device``; buffers stay there. ``model``: on the host, without gradients. ``blocks``: modules
    of it that compute one after the other, none inside another. What is in none of them is on the
    device for the whole forward."""
    if device.type == "cuda":
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    in_blocks: set[nn.Parameter] = set()
    for block in blocks:
        parameters = set(block.parameters())
        in_blocks |= parameters
        _bring(block, parameters, device)
    _bring(model, set(model.parameters()) - in_blocks, device)
    buffers_to(model, device)


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of ``model`` alone."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _bring(module: nn.Module, parameters: set[nn.Parameter], device: torch.device) -> None:
    places = [
        (owner, name, stored)
        for owner in module.modules()
        for name, stored in owner.named_parameters(recurse=False)
        if stored in parameters
    ]

    def to_device(*_: Any) -> None:
        moved = {
            stored: nn.Parameter(stored.to(device, non_blocking=True), requires_grad=False)
            for stored in parameters
        }
        for owner, name, stored in places:
            owner._parameters[name] = moved[stored]  # tied ones stay tied

    def back(*_: Any) -> None:
        for owner, name, stored in places:
            owner._parameters[name] = stored

    module.register_forward_pre_hook(to_device)
    # Also after a forward that failed, for want of memory above all.
    module.register_forward_hook(back, always_call=True)
