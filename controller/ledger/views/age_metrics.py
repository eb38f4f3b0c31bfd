"""Metrics of age: what a step masks, what was dropped before it, and the lengths of both. Slowness
is content: long answers, hard prompts, slow environments. So the share that is late, masked or
dropped stands beside its mean length, to be compared with the length of all that the step
trains."""

from collections.abc import Iterable, Mapping, Sequence

from controller.ledger.enums import DROPPED_FOR_AGE, DropReason
from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from controller.ledger.state.tasks import GroupSizes
from controller.ledger.state.token_ages import is_late, token_age, token_ages, trained_tokens
from paceline.ids import Step

AGE_BUCKETS = {0: "0", 1: "1", 2: "2", 4: "3_4", 8: "5_8", 16: "9_16", 32: "17_32"}
"""Largest age of a bucket, in steps, and its name; one more is for what is older."""
OLDEST_BUCKET = "33_up"
_BUCKETS = (*AGE_BUCKETS.values(), OLDEST_BUCKET)
RESPONSE_TOKENS = {
    "all": "response_tokens_mean",
    **{
        name: f"{name}_response_tokens_mean"
        for name in ("late", "masked", "dropped", "uninformative")
    },
}  # Metrics of length: of all that a step trains, and of each part


def age_metrics(s: State, groups: Sequence[GroupMeta], step: Step) -> dict[str, float]:
    """Shares are of the step's tokens or groups; dropped ones count with those of the step. Lengths
    are in tokens a completion, and absent if there is no such completion. Ages are in steps.
    Recorded groups have none."""
    if s.run.recorded:
        return {}
    ages = [(age, n) for group in groups for age, n in token_ages(s, group, step)]
    trained = [(age, n) for age, n in ages if age <= token_age(s, step)]
    tokens = sum(n for _, n in trained)
    late = [g for g in groups if is_late(s, g, step)]
    masked = [g for g in groups if trained_tokens(s, g, step) < g.tokens]
    too_old = [s.tasks.dropped_groups.get(reason, GroupSizes()) for reason in DROPPED_FOR_AGE]
    dropped = sum(d.groups for d in too_old)
    dull = s.tasks.dropped_groups.get(DropReason.UNINFORMATIVE, GroupSizes())
    return {
        "staleness_mean": sum(age * n for age, n in trained) / tokens,
        "staleness_max": float(max(age for age, _ in trained)),
        "late_share": len(late) / len(groups),
        "masked_share": 1.0 - tokens / sum(g.tokens for g in groups),
        "dropped_share": dropped / (dropped + len(groups)),
        "uninformative_share": dull.groups / (dull.groups + len(groups)),
        **_length("late", late),
        **_length("masked", masked),
        **_length("dropped", too_old),
        **_length("uninformative", [dull]),
        **_histogram(trained, tokens),
    }


def token_ages_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The step's histogram as people read it: share of trained tokens by "0", "3-4", "33+"."""
    shown = {name: name.replace("_up", "+").replace("_", "-") for name in _BUCKETS}
    return {
        shown[name]: metrics[key] for name in _BUCKETS if (key := f"token_age_{name}") in metrics
    }


def _length(name: str, sizes: Iterable[GroupMeta | GroupSizes]) -> dict[str, float]:
    sizes = list(sizes)
    sequences = sum(size.sequences for size in sizes)
    if not sequences:
        return {}
    return {RESPONSE_TOKENS[name]: sum(size.tokens for size in sizes) / sequences}


def _histogram(ages: Iterable[tuple[int, int]], tokens: int) -> dict[str, float]:
    """Share of trained tokens by age."""
    counts = dict.fromkeys(_BUCKETS, 0)
    for age, n in ages:
        fitting = (name for most, name in AGE_BUCKETS.items() if age <= most)
        counts[next(fitting, OLDEST_BUCKET)] += n
    return {f"token_age_{name}": n / tokens for name, n in counts.items()}
