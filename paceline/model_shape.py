"""Sizes of a model, from its config.json alone; and its head, for hidden states that are asked for.

Parameters are counted on torch's meta device. The bytes that a forward keeps for its backward are
linear in tokens and blocks: models of one and two blocks are run on fake tensors, without data.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import BadInput
from paceline.process.structured_log import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIB = 1 << 20
DEFAULT_CHUNK_MB = 128
"""MiB of float32 logits."""
_ATTENTION = "paceline_memory_plan"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. Bytes are those per token."""

    parameters: int
    active_parameters: int
    """Parameters that a token uses: fewer than all in a mixture of experts."""
    block_parameters: int
    """Parameters of the largest transformer block."""
    root_parameters: int
    """Parameters outside the blocks."""
    layers: int
    hidden: int
    vocabulary: int
    kv_elements: int
    """Elements of keys and values per token, over all layers."""
    positions: int | None
    """Longest context that the model declares."""
    block_saved: int
    """Bytes that one block keeps for its backward."""
    root_saved: int
    weight_copies: int
    """Bytes of the weights that autocast converts, over all blocks; 0 in float32."""


def read_shape(path: str, dtype: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a directory or hub name, for a trainer that computes in ``dtype``. Raises
    BadInput if the config cannot be read, or its model cannot be built or run without data."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return shape_of(config, dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # files of users, models of others' code, and data-dependent ones
        raise BadInput(
            f"model.path = {path!r}: its config.json cannot be read, or its memory not be computed "
            f"({first_line(error)}): give a directory that has one, or a hub name that this "
            "machine can reach, or start the run on one GPU and read its peak"
        ) from error


def shape_of(config: Any, dtype: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The same, from a transformers config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    kinds = getattr(model, "_no_split_modules", None) or ()
    sizes = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if type(module).__name__ in kinds
    ]
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    number = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    idle = experts - experts * used // number if used and number else 0
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    layers = text.num_hidden_layers
    # What a block keeps is the difference between a model of two and a model of one.
    one, copies_of_one = _slope_and_constant(config, 1, dtype)
    two, copies_of_two = _slope_and_constant(config, 2, dtype)
    return ModelShape(
        parameters=total,
        active_parameters=total - idle,
        block_parameters=max(sizes, default=total),
        root_parameters=total - sum(sizes),
        layers=layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_elements=2 * layers * kv_heads * head_dim,
        positions=getattr(text, "max_position_embeddings", None),
        block_saved=two - one,
        root_saved=max(0, 2 * one - two),
        weight_copies=layers * (copies_of_two - copies_of_one),
    )


def _slope_and_constant(config: Any, blocks: int, dtype: str) -> tuple[int, int]:
    """Bytes that a model of so many blocks keeps: per token, and whatever their number."""
    few, many = (_saved(config, blocks, tokens, dtype) for tokens in (256, 512))
    slope = (many - few) // 256
    return slope, many - slope * 512


def _saved(config: Any, blocks: int, tokens: int, dtype: str) -> int:
    """Bytes that a forward keeps for its backward, without parameters and head."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AutoModel

    AttentionInterface.register(_ATTENTION, _attention)
    small = copy.deepcopy(config.get_text_config())
    small.num_hidden_layers = blocks
    small.use_cache = False
    masks = None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:blocks]
        masks = {"full_attention": None, "sliding_attention": None}
    sizes: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        held.append(tensor)  # a storage that is freed could give its address to another
        return tensor

    mixed = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    with FakeTensorMode(), mixed:
        model = AutoModel.from_config(small, attn_implementation=_ATTENTION, dtype=torch.float32)
        model.train()
        for name, parameter in model.named_parameters():
            # A sharded replica gathers experts in this type. Autocast leaves their product alone,
            # and without data it is defined in no other.
            if dtype == "bfloat16" and ".experts." in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=ids, position_ids=ids, attention_mask=masks, use_cache=False)
    return sum(size for storage, size in sizes.items() if storage not in weights)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any
) -> tuple[Any, None]:
    """Shapes that fused attention keeps; prompts copied for each completion are not counted."""
    import torch

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            output = query.new_zeros((*query.shape[:-1], value.shape[-1]))
            ctx.save_for_backward(query, key, value, output)
            return output

    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    output = Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def tokens_per_chunk(vocabulary: int, chunk_mb: float) -> int:
    """Tokens whose float32 logits fill at most ``chunk_mb`` MiB; at least one."""
    return max(1, int(chunk_mb * MIB) // (4 * vocabulary))


def head_scratch_bytes(
    tokens: int, hidden: int, vocabulary: int, chunk_mb: float, *, entropy_gradient: bool = False
) -> int:
    """Most bytes that scoring ``tokens`` targets of a row and its backward pass hold beside weights
    and gradients.

    Four times the logits of a chunk, five with the gradient of the entropy (measured), and with
    several chunks the gradient of the head once more. Caps and scales of logits (Gemma, Cohere,
    Granite) are not in it, nor are sharded heads.
    """
    chunk = min(tokens, tokens_per_chunk(vocabulary, chunk_mb))
    logits = (5 if entropy_gradient else 4) * chunk * vocabulary * 4
    return logits + (vocabulary * hidden * 4 if chunk < tokens else 0)


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] of last hidden states [..., D], as the forward of transformers' models
    computes them: Gemma caps logits, Cohere multiplies and Granite divides them."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = (logits / cap).tanh() * cap
    return logits


def has_other_logits(model: Any, device: torch.device) -> bool:
    """True if the model's own forward gives other logits than ``logits_of``: its prediction head
    has more layers, or scales of its own."""
    import torch

    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(16, device=device)[None] % rows
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        own = model(input_ids=ids, use_cache=False).logits.float()
        return not torch.allclose(own, logits_of(model, hidden).float(), atol=0.05, rtol=0.01)
