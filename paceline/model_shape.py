"""Sizes of a model, from its config.json alone.

Parameters are counted on torch's meta device. The bytes that a forward keeps for its backward are
those of the first blocks, until each kind of block is among them. They are run there as well,
without data.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.structured_log import first_line

_ATTENTION = "paceline_memory_plan"
TOKENS = 256
"""Length of a row without data, and of another that is twice as long: what they differ by is kept
of tokens, and the rest of weights. Recurrent layers loop over the tokens of a row in Python."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    parameters: int
    block_parameters: int  # Of the largest transformer block
    root_parameters: int  # Outside the blocks
    layers: int
    hidden: int
    vocabulary: int
    kv_elements: int  # Elements of keys and values per token, over all layers with attention
    block_saved: int  # Bytes per token that one block keeps for its backward, at most
    blocks_saved: int  # The same of all blocks together
    root_saved: int
    block_inputs: int  # Bytes per token that all blocks take
    adapters: int = 0  # Parameters that [model.lora] adds, and the only ones that are trained


def trainer_dtype(config: Config) -> str:
    """The precision of the trainer on a GPU."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def scorer_shapes(config: Config) -> dict[str, ModelShape]:
    """Shapes of the models of scorers, as language models, by name: with turns, of those that take
    part. Raises BadInput."""
    scorers, every = config.scorers.by_name.items(), not config.takes_turns
    there = [name for name, s in scorers if s.path is not None and (every or s.takes_turns)]
    return {name: read_shape(config, name) for name in there}


def read_shape(config: Config, scorer: str = "") -> ModelShape:
    """The shape of the policy, or of a scorer's model. Raises BadInput if the model's config cannot
    be read, or its model cannot be built or run without data."""
    from transformers import AutoConfig

    field, path, trusted = "model.path", config.model.path, config.model.trust_remote_code
    if scorer:
        field, path = f"scorers.{scorer}.path", str(config.scorers.by_name[scorer].path)
    try:
        stored = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        shape = shape_of(stored, trainer_dtype(config), trust_remote_code=trusted)
        if scorer or config.model.lora is None:
            return shape
        from paceline.lora import adapter_shapes

        adapters = adapter_shapes(stored, config.model.lora, trust_remote_code=trusted)
        return replace(shape, adapters=sum(map(math.prod, adapters.values())))
    except BadInput:
        raise
    except Exception as error:  # files of users, models of others' code, and data-dependent ones
        raise BadInput(
            f"{field} = {path!r}: its config.json cannot be read, or its memory not be computed "
            f"({first_line(error)}): give a directory that has one, or a hub name that this "
            "machine can reach, or start the run on one GPU and read its peak"
        ) from error


def shape_of(config: Any, dtype: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The same, from a transformers config, for a trainer that computes in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    blocks = blocks_of(model)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    total = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    kinds = [_kind_of(block) for block in blocks]
    first = {kind: kinds.index(kind) for kind in kinds}
    saved = _saved(text, max(first.values()) + 1, dtype, trust_remote_code)
    each = {kind: saved[place] for kind, place in first.items()}
    counts = Counter(kinds)
    attending = sum(counts[kind] for kind, found in each.items() if found.attends)
    return ModelShape(
        parameters=total,
        block_parameters=max(sizes, default=total),
        root_parameters=total - sum(sizes),
        layers=layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_elements=2 * attending * kv_heads * head_dim,
        block_saved=max(found.bytes for found in each.values()),
        blocks_saved=sum(counts[kind] * found.bytes for kind, found in each.items()),
        root_saved=saved[None].bytes,
        block_inputs=(2 if dtype == "bfloat16" else 4) * text.hidden_size * layers,
    )


def blocks_of(model: Any) -> list[Any]:
    """The transformer blocks: what the model itself declares indivisible, else its longest list."""
    from torch import nn

    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [m for m in model.modules() if type(m).__name__ in names]
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return blocks or max(lists, key=len, default=[])


def _kind_of(block: Any) -> tuple[Any, ...]:
    """Equal for blocks that compute alike: names, classes and shapes of all that is in them."""
    modules = ((name, type(module)) for name, module in block.named_modules())
    return (*modules, *((name, tuple(p.shape)) for name, p in block.named_parameters()))


@dataclass(slots=True)
class _Saved:
    bytes: int = 0  # Per token
    attends: bool = False


def _saved(
    config: Any, blocks: int, dtype: str, trust_remote_code: bool
) -> dict[int | None, _Saved]:
    """Bytes that a forward keeps for its backward, without parameters and head: in each of the
    first ``blocks`` blocks, and outside (None)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AttentionInterface, AutoModel

    inside: int | None = None
    kept: dict[int, tuple[int | None, torch.UntypedStorage]] = {}
    found: dict[int | None, _Saved] = {place: _Saved() for place in (None, *range(blocks))}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, (inside, storage))
        return tensor

    def attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        """Keeps what fused attention keeps. Prompts copied for each completion are not counted."""
        found[inside].attends = True
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        for tensor in (query, key, value, output):
            keep(tensor)
        return output.transpose(1, 2).contiguous(), None

    class Experts(TorchDispatchMode):  # type: ignore[misc]
        """Without data, torch multiplies by experts in bfloat16 alone."""

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._grouped_mm.default:
                return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
            return func(*args, **kwargs or {})

    def enter(place: int | None) -> Any:
        def entered(*_: Any) -> None:
            nonlocal inside
            inside = place

        return entered

    AttentionInterface.register(_ATTENTION, attention)
    with torch.device("meta"), Experts():
        model = AutoModel.from_config(
            config,
            attn_implementation=_ATTENTION,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
        )
        model.train()
        every = blocks_of(model)
        for block in every[blocks:]:  # their places stay, for what the config says of them
            block.forward = lambda hidden_states, *_, **__: hidden_states
        for number, block in enumerate(every[:blocks]):
            block.register_forward_pre_hook(enter(number))
            block.register_forward_hook(enter(None))
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        for tokens, sign in ((TOKENS, -1), (2 * TOKENS, 1)):
            kept.clear()
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(input_ids=ids, position_ids=ids, use_cache=False)
            for key, (place, storage) in kept.items():
                found[place].bytes += 0 if key in weights else sign * storage.nbytes()
    for part in found.values():
        part.bytes = max(0, part.bytes // TOKENS)
    return found
