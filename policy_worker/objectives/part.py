"""Part of the state of an objective: one model, which is trained or frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

POLICY = "policy"
"""The language model that is trained, and the only part that is published to rollout workers."""
REFERENCE = "reference"
"""The frozen language model whose log-probs are ``tokens.reference``."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    head: Literal["lm", "scalar"] = "lm"
    """lm: log-probs of tokens. scalar: a linear head [1, D] without bias, one number at each
    completion token, in ``scores.values[name]``. It is that of transformers'
    AutoModelForSequenceClassification with one label: read from ``path`` if that is such a model,
    else zeros.
    """
    path: str | None = None
    """Directory or hub name. Default: model.path."""
    lr_scale: float = 1.0
    """Learning rate, as a multiple of the step's."""
    at: Literal["token", "before"] = "token"
    """Of a scalar head: the hidden state that it reads for a completion token. token: that of the
    token itself, which has seen it (a reward of the text so far, as
    AutoModelForSequenceClassification gives it at the last token). before: that of the token before
    it, which predicts it (the value V(s_t) of the state in which the token is chosen).
    """
    field: str = ""
    """The setting that gives ``path``, for errors. Default: model.path."""
