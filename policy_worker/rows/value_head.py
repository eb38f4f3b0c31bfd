"""Scalar head over a packed row: one number at each completion token, from a transformers sequence
classifier.

The classifier's own forward pools the last token of a padded sequence. Here its backbone runs on a
packed row, and its head on the hidden states that are asked for, always in float32: a value that is
rounded to bfloat16 loses the differences that an advantage is made of.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from policy_worker.rows.logprobs import check_packable
from policy_worker.rows.packing import MicroBatch

HEAD = "score"
"""Name of the head in transformers' classifiers over decoders."""


class _ScoresStates:
    """Adds to a sequence classifier: called with ``microbatch``, it returns float32 [C].

    It is the model's own forward, so that wrappers which work by hooks on the root module (FSDP)
    see every call.
    """

    def forward(
        self: Any,
        *args: Any,
        microbatch: MicroBatch | None = None,
        at: Literal["token", "before"] = "token",
        **kwargs: Any,
    ) -> Any:
        if microbatch is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        base = getattr(self, self.base_model_prefix)
        hidden = base(
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            packing=microbatch.packing,
            use_cache=False,
        ).last_hidden_state[0]
        rows = microbatch.predict_from if at == "before" else microbatch.token_at
        if rows is None:
            raise RuntimeError("the row was packed without the last tokens of its sequences")
        with torch.autocast(hidden.device.type, enabled=False):
            return getattr(self, HEAD)(hidden.index_select(0, rows).float())[:, 0]


def make_value_head(model: nn.Module) -> None:
    """Teaches ``model`` (a sequence classifier with one label) to score packed rows, in place.

    Raises ValueError, with a reason for people, if it cannot.
    """
    check_packable(model)
    name, head = type(model).__name__, getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
        raise ValueError(f"{name} has no linear head with one output, without bias")
    # Same name: exports write it to config.json as the architecture.
    model.__class__ = type(name, (_ScoresStates, type(model)), {"__module__": __name__})


def values(model: nn.Module, microbatch: MicroBatch, at: Literal["token", "before"]) -> Tensor:
    """float32 [C]: the head's output for each completion token; see Part.at. ``model``: of
    make_value_head."""
    found: Tensor = model(microbatch=microbatch, at=at)
    return found
