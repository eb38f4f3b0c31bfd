"""Compilation of a model's transformer blocks with torch.compile, around their attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def compile_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Has each of ``blocks`` compiled at its first call, for rows of any length. To be called
    before they are sharded.

    Attention stays as it is: its Python runs over the sequences of a row, which differ from row to
    row, and a compiled copy would be made for each kind of row.
    """
    config: Any = model.config
    name = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    for block in blocks:
        # Inside the block's gradient checkpoint, which is in its __call__.
        block.compile(dynamic=True)
