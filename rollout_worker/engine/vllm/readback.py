"""Read-back of loaded parameters, and the log-probs that they should give.

    each rank:   Readback records copies while vLLM loads ──► views ──► compared with the weights
                                                                └─────► CopyPlan of later swaps
    front end:   log-probs of a few sampled tokens ──► compared with transformers' own forward

vLLM fuses, shards and pads weights without recording the layout; but every loader finally copies a
view of a weight into a view of a parameter. Those pairs are recorded. If kernels keep a copy in
another form (packed, quantised), the parameter that was packed is read back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout_worker.engine.base import Completion, Request, SamplingParams
from rollout_worker.engine.vllm.rank_weights import CopyPlan, Key, Place, Views


class Readback(TorchFunctionMode):
    """While active, records the memory that each part of ``weights`` is copied to, in ``views``.
    Keeps that memory alive."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = sorted((t.data_ptr(), t.nbytes, n) for n, t in weights.items() if t.numel())
        self._starts = [start for start, _, _ in self._weights]
        self.views: Views = {}
        self._in_storage: dict[int, set[Key]] = {}
        """Keys of the views, by the storage that they are in."""
        self._taken: Counter[Place] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.copy_:
            self._note(args[0], args[1])
        elif func is Tensor.__setitem__ and isinstance(args[2], Tensor):
            self._note(args[0][args[1]], args[2])
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        # vLLM first loads on the meta device, to count elements.
        if "meta" in (target.device.type, source.device.type) or not source.numel():
            return
        # The weight that starts last of those that start no later.
        place = bisect_right(self._starts, source.data_ptr()) - 1
        start, size, name = self._weights[place] if place >= 0 else (0, 0, "")
        if source.data_ptr() < start + size:
            source = source.expand(target.shape)
            offset = (source.data_ptr() - start) // source.element_size()
            part = name, offset, tuple(source.shape), source.stride()
            self._add((*part, target.data_ptr()), target.detach())
            return
        self._forget(target)
        if source.shape == target.shape and source.stride() == target.stride():
            self._follow(source.detach(), target.detach())

    def _forget(self, target: Tensor) -> None:
        """A loader computes with what it has copied there: no part of the weights is there now."""
        keys = self._in_storage.get(target.untyped_storage().data_ptr(), set())
        memory = range(target.data_ptr(), target.data_ptr() + target.nbytes)
        for key in [key for key in keys if self.views[key].data_ptr() in memory]:
            del self.views[key]
            keys.discard(key)

    def _follow(self, source: Tensor, target: Tensor) -> None:
        """A loaded parameter is copied as a whole into the one that kernels use."""
        storage = source.untyped_storage().data_ptr()
        for key in list(self._in_storage.get(storage, ())):
            view = self.views[key]
            if view.dtype == target.dtype:
                offset = view.storage_offset() - source.storage_offset() + target.storage_offset()
                del self.views[key]
                self._in_storage[storage].discard(key)
                moved = target.as_strided(view.shape, view.stride(), offset)
                self._add((*key[:4], moved.data_ptr()), moved)

    def _add(self, key: Key, view: Tensor) -> None:
        before = self.views.get(key)
        if before is not None:
            self._in_storage[before.untyped_storage().data_ptr()].discard(key)
        self.views[key] = view
        self._in_storage.setdefault(view.untyped_storage().data_ptr(), set()).add(key)

    def take(self, parameter: Tensor) -> Views:
        """The views of the memory of ``parameter``, which are kept no longer."""
        keys = self._in_storage.pop(parameter.untyped_storage().data_ptr(), set())
        self._taken.update(key[:4] for key in keys)
        return {key: self.views.pop(key) for key in keys}

    def places(self) -> Counter[Place]:
        """The parts that were copied, each as often as it was."""
        return self._taken + Counter(key[:4] for key in self.views)

    def plan(self, model: nn.Module, loaded: Iterable[str]) -> CopyPlan | None:
        """The copies that load the next version; None if loading is more than copying. It is only
        copying if every recorded copy went into a parameter in use, and all other elements are zero
        (padding) or belong to parameters that are not in ``loaded``."""
        written = _by_storage(self.views.values())
        if not written.keys() <= _by_storage((*model.parameters(), *model.buffers())).keys():
            return None
        parameters, loaded = dict(model.named_parameters()), set(loaded)
        if any(_storage_of(parameters[n]) not in written for n in loaded & parameters.keys()):
            return None
        in_use = _by_storage(parameter.detach() for parameter in parameters.values())
        # A mask has a byte for each element. A GPU that the engine fills has room for one storage's
        # at a time, not for the whole model's.
        if any(_has_more(in_use.get(at, []), memories) for at, memories in written.items()):
            return None
        return CopyPlan(self.views)


def _storage_of(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage().data_ptr()
    return place


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_storage_of(tensor), []).append(tensor)
    return groups


def _has_more(parameters: Iterable[Tensor], written: Sequence[Tensor]) -> bool:
    """True if ``parameters`` have an element other than zero outside the views ``written``. All are
    of one storage."""
    count = written[0].untyped_storage().nbytes() // written[0].element_size()
    unwritten = torch.ones(count, dtype=torch.bool, device=written[0].device)
    for view in written:
        unwritten.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    rests = ((p, unwritten.as_strided(p.shape, p.stride(), p.storage_offset())) for p in parameters)
    return any(bool(p[rest].count_nonzero()) for p, rest in rests)


_ROUNDING = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 5e-3}
"""Mean absolute gap of log-probs that is rounding if logits are small, by dtype."""
_LARGEST = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}  # The same for any logits
_STEP = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
"""Distance of neighbouring numbers around 1."""
_QUANTISED = 0.5
"""The error of quantising has no bound; misplaced weights are further off than this."""
_PROMPT = 8
_TOKENS = 16


def probe(vocabulary: int, context: int) -> Request:
    """A short request over tokens from the whole vocabulary, the same on every call."""
    prompt = (np.arange(1, _PROMPT + 1) * (vocabulary // (_PROMPT + 1) or 1)) % vocabulary
    length = max(1, min(_PROMPT, context // 2))
    tokens = max(1, min(_TOKENS, context - length))
    return Request(
        "first-sync", prompt[:length].astype(np.int32), SamplingParams(tokens, seed=1), count=4
    )


def mean_gap(
    reference: Callable[[Mapping[str, Tensor]], nn.Module],
    tensors: Mapping[str, Tensor],
    request: Request,
    completions: tuple[Completion, ...],
) -> tuple[float, float]:
    """Mean absolute difference between the log-probs of the completions' tokens and those of
    transformers' own forward, by the ``reference`` with these ``tensors``; and the mean size of
    those tokens' logits. One forward for all of them: on the host it reads gigabytes of weights."""
    model: Any = reference(tensors)
    start, longest = len(request.prompt_tokens), max(len(c.tokens) for c in completions)
    ids = torch.zeros(len(completions), start + longest, dtype=torch.int64)
    for row, completion in zip(ids, completions, strict=True):
        tokens = np.concatenate([request.prompt_tokens, completion.tokens])
        row[: len(tokens)] = torch.from_numpy(tokens)  # what follows is seen by none of them
    gaps, sizes = [], []
    with torch.inference_mode():
        for row, logits, completion in zip(
            ids, model(input_ids=ids.to(model.device)).logits.cpu(), completions, strict=True
        ):
            end = start + len(completion.tokens)
            chosen, wide = row[start:end, None], logits[start - 1 : end - 1].float()
            expected = torch.log_softmax(wide, -1).gather(1, chosen)[:, 0]
            gaps.append((torch.from_numpy(completion.logprobs) - expected).abs())
            sizes.append(wide.gather(1, chosen)[:, 0].abs())
    return float(torch.cat(gaps).mean()), float(torch.cat(sizes).mean())


def tolerance(dtype: str, scale: float, *, quantised: bool) -> float:
    """Largest mean gap that counts as rounding. ``scale``: mean size of the tokens' logits, which
    both sides round to the computation type."""
    if quantised:
        return _QUANTISED
    return float(np.clip(scale * _STEP[dtype], _ROUNDING[dtype], _LARGEST[dtype]))
