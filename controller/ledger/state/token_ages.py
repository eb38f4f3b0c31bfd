"""Ages of a group's tokens in a step: which of them it trains, and whether the group is too old for
it. The age of a token is the number of steps between the state that sampled it and the state that
the step starts from.

- Tokens older than ``token_age`` are masked. A step's totals leave them out, as if an environment
  had written them: the loss stays a mean over what it trains. Their number follows from the journal
  alone, so it is the same for every replica and however the step is split.
- A group without a younger token is dropped as expired.
- A run that drops late groups drops one whose oldest token is older than ``max_staleness``.
"""

from controller.ledger.enums import DropReason
from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from paceline.errors import plural
from paceline.ids import Step


def token_ages(s: State, group: GroupMeta, step: Step) -> list[tuple[int, int]]:
    """(age, tokens) of the group's trainable tokens in ``step``, in the order of their versions.
    After a rollback that need not be the order of their ages."""
    return [(s.versions.staleness(version, step), n) for version, n in group.token_versions]


def token_age(s: State, step: Step) -> int:
    """Steps after which a token is masked in ``step``; an opened step keeps its own."""
    settings = s.steps.settings_of(step)
    return s.run.token_age if settings is None else settings.token_age


def trained_tokens(s: State, group: GroupMeta, step: Step) -> int:
    """Tokens of the group that have a weight in the loss of ``step``."""
    oldest = token_age(s, step)
    return sum(n for age, n in token_ages(s, group, step) if age <= oldest)


def trained_sequences(s: State, group: GroupMeta, step: Step) -> int:
    """Sequences of the group with a token that has a weight in the loss of ``step``."""
    oldest = token_age(s, step)
    return sum(
        n
        for versions, n in group.sequence_versions
        if any(s.versions.staleness(version, step) <= oldest for version in versions)
    )


def too_old(s: State, group: GroupMeta, step: Step) -> tuple[DropReason, str] | None:
    """Reason and detail for which ``step`` cannot train the group. Later steps could even less."""
    ages = (s.versions.staleness(version, step) for version, _ in group.token_versions)
    if s.run.trains_late:
        oldest = token_age(s, step)
        # Asked of every ready group at every step: one young token is enough.
        if any(age <= oldest for age in ages):
            return None
        age = min(age for age, _ in token_ages(s, group, step))
        return DropReason.EXPIRED, f"its youngest token is {plural(age, 'step')} old at step {step}"
    age = max(s.versions.staleness(group.min_version, step), *ages)
    if age <= s.run.max_staleness:
        return None
    return DropReason.STALE, f"{plural(age, 'step')} old at step {step}"
