"""Objective of a step: what is optimised, as a sum over the step's groups.

The summand of a group depends on the group, the state before the step and the step's totals, and on
nothing else. Everything elastic rests on that: groups may be split over replicas, packed into rows,
or computed again by a survivor, and the sum of the gradients is the same. ``paceline
check-objective NAME`` tests it.

An objective of your own is a class in a file of yours, named by ``train.algorithm =
"module:Class"``:

    class Mine(Objective):
        class Options(Section):                      # the settings of [objective]
            beta: float = 0.1
        def advantages(self, batch, totals): ...     # NumPy, before the model runs
        def loss(self, scores, tokens): ...          # torch, of one row
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.fields import Section
from paceline.config.schema import Config
from paceline.config.sections.objectives import NoOptions
from paceline.config.sections.scorers import named_scorer
from policy_worker.objectives.columns import TokenColumns, token_weights
from policy_worker.objectives.part import POLICY, REFERENCE, Part
from policy_worker.rows.logprobs import TokenScores
from policy_worker.step.batch import Floats, TokenBatch, scored_by, staleness
from policy_worker.step.totals import StepTotals


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one row, which has C completion tokens."""

    total: Tensor
    """Scalar with graph: the row's summand of the step's loss."""
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """[C] each, constants: reported as their means over trained tokens, under these names."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """The row's summands of Objective.summed: scalars, constants."""
    means: Mapping[str, Mean] = field(default_factory=dict)
    """What is no mean over tokens, by name: over pairs, for instance."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that merges exactly over rows, replicas and steps. Both tensors have one shape, and
    are constants."""

    values: Tensor
    weights: Tensor | None = None
    """None: all 1."""


class Objective(ABC):
    """Base class of objectives. ``columns`` and ``contributing`` need no change in most."""

    whole_groups: bool = False
    """Whether ``loss`` needs all completions of a group in one row. It costs memory: a group's
    tokens then bound a row."""

    Options: type[Section] = NoOptions
    """Settings of ``[objective]``."""
    options: Any
    """Those of this run, an instance of ``Options``."""

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
        """Models that are only asked. Default: the reference, if train.kl_coef is above 0."""
        train = self.config.train
        if train.kl_coef == 0 or named_scorer(train.reference) is not None:
            return ()
        return (reference_of(self.config),)

    @property
    def scalars(self) -> Mapping[str, float]:
        """Numbers of the state at the start, such as running moments. They are checkpointed and
        seeded with the parts, and ``loss`` reads them as ``scores.scalars``. Default: none."""
        return {}

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of what ``loss`` sums up over the groups of a step, for ``advance``. Default: none."""
        return ()

    def advance(
        self, scalars: Mapping[str, float], sums: Mapping[str, float]
    ) -> Mapping[str, float]:
        """``scalars`` after a step with ``sums``, which are those of all replicas. Called at the
        commit; it must be a pure function. Default: no change."""
        return scalars

    def resting(self, scalars: Mapping[str, float]) -> frozenset[str]:
        """Names of the trained parts that the next step leaves exactly as they are. Default: none."""
        return frozenset()

    @property
    def entropy_gradient(self) -> bool:
        """Whether ``scores.entropy`` has a graph. Default: no, which costs less."""
        return False

    @abstractmethod
    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S] for sequences, or [C] for tokens. A group's depend on the group and on the step's
        totals."""

    @abstractmethod
    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """Of one row. A token's summand is a multiple of its ``weight``, so that rows add up to the
        step's mean, and ``scores.before`` stands for the policy before the step: a constant."""

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        """The token columns of a batch of whole groups. Tokens older than the plan allows are not
        trained."""
        advantage = self.advantages(batch, totals).astype(np.float32)
        if len(advantage) == len(batch.length):
            advantage = np.repeat(advantage, batch.length)
        age = staleness(batch.version, totals.step, totals.version_epochs)
        trained = batch.trained * (age <= totals.token_age).astype(np.float32)
        return TokenColumns(
            behaviour=batch.behaviour,
            advantage=advantage,
            weight=token_weights(
                trained, batch.length, totals.tokens, totals.sequences, self.config
            ),
            trained=trained,
            staleness=age.astype(np.float32),
            sequence_of=np.repeat(np.arange(len(batch.length)), batch.length),
            sequences=len(batch.length),
            reference=self._remote_reference(batch),
            scored=batch.scored,
        )

    def _remote_reference(self, batch: TokenBatch) -> Floats | None:
        """Log-probs [C] of the reference that a scorer computed; None if the run has none."""
        name = named_scorer(self.config.train.reference)
        if name is None or self.config.train.kl_coef == 0:
            return None
        return scored_by(batch, name)

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        """[S]: False for sequences whose gradient is zero by construction. They are not computed."""
        starts = np.cumsum(batch.length) - batch.length
        found: NDArray[np.bool_] = np.add.reduceat(columns.trained, starts) > 0
        return found


def reference_of(config: Config) -> Part:
    """The frozen model of ``train.reference_path``, by default the initial one:
    ``tokens.reference`` are its log-probs."""
    return Part(REFERENCE, path=config.train.reference_path, field="train.reference_path")
