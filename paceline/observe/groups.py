"""Groups of samples as people see them: metadata, filters, and those that were dropped lately."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.observe.vocabulary import DOCUMENTED, EventType

MOST_STEP = 1 << 53


def _whole(text: object) -> object:
    """Pydantic reads "0.0" as 0, which the published schema does not allow."""
    if isinstance(text, str) and not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError("give a whole number, such as 12")
    return text


WholeNumber = Annotated[int, BeforeValidator(_whole)]
StepNumber = Annotated[WholeNumber, Field(ge=0, le=MOST_STEP)]
Reward = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(slots=True, kw_only=True)
class GroupSummary:
    """A field is None if it is not known, or if it says nothing of this group."""

    __pydantic_config__ = DOCUMENTED

    group_id: str
    attempt: int
    state: str
    """ready, in_step, trained or dropped."""
    owner: str | None = None
    sequences: int | None = None
    """null: dropped before a group was handed in."""
    tokens: int | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    reward_max: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    staleness: int | None = None
    """Staleness of its oldest token, in steps, at the step that trains it or at the next one."""
    step: int | None = None
    """The step that trains it; null: not known yet."""
    epoch: int | None = None
    """Pass over the data set."""
    dataset_row: int | None = None
    """Row of the data set that its prompt comes from."""
    reason: str | None = None
    """Reason of the drop."""
    detail: str | None = None
    lengths: list[int] | None = None
    """Tokens of each sequence, prompt included, of a group that could not be trained."""
    dropped_t: float | None = None
    """Unix seconds."""

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.attempt


@dataclass(slots=True, kw_only=True)
class Group(GroupSummary):
    __pydantic_config__ = DOCUMENTED

    prompt: str | None = None
    completions: list[dict[str, Any]] = field(default_factory=list)
    """In the words of docs/rest.md. Empty if the sample archive has the metadata alone."""
    generate_s: float | None = None
    reward_s: float | None = None


@dataclass(slots=True)
class Groups:
    __pydantic_config__ = DOCUMENTED

    groups: list[GroupSummary]
    total: int
    """Groups that match, before the limit."""


SORTS: dict[str, tuple[Callable[[GroupSummary], float | None], int]] = {
    "recent": (lambda g: int(g.group_id[1:]), -1),
    "oldest": (lambda g: int(g.group_id[1:]), 1),
    "reward": (lambda g: g.reward_mean, 1),
    "-reward": (lambda g: g.reward_mean, -1),
    "-length": (lambda g: g.tokens, -1),
    "-staleness": (lambda g: g.staleness, -1),
}
"""Value, and 1 if the lowest comes first or -1 if the highest does. What is not known comes last.
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on a group; None: any. Tokens are those of the whole group."""

    state: Literal["ready", "in_step", "trained", "dropped"] | None = None
    step: StepNumber | None = None
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    min_tokens: StepNumber | None = None
    max_tokens: StepNumber | None = None
    row: StepNumber | None = None
    """Row of the data set: the groups of one prompt over epochs and attempts."""

    @property
    def by_content(self) -> bool:
        bounds = (self.min_reward, self.max_reward, self.min_tokens, self.max_tokens)
        return any(bound is not None for bound in bounds)

    def __call__(self, group: GroupSummary) -> bool:
        equal = ((self.state, group.state), (self.step, group.step), (self.row, group.dataset_row))
        between = (
            (self.min_reward, group.reward_mean, self.max_reward),
            (self.min_tokens, group.tokens, self.max_tokens),
        )
        return all(wanted in (None, value) for wanted, value in equal) and all(
            (least is None or (value is not None and value >= least))
            and (most is None or (value is not None and value <= most))
            for least, value, most in between
        )


def listed(found: Iterable[GroupSummary], chosen: Filter, sort: str, limit: int) -> Groups:
    value_of, sign = SORTS[sort]

    def place(group: GroupSummary) -> tuple[bool, float]:
        value = value_of(group)
        return value is None, sign * (value or 0)

    matching = sorted(filter(chosen, found), key=place)
    return Groups(matching[:limit], len(matching))


MOST = 200  # Kept per reason: the end of a run drops many at once
MOST_REASONS = 64
META_FIELDS = (
    *("sequences", "tokens", "reward_mean", "reward_std", "reward_max"),
    *("min_version", "max_version"),
)  # Facts of an accepted group, as the ledger names them and as they are shown


@dataclass(slots=True)
class DroppedGroups:
    """Recently dropped groups, with the reason and the metadata of those that were generated.
    Routine drops (too stale, equal rewards) are in no run file: they come from the journal."""

    recent: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Newest drops by reason, each with the fields of a group in the REST interface."""

    def take(self, t: float, kind: str, event: Mapping[str, Any]) -> None:
        """Takes the next event of the journal; ``t``: when it was journalled, in Unix seconds."""
        if kind != EventType.TASK_DROPPED or not event["task_id"].startswith("t"):
            return
        reason, generated = str(event["reason"]), event.get("group") or {}
        if reason not in self.recent and len(self.recent) >= MOST_REASONS:
            return
        lengths = generated.get("lengths", ())
        before = generated.get("prefixes") or [generated.get("prompt_tokens", 0)] * len(lengths)
        groups = self.recent.setdefault(reason, [])
        groups.append(
            {
                **{name: generated[name] for name in META_FIELDS if name in generated},
                "lengths": [*map(add, before, lengths)] or None,
                "group_id": event["task_id"],
                "attempt": int(event["attempt"]),
                "state": "dropped",
                "reason": reason,
                "detail": event.get("detail") or None,
                "dropped_t": t,
            }
        )
        del groups[:-MOST]

    def for_reason(self, reason: str | None) -> list[dict[str, Any]]:
        """Groups dropped for ``reason``; None: for any."""
        groups = self.recent.items()
        return [group for why, found in groups if reason in (None, why) for group in found]

    def reason_of(self, group_id: str) -> str | None:
        """Reason of the group's drop; None if it was not dropped lately."""
        found = self.for_reason(None)
        return next((group["reason"] for group in found if group["group_id"] == group_id), None)
