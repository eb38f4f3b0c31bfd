"""Sizes of a model, from its config.json alone.

Parameters are counted on torch's meta device. The bytes that a forward keeps for its backward are
those of models of one and two blocks, which are run on fake tensors, without data.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.structured_log import first_line

_ATTENTION = "paceline_memory_plan"
TOKENS = 1 << 24
"""Length of a row without data: copies of weights are nothing beside what so many tokens keep."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    parameters: int
    block_parameters: int  # Of the largest transformer block
    root_parameters: int  # Outside the blocks
    layers: int
    hidden: int
    vocabulary: int
    kv_elements: int  # Elements of keys and values per token, over all layers
    block_saved: int  # Bytes per token that one block keeps for its backward
    root_saved: int
    block_inputs: int  # Bytes per token that all blocks take
    adapters: int = 0  # Parameters that [model.lora] adds, and the only ones that are trained


def trainer_dtype(config: Config) -> str:
    """The precision of the trainer on a GPU."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def read_shape(config: Config) -> ModelShape:
    """The shape of the policy. Raises BadInput if the model's config cannot be read, or its model
    cannot be built or run without data."""
    from transformers import AutoConfig

    path, trusted = config.model.path, config.model.trust_remote_code
    try:
        stored = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        shape = shape_of(stored, trainer_dtype(config), trust_remote_code=trusted)
        if config.model.lora is None:
            return shape
        from paceline.lora import adapter_shapes

        adapters = adapter_shapes(stored, config.model.lora, trust_remote_code=trusted)
        return replace(shape, adapters=sum(map(math.prod, adapters.values())))
    except BadInput:
        raise
    except Exception as error:  # files of users, models of others' code, and data-dependent ones
        raise BadInput(
            f"model.path = {path!r}: its config.json cannot be read, or its memory not be computed "
            f"({first_line(error)}): give a directory that has one, or a hub name that this "
            "machine can reach, or start the run on one GPU and read its peak"
        ) from error


def shape_of(config: Any, dtype: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The same, from a transformers config, for a trainer that computes in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    total = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # What a block keeps is the difference between a model of two and a model of one.
    one, two = (_saved(text, blocks, dtype) for blocks in (1, 2))
    return ModelShape(
        parameters=total,
        block_parameters=max(sizes, default=total),
        root_parameters=total - sum(sizes),
        layers=layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_elements=2 * layers * kv_heads * head_dim,
        block_saved=two - one,
        root_saved=max(0, 2 * one - two),
        block_inputs=(2 if dtype == "bfloat16" else 4) * text.hidden_size * layers,
    )


def blocks_of(model: Any) -> list[Any]:
    """The transformer blocks: what the model itself declares indivisible, else its longest list."""
    from torch import nn

    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [m for m in model.modules() if type(m).__name__ in names]
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return blocks or max(lists, key=len, default=[])


def _saved(config: Any, blocks: int, dtype: str) -> int:
    """Bytes per token that a forward keeps for its backward, without parameters and head."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AutoModel

    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    def attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        """Keeps what fused attention keeps. Prompts copied for each completion are not counted."""
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        for tensor in (query, key, value, output):
            keep(tensor)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attention)
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = blocks, False
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:blocks]
    precision = getattr(torch, dtype)
    with FakeTensorMode():
        model = AutoModel.from_config(small, attn_implementation=_ATTENTION, dtype=precision)
        model.train()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=ids, position_ids=ids, use_cache=False)
    found: int = sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
    return found // TOKENS
