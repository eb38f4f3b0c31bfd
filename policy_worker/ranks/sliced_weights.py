"""Slices of a model's weights, read from its safetensors files without ever holding the whole
model.

A model is first made without memory for its parameters, then sharded; then each rank reads its
slices. Files that do not name their tensors as the model does, such as experts that are stored one
by one, are for transformers' own loading.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from paceline.config.sections.inputs import LoraConfig
from paceline.lora import PEFT_PREFIX, adapters_of, initial, read_peft
from policy_worker.model.heads import HEAD
from policy_worker.model.train_state import local_slice, saved_buffers

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LM_HEAD = "lm_head.weight"
"""The head, which a causal language model has and a model with a scalar head has not."""


@dataclass(frozen=True, slots=True)
class SlicedWeights:
    """The place of each tensor of a model in its files."""

    files: Mapping[str, Path]
    without_head: bool

    @classmethod
    def of(cls, path: str, model: nn.Module, *, scalar: bool) -> SlicedWeights | None:
        """The places for ``model``, whose parameters need no memory yet, at ``path`` (directory or
        hub name). ``scalar``: it has a scalar head, and a causal language model may be stored. None
        if the files have other names or shapes, or cannot be read: transformers' own loading then
        does it, or says why not."""
        try:
            found = _shapes(_files(path))
        except (OSError, ValueError, KeyError, SafetensorError):
            return None
        adapters = adapters_of(model)
        shapes = ((name, list(t.shape)) for name, t in tensors_of(model).items())
        wanted = {name: shape for name, shape in shapes if name not in adapters}
        config: Any = model.config
        classifier = "ForSequenceClassification" in " ".join(config.architectures or ())
        without_head = scalar and f"{HEAD}.weight" not in found and not classifier
        if without_head:
            del wanted[f"{HEAD}.weight"]
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        spare = every | ({_LM_HEAD} if scalar else set())
        if any(name not in found or found[name][1] != shape for name, shape in wanted.items()):
            return None
        if found.keys() - wanted.keys() - spare:
            return None
        return cls({name: found[name][0] for name in wanted}, without_head)

    def read(
        self,
        model: nn.Module,
        device: torch.device,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Gives the parameters of ``model`` (sharded) memory on ``device`` and reads this rank's
        slices into it. Calls ``on_progress`` after each tensor."""
        with _swapped_parameters():
            # As to_empty() does, which would empty the buffers too.
            model._apply(
                lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)
            )
        self.fill(tensors_of(model), on_progress)

    def fill(
        self, tensors: Mapping[str, Tensor], on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Reads this rank's slices into the model's ``tensors``, all or some. ``on_progress``: as
        for read()."""
        by_file: dict[Path, list[str]] = {}
        for name, file in self.files.items():
            if name in tensors:
                by_file.setdefault(file, []).append(name)
        with torch.no_grad():
            for file, names in by_file.items():
                with safe_open(str(file), "pt") as stored:
                    for name in names:
                        _fill(tensors[name], stored.get_slice(name))
                        on_progress()
            if self.without_head:
                local_slice(tensors[f"{HEAD}.weight"])[0].zero_()


def begin_adapters(
    adapters: Mapping[str, Tensor], settings: LoraConfig, seed: int, base: str
) -> None:
    """Gives this rank's slices of ``adapters`` the values with which a run begins: those of
    model.lora.path, which are of ``base``, or random ones, the same for any number of ranks. Raises
    LoraError."""
    shapes = {name: parameter.shape for name, parameter in adapters.items()}
    with torch.no_grad():
        if settings.path is None:
            for name, parameter in adapters.items():
                _fill(parameter, initial(name, parameter.shape, settings, seed))
            return
        with safe_open(str(read_peft(settings, base, shapes)), "pt") as stored:
            for name, parameter in adapters.items():
                _fill(parameter, stored.get_slice(PEFT_PREFIX + name))


def _fill(tensor: Tensor, whole: Any) -> None:
    """Copies this rank's slice of ``whole``, a tensor or one in a file."""
    local, offset = local_slice(tensor)
    ends = zip(offset, local.shape, strict=True)
    place = tuple(slice(start, start + size) for start, size in ends)
    if local.numel():
        local.copy_(whole[place or slice(None)])


@contextlib.contextmanager
def _swapped_parameters() -> Iterator[None]:
    """Parameters that are moved stay the same objects: tied ones stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, by name."""
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    return tensors | {name: module._buffers[key] for name, module, key in saved_buffers(model)}


def _files(path: str) -> list[Path]:
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if index := cached_file(path, INDEX, **quiet):
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        return [Path(str(cached_file(path, name))) for name in names]
    if single := cached_file(path, SINGLE, **quiet):
        return [Path(single)]
    raise ValueError(f"no safetensors files at {path}")


def _shapes(files: list[Path]) -> dict[str, tuple[Path, list[int]]]:
    found = {}
    for file in files:
        with safe_open(str(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                found[name] = file, list(stored.get_slice(name).get_shape())
    return found
