"""Section of the configuration about scorers: frozen models that score completions in processes of
their own."""

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from paceline.config.fields import AT_START, Fixed, LocalPath, Positive, Seconds, Section

PREFIX = "scorer:"
"""Prefix of a scorer's name in reward.functions and train.loss.reference."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
PLACEHOLDERS = ("prompt", "completion", "answer")
"""Names in braces that a judge's prompt may contain."""


class ScorerConfig(Section):
    """One scorer. docs/scorers.md describes the kinds."""

    change = Fixed("groups in flight were scored with it")

    kind: Literal["reward_model", "judge", "logprobs"]
    """reward_model: a scalar head's score of prompt and completion. judge: the number in a language
    model's reply. logprobs: the log-prob of each token of the completion."""
    path: LocalPath | None = None
    """Directory or hub name of the model."""
    url: Annotated[Annotated[str, Field(pattern=r"^https?://\S+$")] | None, AT_START] = None
    """Judge: base URL of an OpenAI-compatible server, as http://host:8000/v1."""
    model: str | None = None
    """Judge: name of the model there."""
    api_key_file: Annotated[LocalPath | None, AT_START] = None
    """Judge: file with its key. PACELINE_JUDGE_KEY overrides it."""
    prompt: str = (
        "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nHow good is this answer, from 0 (wrong) "
        "to 10 (perfect)? "
        'Give a reason, then end with a line "Score: N".'
    )
    """Judge: request, with {prompt}, {completion} and {answer}. Other braces are doubled."""
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Judge: regular expression whose first group is the score. The last match counts."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """Judge: lowest and highest score. A reply with another one is no score."""
    max_tokens: Positive = 512
    """Judge: largest number of tokens of its reply."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Judge: sampling temperature of its replies. 0 is greedy."""
    attempts: Annotated[Positive, AT_START] = 3
    """Judge: replies that are asked for until one has a score. Then the attempt fails."""
    max_context: Positive | None = None
    """Longest prompt plus completion, in tokens. A longer one fails. Default: the model's limit."""
    batch_size: Annotated[Positive, AT_START] = 16
    """Completions that the model computes at once. Judge: requests at once."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], AT_START] = "auto"
    """Precision in which the model computes. auto uses model.dtype."""
    takes_turns: Annotated[bool, AT_START] = True
    """With fleet.sharing = "turns", a model: it is on the devices of a pair in generation's turn,
    and in host memory in training's. false: it has a device of its own."""
    timeout_s: Annotated[Seconds, AT_START] = 60.0
    """Seconds after which a request goes to another worker as well. Judge: limit of a reply."""

    @model_validator(mode="after")
    def _fits_kind(self) -> "ScorerConfig":
        if self.kind != "judge":
            if self.url is not None:
                raise ValueError(f"url is for a judge: a {self.kind} scorer loads path")
            if self.path is None:
                raise ValueError(f"path is missing: a {self.kind} scorer loads a model")
            return self
        if self.path is not None or self.url is None or self.model is None:
            raise ValueError(
                "a judge has a url and a model, and no path: serve its model, for example with "
                "vllm serve MODEL --port 8000, and set both"
            )
        self._check_prompt()
        low, high = self.score_range
        if low >= high:
            raise ValueError(f"score_range = [{low:g}, {high:g}]: write the lower number first")
        return self

    def _check_prompt(self) -> None:
        try:
            self.prompt.format(**dict.fromkeys(PLACEHOLDERS, "x"))
        except (KeyError, IndexError, ValueError) as error:
            names = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(
                f"prompt has the placeholder {error}: only {names} are replaced. Double other "
                "braces"
            ) from None
        if "{completion}" not in self.prompt:
            raise ValueError("prompt does not contain {completion}: every score would be the same")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if not groups:
            raise ValueError("pattern has no group: put the number into parentheses")


class ScorersConfig(Section):
    """Scorers by name, each in a section of its own: [scorers.NAME]. reward.functions uses one as
    "scorer:NAME"."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ScorerConfig]

    @property
    def by_name(self) -> dict[str, ScorerConfig]:
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _named(self) -> "ScorersConfig":
        for name in self.by_name:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"scorers.{name[:64]}: a scorer's name has lower-case letters, digits and '_', "
                    "begins with a letter, and has at most 32 characters"
                )
        return self


def named_scorer(function: str) -> str | None:
    """Name of the scorer that a reward or reference names; None if it names none."""
    return function.removeprefix(PREFIX) if function.startswith(PREFIX) else None
