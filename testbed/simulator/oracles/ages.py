"""Rules of age in a simulated run: what a step may train, must mask, and may drop.

Written without the ledger's code, from the run's settings and the books of the oracle.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from controller.ledger import events as ev
from controller.ledger.specs import GroupMeta, RunSpec

Ages = Mapping[int, int]
"""Tokens of a group by their age in a step."""


def ages_of(group: GroupMeta, step: int, steps_of: Mapping[int, int]) -> Ages:
    """``steps_of``: version to the step that it stands after. Nothing for a group that was sampled
    with a version that is not there: of a commit that is lost."""
    if not steps_of.keys() >= {version for version, _ in group.token_versions}:
        return {}
    ages: Counter[int] = Counter()
    for version, count in group.token_versions:
        ages[max(0, step - 1 - steps_of[version])] += count
    return ages


NO_AGE = 1 << 30
"""Age of recorded data: no group is too old for any step."""


def _late_allowed(spec: RunSpec) -> bool:
    return spec.recorded or (spec.late_groups == "train" and spec.max_staleness > 0)


def bound_of(spec: RunSpec) -> int:
    """Age of the oldest token that may have weight in a loss."""
    if spec.recorded:
        return NO_AGE
    return spec.max_token_age if _late_allowed(spec) else spec.max_staleness


def may_be_trained(ages: Ages, spec: RunSpec) -> bool:
    if _late_allowed(spec):
        return min(ages) <= bound_of(spec)
    return max(ages) <= spec.max_staleness


def split(groups: Iterable[Ages], spec: RunSpec) -> tuple[int, int]:
    """(tokens with weight in the loss, masked tokens)."""
    tokens = [(age <= bound_of(spec), n) for ages in groups for age, n in ages.items()]
    return sum(n for trained, n in tokens if trained), sum(
        n for trained, n in tokens if not trained
    )


def trained_sequences(
    group: GroupMeta, step: int, steps_of: Mapping[int, int], spec: RunSpec
) -> int:
    """Sequences with a token that has weight in the loss."""
    return sum(
        n
        for versions, n in group.sequence_versions
        if max(steps_of[version] for version in versions) >= step - 1 - bound_of(spec)
    )


def wrong_drop(e: ev.TaskDropped, ages: Ages, spec: RunSpec) -> str:
    """Reason why the group may not be dropped for its age; ``ages``: in the earliest step that it
    could be
    in."""
    if e.reason == "stale" and _late_allowed(spec):
        return f"{e.task_id} was dropped because it was late: {e.detail}"
    if e.reason == "expired" and (e.group is None or not _late_allowed(spec)):
        return f"{e.task_id} expired without tokens, or in a run that drops late groups"
    if e.reason == "expired" and ages and may_be_trained(ages, spec):
        return f"{e.task_id} expired with tokens of these ages: {dict(ages)}"
    return ""
