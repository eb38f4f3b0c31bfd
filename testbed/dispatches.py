"""Operators that torch dispatches, counted: what a row costs the host, on any device."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
"""Operators whose result the host waits for."""


class Counted(TorchDispatchMode):  # type: ignore[misc]
    """Counts while it is entered: dispatches of operators, those that the host waits for,
    conversions of floating-point types, those of parameters, and the elements that one call copies
    to many tensors of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()

    def taken(self) -> Counter[str]:
        """What was counted since the last look."""
        work, self.work = self.work, Counter()
        return work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ("detach", "alias"):
            return result
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        masks = name.startswith("index") and any(x.dtype == torch.bool for x in tensors[1:])
        self.work["dispatches"] += 1
        self.work["waits"] += name in WAITS or masks
        if name == "_to_copy" and tensors[0].is_floating_point():
            changed = result.dtype != tensors[0].dtype
            self.work["conversions"] += changed
            self.work["of weights"] += changed and isinstance(tensors[0], torch.nn.Parameter)
        if name == "_foreach_copy_" and tensors[0].dtype != tensors[-1].dtype:
            self.work["copied"] += sum(x.numel() for x in tensors[: len(tensors) // 2])
        return result
