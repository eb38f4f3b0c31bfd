"""Section of the configuration about evaluations: named sets of held-out prompts, and the metric
that judges."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.fields import Fixed, LocalPath, Positive, Section
from paceline.config.sections.inputs import DataConfig, RewardConfig, Rewards

HELD_OUT = "held_out"
"""Name of the set of data.eval_path."""
VOTES = Literal["auto", "text", "boxed", "number"]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")]


class EvalSetConfig(Section):
    """One evaluation set, as [evaluation.sets.NAME]."""

    path: LocalPath
    """Held-out data, in any form that data.path accepts."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "test"
    """Split of a Hugging Face data set."""
    prompt_field: str | None = None
    """Field with the prompt. Default: data.prompt_field."""
    answer_field: str | None = None
    """Field with the answer. Default: data.answer_field."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples of each prompt. With k of them, pass@1 to pass@k and maj@k are reported. One is
    greedy, unless temperature or top_p is set."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Sampling temperature. Default: rollout.temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling. Default: rollout.top_p."""
    limit: Positive = 256
    """Largest number of prompts: the first ones of the data."""
    every: Positive | None = None
    """Steps between evaluations, beside those at step 0 and at the end. Default:
    train.eval_every."""
    reward: Rewards | None = None
    """Rewards of this set. Default: reward.functions."""
    solved_at: float = 1.0
    """Reward from which a sample counts as solved, in pass@k and maj@k."""
    vote: VOTES = "auto"
    """Answers that are counted in maj@k. text: the whole completion. boxed: the last
    \\\\boxed{...}. number: the last number. auto: boxed with math_boxed; boxed, else number with
    math_verify; text with others."""

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken each time."""
        return self.samples == 1 and self.temperature is None and self.top_p is None

    def data(self, data: DataConfig) -> DataConfig:
        """The fields of this set's rows, in place of those of the training data."""
        fields = {"prompt_field": self.prompt_field, "answer_field": self.answer_field}
        given = {name: value for name, value in fields.items() if value is not None}
        return data.model_copy(update={"name": self.name, **given})

    def votes(self, reward: RewardConfig) -> str:
        """text, boxed, number, or math: boxed, else number. That is what the reward reads."""
        if self.vote != "auto":
            return self.vote
        functions = reward.functions if self.reward is None else self.reward
        if "math_verify" in functions:
            return "math"
        boxed = any(name.startswith("math_boxed") for name in functions)
        return "boxed" if boxed else "text"


class EvaluationConfig(Section):
    change = Fixed("the ledger ranks checkpoints by these evaluations")

    sets: dict[SetName, EvalSetConfig] = Field(default_factory=dict)
    """Evaluation sets, each a table [evaluation.sets.NAME]. The set of data.eval_path is
    held_out."""
    best_metric: str | None = None
    """Metric that chooses the best checkpoint, as SET/METRIC: math500/pass@1, aime/maj@8. Default:
    the reward of held_out, or of the first set by name."""
