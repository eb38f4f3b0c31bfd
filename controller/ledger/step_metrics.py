"""Metrics of a step: its groups and votes merged into one row of numbers.

Slowness is content: long answers, hard prompts, slow environments. So the share that is late,
masked or dropped stands beside its mean length, to be compared with that of all that is trained."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.ledger.enums import DROPPED_FOR_AGE, DropReason
from controller.ledger.specs import GroupMeta, StatValue
from controller.ledger.state.state import State
from controller.ledger.state.steps import OpenStep, Vote
from controller.ledger.state.tasks import GroupSizes, ordinal_of
from controller.ledger.state.token_ages import token_age, token_ages, trained_tokens
from paceline.ids import Step

TOO_LONG = "prompt_too_long"
"""Reason that rollout workers give for a prompt which they drop for its length."""


def data_metrics(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Metrics of a step with ``groups``. Rewards are means over sequences; shares are of groups, or
    of the rows of the data. ``prompts_truncated`` counts the step's groups, ``prompts_too_long``
    what was dropped since the run began."""
    metrics = {
        "prompts_truncated": float(sum(group.prompt_cut > 0 for group in groups)),
        "prompts_too_long": float(state.tasks.dropped.get(TOO_LONG, 0)),
        **_of_sources(state, groups),
    }
    if state.run.curriculum_min:
        curriculum, rows = state.tasks.curriculum, state.run.dataset_rows
        metrics["rows_always_solved"] = curriculum.always / rows
        metrics["rows_never_solved"] = curriculum.never / rows
        metrics["rows_passed_over"] = float(state.tasks.passed_over)
    return metrics


def _of_sources(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """A source without a group in the step has a share of 0 and no reward."""
    order = state.run.order
    if not order.sources:
        return {}
    of_source: list[list[GroupMeta]] = [[] for _ in order.sources]
    for group in groups:
        row = order.place(ordinal_of(group.task_id))[1]
        of_source[order.source_of(row)].append(group)
    metrics = {}
    for name, found in zip(order.names, of_source, strict=True):
        metrics[f"source_share_{name}"] = len(found) / len(groups)
        if sequences := sum(group.sequences for group in found):
            rewards = sum(group.reward_mean * group.sequences for group in found)
            metrics[f"source_reward_{name}"] = rewards / sequences
    return metrics


RATIO_SQUARE = "ratio_square"
"""Statistic of votes, sum of squares of the importance weights. With their sum it gives ess, the
effective sample size as a share of the number n of tokens: (sum w)^2 / (n * sum w^2). 1: all
weights are equal."""
CRITIC = ("return_mean", "return_square", "value_error", "value_error_square")
"""Statistics of votes that give explained_variance, 1 - Var(return - value) / Var(return). All but
the first are reported only so."""
REWARD, REWARD_SQUARE = "reward/", "reward_square/"
"""Prefixes of statistics of votes, before the name of a reward function: its values and their
squares. They give reward/NAME and reward/NAME/std."""
_MEAN_AND_MAX = ("ratio", "logprob_gap", "logprob_gap_fresh")
"""Statistics of votes whose maximum is reported beside the mean."""


def step_metrics(state: State, step: OpenStep, now: float) -> dict[str, float]:
    """Metrics of the open step at its commit. Times in seconds, staleness in steps."""
    groups = [state.meta(task_id) for task_id in step.groups]
    sequences = sum(g.sequences for g in groups)
    tokens = sum(trained_tokens(state, g, step.step) for g in groups)
    step_s = max(now - state.steps.last_commit_t, 1e-6)
    if now < state.steps.last_commit_t:
        step_s = math.nan  # the clock was set back: no rate is better than a rate of billions
    votes, book = list(step.votes.values()), state.tasks
    metrics = {
        "step": float(step.step),
        "version": float(state.versions.version + 1),
        **({} if state.run.recorded else _rewards(state, groups)),
        **_merge(votes),
        **_ages(state, groups, step.step),
        **data_metrics(state, groups),
        "tokens": float(tokens),
        "samples": float(sequences),
        "tokens_per_s": tokens / step_s,
        "samples_per_s": sequences / step_s,
        "step_s": step_s,
        "response_tokens_mean": sum(g.tokens for g in groups) / sequences,
        "time_generate_s": sum(g.generate_s for g in groups) / len(groups),
        "time_reward_s": sum(g.reward_s for g in groups) / len(groups),
        "queue_pending": float(len(book.pending)),
        "queue_leased": float(book.leased),
        "queue_ready": float(len(book.ready)),
        "replicas": float(len(votes)),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _rewards(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Metrics of samples: the reward of a recorded row says nothing of the policy.
    ``zero_variance_share`` counts groups whose rewards are all equal, those that were dropped for
    it included; a group of one has no variance to speak of."""
    totals = reward_totals(groups)
    deviation = math.sqrt(totals.squares / max(totals.samples - 1, 1))
    found = {"reward_mean": totals.total / totals.samples, "reward_std": deviation}
    if state.run.group_size > 1:
        dull = state.tasks.dropped_groups.get(DropReason.UNINFORMATIVE, GroupSizes()).groups
        equal = dull + sum(group.reward_std == 0.0 for group in groups)
        found["zero_variance_share"] = equal / (dull + len(groups))
    return found


def _merge(votes: Sequence[Vote]) -> dict[str, float]:
    merged: dict[str, StatValue] = {}
    for vote in votes:
        for name, s in vote.stats.items():
            if not (math.isfinite(s.sum) and math.isfinite(s.weight)):
                continue
            m = merged.get(name)
            merged[name] = (
                s if m is None else StatValue(m.sum + s.sum, m.weight + s.weight, max(m.max, s.max))
            )
    out: dict[str, float] = {}
    for name, s in merged.items():
        value = s.sum / s.weight if s.weight > 0 else 0.0
        if name in _MEAN_AND_MAX:
            out[f"{name}_mean"], out[f"{name}_max"] = value, s.max
        elif name == RATIO_SQUARE or name in CRITIC[1:]:
            continue
        elif name.startswith(REWARD_SQUARE):
            function = REWARD + name.removeprefix(REWARD_SQUARE)
            mean = merged[function].sum / s.weight if function in merged and s.weight else 0.0
            spread = (s.sum - s.weight * mean * mean) / max(s.weight - 1.0, 1.0)
            out[f"{function}/std"] = math.sqrt(max(0.0, spread))
        else:
            out[name] = value
    ratio, square = merged.get("ratio"), merged.get(RATIO_SQUARE)
    if ratio is not None and square is not None and (most := square.weight * square.sum) > 0:
        out["ess"] = ratio.sum * ratio.sum / most
    explained = _explained_variance([merged.get(name) for name in CRITIC])
    return out if explained is None else {**out, "explained_variance": explained}


def _explained_variance(sums: Sequence[StatValue | None]) -> float | None:
    """None without a critic, or if all returns are equal: there is nothing to explain."""
    means = [s.sum / s.weight for s in sums if s is not None and s.weight > 0]
    if len(means) < len(CRITIC):
        return None
    mean, square, error, error_square = means
    variance = square - mean * mean
    if variance <= 1e-9 * square:  # nothing but rounding
        return None
    return 1.0 - max(0.0, error_square - error * error) / variance


# ---- rewards ----


@dataclass(frozen=True, slots=True)
class RewardTotals:
    samples: int
    total: float
    squares: float  # Of each reward's difference from the mean of all
    within: float  # Of each reward's difference from the mean of its group, squared


def reward_totals(groups: Collection[GroupMeta]) -> RewardTotals:
    """The same bits in whatever order the groups are."""
    samples = sum(g.sequences for g in groups)
    total = math.fsum(g.sequences * g.reward_mean for g in groups)
    mean = total / max(samples, 1)
    within = math.fsum((g.sequences - 1) * g.reward_std**2 for g in groups)
    between = math.fsum(g.sequences * (g.reward_mean - mean) ** 2 for g in groups)
    return RewardTotals(samples, total, within + between, within)


# ---- ages ----

AGE_BUCKETS = {0: "0", 1: "1", 2: "2", 4: "3_4", 8: "5_8", 16: "9_16", 32: "17_32"}
"""Largest age of a bucket, in steps, and its name; one more is for what is older."""
OLDEST_BUCKET = "33_up"
_BUCKETS = (*AGE_BUCKETS.values(), OLDEST_BUCKET)
RESPONSE_TOKENS = {
    "all": "response_tokens_mean",
    "late": "late_response_tokens_mean",
    "masked": "masked_response_tokens_mean",
    "dropped": "dropped_response_tokens_mean",
    "uninformative": "uninformative_response_tokens_mean",
}  # Metrics of length: of all that a step trains, and of each part


def _ages(s: State, groups: Sequence[GroupMeta], step: Step) -> dict[str, float]:
    """Shares are of the step's tokens or groups; dropped ones count with those of the step. Lengths
    are in tokens a completion, and absent if there is no such completion. Ages are in steps.
    Recorded groups have none."""
    if s.run.recorded:
        return {}
    ages = [(age, n) for group in groups for age, n in token_ages(s, group, step)]
    trained = [(age, n) for age, n in ages if age <= token_age(s, step)]
    tokens = sum(n for _, n in trained)
    late = [g for g in groups if max(token_ages(s, g, step))[0] > s.run.max_staleness]
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
        **_lengths({"late": late, "masked": masked, "dropped": too_old, "uninformative": [dull]}),
        **_histogram(trained, tokens),
    }


def token_ages_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The step's histogram as people read it: share of trained tokens by "0", "3-4", "33+"."""
    shown = {name: name.replace("_up", "+").replace("_", "-") for name in _BUCKETS}
    return {
        shown[name]: metrics[key] for name in _BUCKETS if (key := f"token_age_{name}") in metrics
    }


def _lengths(parts: Mapping[str, Sequence[GroupMeta | GroupSizes]]) -> dict[str, float]:
    return {
        RESPONSE_TOKENS[name]: sum(size.tokens for size in sizes) / sequences
        for name, sizes in parts.items()
        if (sequences := sum(size.sequences for size in sizes))
    }


def _histogram(ages: Iterable[tuple[int, int]], tokens: int) -> dict[str, float]:
    """Share of trained tokens by age."""
    counts = dict.fromkeys(_BUCKETS, 0)
    for age, n in ages:
        fitting = (name for most, name in AGE_BUCKETS.items() if age <= most)
        counts[next(fitting, OLDEST_BUCKET)] += n
    return {f"token_age_{name}": n / tokens for name, n in counts.items()}
