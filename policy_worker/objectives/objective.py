"""Objectives: the models that they train or ask, their columns, and their loss of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.fields import Section
from paceline.config.schema import Config
from paceline.config.sections.objective_options import NoOptions
from paceline.config.sections.scorers import named_scorer
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores, token_columns

POLICY = "policy"
"""The language model that is trained, and the only part that is published to rollout workers."""
REFERENCE = "reference"
"""The frozen language model whose log-probs are ``tokens.reference``."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of the state of an objective: one model, which is trained or frozen."""

    name: str
    head: Literal["lm", "scalar"] = "lm"
    """lm: log-probs of tokens. scalar: a linear head [1, D] without bias, one number at each
    completion token, in ``scores.values[name]``. It is that of transformers'
    AutoModelForSequenceClassification with one label: read from ``path`` if that is such a model,
    else zeros."""
    path: str | None = None
    """Directory or hub name. Default: model.path."""
    lr_scale: float = 1.0
    """Learning rate, as a multiple of the step's."""
    at: Literal["token", "before"] = "token"
    """The hidden state that a scalar head reads for a completion token. token: that of the
    token itself, which has seen it (a reward of the text so far, as
    AutoModelForSequenceClassification gives it at the last token). before: that of the token before
    it, which predicts it (the value V(s_t) of the state in which the token is chosen)."""
    field: str = ""
    """The setting that gives ``path``, for errors. Default: model.path."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one row, which has C completion tokens."""

    total: Tensor
    """Scalar with graph: the row's summand of the step's loss."""
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """[C] each, constants: reported as their means over trained tokens, under these names."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """The row's summands of Objective.summed: scalars, constants."""
    means: Mapping[str, Mean] = field(default_factory=dict)
    """Means over something else than tokens, such as pairs, by name."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that merges exactly over rows and replicas. Tensors of one shape, constants."""

    values: Tensor
    weights: Tensor | None = None
    """None: all 1."""


class Objective(ABC):
    """Base class of objectives. ``columns`` and ``contributing`` need no change in most."""

    whole_groups: bool = False
    """True if ``loss`` needs whole groups in a row. It costs memory: they bound a row then."""

    Options: type[Section] = NoOptions
    """Settings of ``[objective]``."""
    options: Any
    """The options of this run, an instance of ``Options``."""

    def __init__(self, config: Config) -> None:
        """Raises pydantic's ValidationError if ``[objective]`` does not fit ``Options``."""
        self.config = config
        self.options = self.Options.model_validate(config.objective.options)

    @property
    def trains(self) -> tuple[Part, ...]:
        """The models that a step changes, all in one commit. Default: the policy, from model.path.
        The first is the main one: its checkpoints hold its tensors without a prefix."""
        return (Part(POLICY),)

    @property
    def frozen(self) -> tuple[Part, ...]:
        """Models that are only asked. Default: the reference, if train.loss.kl_coef is above 0."""
        train = self.config.train
        if train.loss.kl_coef == 0 or named_scorer(train.loss.reference) is not None:
            return ()
        return (reference_of(self.config),)

    @property
    def scalars(self) -> Mapping[str, float]:
        """Numbers of the state at the start, such as running moments. They are checkpointed and
        seeded with the parts, and ``loss`` reads them as ``scores.scalars``. Default: none."""
        return {}

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of what ``loss`` sums over a step's groups, for ``advance``. Default: none."""
        return ()

    def advance(
        self, scalars: Mapping[str, float], sums: Mapping[str, float]
    ) -> Mapping[str, float]:
        """``scalars`` after a step with ``sums``, which are those of all replicas. Called at the
        commit; it must be a pure function. Default: no change."""
        return scalars

    def resting(self, scalars: Mapping[str, float]) -> frozenset[str]:
        """Trained parts that the next step leaves exactly as they are. Default: none."""
        return frozenset()

    @property
    def entropy_gradient(self) -> bool:
        """True if ``scores.entropy`` has a graph. Default: no, which costs less."""
        return False

    @abstractmethod
    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S] or, for tokens, [C]. A group's depend on the group and on the step's totals."""

    @abstractmethod
    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """The loss of one row. A token's summand is a multiple of its ``weight``, so that rows add
        up to the step's mean, and ``scores.before`` stands for the policy before the step: a
        constant."""

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        """Columns of a batch of whole groups. Tokens older than the plan allows do not train."""
        return token_columns(batch, self.advantages(batch, totals), totals, self.config)

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        """[S]: False for sequences that are not computed: their gradient is zero anyway."""
        starts = np.cumsum(batch.length) - batch.length
        found: NDArray[np.bool_] = np.add.reduceat(columns.trained, starts) > 0
        return found


def reference_of(config: Config) -> Part:
    """The frozen model of ``train.loss.reference_path``, by default the initial one:
    ``tokens.reference`` are its log-probs."""
    return Part(REFERENCE, path=config.train.loss.reference_path, field="train.loss.reference_path")


def is_base(part: Part, config: Config) -> bool:
    """True of a reference that is the policy without its adapters: no second model is loaded."""
    same = part.name == REFERENCE and part.path in (None, config.model.path)
    return same and config.model.lora is not None
