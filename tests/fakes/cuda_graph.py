"""A CUDA graph without a GPU. It records operators and the memory that they used, and repeats them
there: Python code of the step does not run again, and numbers that it computed stay as they were.

It refuses what a real one refuses, or where a real one would silently be wrong:

- to wait for the device while it captures, or to copy from or to memory that is not page-locked;
- to be captured within another capture, or replayed before it is captured;
- to be replayed after memory that it uses was freed, moved or resized.

A capture computes nothing: memory that was there before is as it was, and results are garbage until
the graph is replayed.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from testbed.dispatches import WAITS

_WAITING = {
    *("item", "tolist", "numpy", "cpu", "equal", "nonzero", "unique", "masked_select"),
    *("__bool__", "__int__", "__float__", "__index__", "tensor", "as_tensor", "from_numpy"),
}
"""Functions that read a tensor on the host, or make one from memory of the host."""


class Refused(RuntimeError):
    pass


@dataclass(eq=False)
class FakeGraph:
    """``other``: a graph with the same working memory."""

    other: Self | None = None
    replays: int = 0
    _operators: list["_Operator"] = field(default_factory=list)
    _used: dict[int, "_Used"] = field(default_factory=dict)

    def capture(self, step: Callable[[], None]) -> None:
        if any(isinstance(mode, _Recorder) for mode in _modes()):
            raise Refused("a capture is under way")
        recorder = _Recorder(self)
        with _NoWaiting(), recorder:
            step()
        for used, before in recorder.before:
            used.memory().copy_(before)
        for result in recorder.results.values():
            if result.is_floating_point():
                result.fill_(torch.nan)
        assert self._operators

    def replay(self) -> None:
        if not self._operators:
            raise Refused("replayed before it was captured")
        for used in self._used.values():
            used.check()
        with _disable_current_modes():
            for operator in self._operators:
                operator.run()
        self.replays += 1


def _modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@dataclass(eq=False)
class _Used:
    """Memory that was there before the capture. The graph has its address, and does not keep it."""

    storage: StorageWeakRef
    address: int
    size: int

    def check(self) -> None:
        if self.storage.expired():
            raise Refused("memory of the graph was freed or moved")
        with _disable_current_modes():
            now = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if now is None or (now.data_ptr(), now.nbytes()) != (self.address, self.size):
            raise Refused("memory of the graph was moved or resized")

    def memory(self) -> Tensor:
        memory = (ctypes.c_char * self.size).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def view(self, tensor: Tensor) -> Tensor:
        raw = self.memory().untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(raw, *place)


@dataclass(eq=False)
class _Operator:
    function: Any
    args: Any
    kwargs: Any
    fresh: list[Tensor | None]
    """Results that the operator made memory for, in the order in which it returns them."""

    def run(self) -> None:
        results = [r for r in tree_leaves(self.function(*self.args, **self.kwargs)) if _is(r)]
        for memory, result in zip(self.fresh, results, strict=True):
            if memory is not None:
                memory.copy_(result)


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


class _NoWaiting(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _WAITING:
            raise Refused(f"{func.__name__}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph
        self.results: dict[int, Tensor] = {}
        """By storage: what operators of the capture made memory for."""
        self.before: list[tuple[_Used, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if _is(t)]
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in given[1:])
        unsized = func.name() == "aten::repeat_interleave.Tensor" and not kwargs.get("output_size")
        if name in WAITS or by_mask or unsized:
            raise Refused(f"{name}: operation not permitted when stream is capturing")
        recorded = tree_map_only(Tensor, self._recorded, (args, kwargs))
        known = {_storage(t) for t in given}
        out = func(*args, **kwargs)
        fresh: list[Tensor | None] = []
        for result in (r for r in tree_leaves(out) if _is(r)):
            is_new = _storage(result) not in known | self.results.keys()
            fresh.append(result if is_new else None)
            if is_new:
                self.results[_storage(result)] = result
        self.graph._operators.append(_Operator(func, *recorded, fresh))
        return out

    def _recorded(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) in self.results or not tensor.numel():
            return tensor
        used, memory = self.graph._used, tensor.untyped_storage()
        if memory._cdata not in used:
            known = _Used(StorageWeakRef(memory), memory.data_ptr(), memory.nbytes())
            used[memory._cdata] = known
            self.before.append((known, known.memory().clone()))
        return used[memory._cdata].view(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
