"""Adapters (LoRA): two thin matrices beside a frozen linear layer, y = W x + scale * B A x.

    x ──┬──► weight, bias (frozen) ────────────────────────────► + ──► y
        └──► lora_A [rank, in] ──► * scale ──► lora_B [out, rank] ┘

A linear layer becomes one in place: its class gains a forward, and its own weight keeps its name.
So files, slices and checks of the base stay as they are. Adapters have PEFT's names without its
prefix: ``model.layers.0.mlp.up_proj.lora_A.weight``. PEFT's own layers are not used: they rename
the base's weights, and convert all that flows through them to float32. Source: Hu et al., LoRA,
arXiv 2106.09685.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from paceline.config.model_files import weights_fingerprint
from paceline.config.sections.inputs import ALL_LINEAR, SETTINGS_FILE, LoraConfig
from paceline.errors import BadInput, did_you_mean, one_line
from paceline.model_head import mix_in
from paceline.model_shape import blocks_of

TENSORS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT writes it before the name of each tensor."""
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    "fan_in_fan_out": (False, None),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # the base stays
    "modules_to_save": ([], None),
}
"""Values of an adapter_config.json under which the two matrices and the scale are all there is."""

_BASE = "paceline_base"
"""Field with the fingerprint of the base's weights; PEFT ignores it."""

_WITHOUT = (nn.Embedding, nn.Conv1d)
"""Layers that need no adapter, though they have a matrix: PEFT leaves them out as well."""


class LoraError(BadInput):
    """Adapters that this model or this run cannot have. The message names setting and remedy."""


class _Matrix(nn.Module):  # type: ignore[misc]
    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, device=device))


class LoraLinear(nn.Module):  # type: ignore[misc]
    """The part that a linear layer gains. Adapters are float32, or copies of another type."""

    lora_A: _Matrix
    lora_B: _Matrix
    scale: float
    adapted: bool
    """False: the layer computes as its base does."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[misc]
        if not self.adapted:
            return y
        a, b = (matrix.weight.to(x.dtype) for matrix in (self.lora_A, self.lora_B))
        return y + linear(linear(x, a) * self.scale, b)


def attach(model: nn.Module, settings: LoraConfig) -> None:
    """Freezes ``model`` (a transformers one, also without memory), and gives its targets float32
    adapters of zeros, in place. Raises LoraError."""
    model.requires_grad_(False)
    for layer in targets_of(model, settings).values():
        mix_in(LoraLinear, layer)
        device, rank = layer.weight.device, settings.rank
        layer.lora_A = _Matrix(rank, layer.in_features, device)
        layer.lora_B = _Matrix(layer.out_features, rank, device)
        layer.scale, layer.adapted = settings.scale, True


def targets_of(model: nn.Module, settings: LoraConfig) -> dict[str, nn.Linear]:
    """The layers that ``model.lora.targets`` names, by their names in ``model``. Raises LoraError
    for a name without a layer, and for "all-linear" if blocks have other matrices as well."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    others: list[str] = []
    for block in blocks_of(model):
        for name, module in block.named_modules(prefix=names[block]):
            own = module.parameters(recurse=False)
            if isinstance(module, nn.Linear):
                found[name] = module
            elif not isinstance(module, _WITHOUT) and any(p.ndim > 1 for p in own):
                others.append(name)
    ends = sorted({name.rpartition(".")[2] for name in found})
    some = f"name linear layers, such as {', '.join(ends)}" if ends else "leave [model.lora] out"
    kind = type(model).__name__
    if settings.targets == ALL_LINEAR:
        if others or not found:
            what = f"{others[0]} of {kind} is" if others else f"{kind} has"
            raise LoraError(
                f'model.lora.targets = "{ALL_LINEAR}": {what} no linear layer, and an adapter '
                f"cannot reach fused weights, such as those of experts: {some}"
            )
        return found
    chosen = set[str]()
    for target in settings.targets:
        matched = {n for n in found if fnmatchcase(n, target) or fnmatchcase(n, f"*.{target}")}
        if not matched:
            raise LoraError(
                f"model.lora.targets: no linear layer in the blocks of {kind} has a name that ends "
                f"with {target!r}: {did_you_mean(target, ends)}{some[0].upper()}{some[1:]}"
            )
        chosen |= matched
    return {name: layer for name, layer in found.items() if name in chosen}


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters of a model, by the names under which they travel."""
    return {n: parameter for n, parameter in model.named_parameters() if n.endswith(SUFFIXES)}


def adapter_shapes(
    config: Any, settings: LoraConfig, *, trust_remote_code: bool = False
) -> dict[str, torch.Size]:
    """The shapes of the adapters of a model that is not loaded, from its transformers config.
    Raises LoraError."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    attach(model, settings)
    return {name: adapter.shape for name, adapter in adapters_of(model).items()}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` computes as its base does."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLinear)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def initial(name: str, shape: torch.Size, settings: LoraConfig, seed: int) -> Tensor:
    """The start of one adapter, float32 on the host: the same numbers on every rank."""
    tensor = torch.zeros(shape)
    if name.endswith(SUFFIXES[1]):
        return tensor
    number = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
    generator = torch.Generator().manual_seed(int.from_bytes(number, "big"))
    if settings.init == "gaussian":
        return tensor.normal_(0.0, 1.0 / settings.rank, generator=generator)
    bound = shape[1] ** -0.5  # Kaiming's, with a = sqrt(5)
    return tensor.uniform_(-bound, bound, generator=generator)


def merged(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], settings: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Names and new values of those ``weights`` beside which ``tensors`` has adapters: weight +
    scale * B A, computed in float32. Raises LoraError for adapters of another base."""
    for name in [name for name in tensors if name.endswith(SUFFIXES[0])]:
        layer = name.removesuffix(SUFFIXES[0])
        if layer + SUFFIXES[1] not in tensors:
            raise LoraError(f"the adapter {layer} has no lora_B: write it again")
        a, b = (tensors[layer + suffix].float() for suffix in SUFFIXES)
        weight = weights.get(f"{layer}.weight")
        if weight is None or weight.shape != (len(b), a.shape[1]):
            raise LoraError(f"the adapter {layer} fits no layer of the model: name its base")
        whole = torch.addmm(weight.detach().float(), b, a, alpha=settings.scale)
        yield f"{layer}.weight", whole.to(weight.dtype)


def merge_into(
    model: nn.Module, tensors: Mapping[str, Tensor], settings: LoraConfig
) -> dict[str, Tensor]:
    """Adds adapters to the weights of their base, in place. Returns the other ``tensors``. Raises
    LoraError."""
    weights = dict(model.named_parameters())
    for name, weight in merged(weights, tensors, settings):
        weights[name].data.copy_(weight)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(SUFFIXES)}


def write_peft(
    directory: Path,
    tensors: Mapping[str, Tensor],
    settings: LoraConfig,
    base: str,
    task: str = "CAUSAL_LM",
) -> None:
    """Writes adapters as PEFT reads them, and with them a head that was trained whole. ``base``:
    directory or hub name of their model."""
    layers = sorted({name.rsplit(".", 2)[0] for name in tensors if name.endswith(SUFFIXES)})
    heads = [n.removesuffix(".weight") for n in tensors if not n.endswith(SUFFIXES)]
    # Layers of a pattern have ends that others have, too.
    whole = settings.targets != ALL_LINEAR and any({*t} & {*".*?["} for t in settings.targets)
    described = {name: values[0] for name, values in _PLAIN.items()} | {
        "base_model_name_or_path": base,
        _BASE: weights_fingerprint(base),
        "task_type": task,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers if whole else sorted({n.rpartition(".")[2] for n in layers}),
        "modules_to_save": heads or None,
        "inference_mode": True,
    }
    prefixed = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(prefixed, directory / TENSORS_FILE, {"format": "pt"})
    (directory / SETTINGS_FILE).write_text(json.dumps(described, indent=1))


def read_peft(settings: LoraConfig, base: str, shapes: Mapping[str, torch.Size]) -> Path:
    """The file of model.lora.path, once it is seen to have adapters of these names and ``shapes``
    for ``base``. Its names begin with PEFT_PREFIX. Raises LoraError."""
    directory = Path(str(settings.path))
    try:
        stored = json.loads((directory / SETTINGS_FILE).read_text())
        with safe_open(str(directory / TENSORS_FILE), "pt") as file:
            names = [*file.keys()]
            found = {n: torch.Size(file.get_slice(n).get_shape()) for n in names}
    except (OSError, ValueError, SafetensorError) as error:
        raise LoraError(
            f"model.lora.path = {settings.path!r} cannot be read ({error}): name a directory with "
            f"{SETTINGS_FILE} and {TENSORS_FILE}"
        ) from error
    if problem := _problem(stored, settings, base, found, shapes):
        raise LoraError(f"model.lora.path = {settings.path!r}: {problem}")
    return directory / TENSORS_FILE


def load_peft(directory: Path) -> tuple[LoraConfig, str, str, dict[str, Tensor]]:
    """Adapters as PEFT has written them, by their names on the wire: rank and alpha, base, task and
    tensors. Raises LoraError."""
    try:
        stored = json.loads((directory / SETTINGS_FILE).read_text())
        tensors = load_file(directory / TENSORS_FILE)
        settings = LoraConfig(rank=stored["r"], alpha=stored["lora_alpha"])
        base = str(stored["base_model_name_or_path"])
    except (OSError, LookupError, ValueError, SafetensorError) as error:
        raise LoraError(
            f"{directory} cannot be read ({one_line(error)}): name a directory with "
            f"{SETTINGS_FILE} and {TENSORS_FILE}"
        ) from error
    for name, values in _PLAIN.items():
        value = stored.get(name, values[0])
        if value not in values and name != "modules_to_save":  # heads
            raise LoraError(f"{directory} has {name} = {value!r}: merge it with PEFT itself")
    named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    return settings, base, str(stored.get("task_type")), named


def _problem(
    stored: Mapping[str, Any],
    settings: LoraConfig,
    base: str,
    found: Mapping[str, torch.Size],
    shapes: Mapping[str, torch.Size],
) -> str:
    for name, values in _PLAIN.items():
        if (value := stored.get(name, values[0])) not in values:
            return f"it has {name} = {value!r}, which is not supported: train other adapters"
    for name, ours in (("rank", "r"), ("alpha", "lora_alpha")):
        if stored.get(ours) != getattr(settings, name):
            return f"{ours} is {stored.get(ours)} there: set model.lora.{name} to it"
    theirs = stored.get("base_model_name_or_path")
    mine = weights_fingerprint(base)
    given = stored.get(_BASE) or (weights_fingerprint(str(theirs)) if theirs else "")
    other = mine != given if mine and given else theirs and Path(theirs).name != Path(base).name
    if other:
        return (
            f"its adapters are of {theirs}, and model.path is {base}: set model.path, or correct "
            f"base_model_name_or_path in {SETTINGS_FILE} if these are the same model"
        )
    wanted = {PEFT_PREFIX + name: shape for name, shape in shapes.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            here, there = (list(s[name]) if name in s else "absent" for s in (wanted, found))
            return (
                f"{name} is {there} there and {here} here: set model.lora.targets as in its "
                f"{SETTINGS_FILE}, or name adapters of model.path"
            )
    return ""
