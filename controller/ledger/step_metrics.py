"""Metrics of a step: its groups and votes merged into one row of numbers.

Slowness is content: long answers, hard prompts, slow environments. So the share that is late,
masked or dropped stands beside its mean length, to be compared with that of all that is trained."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.ledger.enums import DROPPED_FOR_AGE, DropReason
from controller.ledger.specs import GroupMeta, StatValue
from controller.ledger.state.state import State
from controller.ledger.state.steps import OpenStep, Vote
from controller.ledger.state.tasks import GroupSizes, ordinal_of, sizes_of
from controller.ledger.state.token_ages import token_age, token_ages

TOO_LONG = "prompt_too_long"  # Reason of rollout workers that drop a prompt for its length
RATIO_SQUARE = "ratio_square"
"""Statistic of votes, mean square of the importance weights. With their mean it gives ess, the
effective sample size as a share of the number n of tokens: (sum w)^2 / (n * sum w^2). 1: all
weights are equal."""
CRITIC = ("return_mean", "return_square", "value_error", "value_error_square")
"""Statistics of votes that give explained_variance, 1 - Var(return - value) / Var(return). All but
the first are reported only so."""
REWARD, REWARD_SQUARE = "reward/", "reward_square/"
"""Prefixes of statistics of votes, before the name of a reward function: its values and their
squares. They give reward/NAME and reward/NAME/std."""
OBSERVED = frozenset({"engine_busy", "engine_tokens_per_s_device", "device_busy"})
"""Metrics that a leader observes in reports, and brings with the last vote."""
_MEAN_AND_MAX = ("ratio", "logprob_gap", "logprob_gap_fresh")  # Statistics with a maximum
_BUCKETS = ("0", "1", "2", "3_4", "5_8", "9_16", "17_32", "33_up")  # Ages of tokens, in steps
_BUCKET_ENDS = (0, 1, 2, 4, 8, 16, 32)


def step_metrics(
    state: State, step: OpenStep, now: float, observed: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of the open step at its commit. Times in seconds, staleness in steps. ``observed``:
    some of ``OBSERVED``."""
    groups = [state.meta(task_id) for task_id in step.groups]
    ages = [token_ages(state, group, step.step) for group in groups]
    limit = token_age(state, step.step)
    tokens = sum(n for of_group in ages for age, n in of_group if age <= limit)
    sequences, samples = sum(g.sequences for g in groups), sum(g.samples for g in groups)
    step_s = max(now - state.steps.last_commit_t, 1e-6)
    if now < state.steps.last_commit_t:
        step_s = math.nan  # the clock was set back: no rate is better than a rate of billions
    sampled, book = not state.run.recorded, state.tasks
    of_votes = _of_votes(step.votes.values())
    devices = sum(state.fleet.workers[worker_id].ranks for worker_id in step.votes)
    metrics = {
        "step": float(step.step),
        "version": float(state.versions.version + 1),
        **(_rewards(state, groups) if sampled else {}),
        **of_votes,
        **observed,
        **(_of_ages(state, groups, ages, limit) if sampled else {}),
        **_of_data(state, groups),
        "tokens": float(tokens),
        "samples": float(samples),
        **({"sequences_per_sample": sequences / samples} if sequences > samples else {}),
        "tokens_per_s": tokens / step_s,
        "samples_per_s": samples / step_s,
        "tokens_per_s_device": tokens / step_s / devices,
        # In this order: not a number, if it was not measured, stays so.
        "trainer_busy": min(of_votes.get("time_compute_s", math.nan) / step_s, 1.0),
        "step_s": step_s,
        "response_tokens_mean": sum(g.tokens for g in groups) / sequences,
        "time_generate_s": sum(g.generate_s for g in groups) / len(groups),
        "time_reward_s": sum(g.reward_s for g in groups) / len(groups),
        "queue_pending": float(len(book.pending)),
        "queue_leased": float(book.leased),
        "queue_ready": float(len(book.ready)),
        "replicas": float(len(step.votes)),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _of_votes(votes: Iterable[Vote]) -> dict[str, float]:
    sums: dict[str, StatValue] = {}
    for name, s in (stat for vote in votes for stat in vote.stats.items()):
        if math.isfinite(s.sum) and math.isfinite(s.weight):
            m = sums.get(name, StatValue(0.0, 0.0, -math.inf))
            sums[name] = StatValue(m.sum + s.sum, m.weight + s.weight, max(m.max, s.max))
    # Whatever a replica reports: a product of floats overflows to inf, a power raises.
    means = {name: s.sum / s.weight if s.weight > 0 else 0.0 for name, s in sums.items()}
    found: dict[str, float] = {}
    for name, s in sums.items():
        if name in _MEAN_AND_MAX:
            found[f"{name}_mean"], found[f"{name}_max"] = means[name], s.max
        elif name.startswith(REWARD_SQUARE):
            function = REWARD + name.removeprefix(REWARD_SQUARE)
            mean = means.get(function, 0.0)
            spread = s.sum - s.weight * mean * mean
            found[f"{function}/std"] = math.sqrt(max(0.0, spread / max(s.weight - 1.0, 1.0)))
        elif name != RATIO_SQUARE and name not in CRITIC[1:]:
            found[name] = means[name]
    if "ratio" in means and means.get(RATIO_SQUARE, 0.0) > 0:
        found["ess"] = means["ratio"] * means["ratio"] / means[RATIO_SQUARE]
    if means.keys() >= set(CRITIC):
        mean, square, error, error_square = (means[name] for name in CRITIC)
        variance = square - mean * mean
        if variance > 1e-9 * square:  # more than rounding: there is something to explain
            rest = max(0.0, error_square - error * error)
            found["explained_variance"] = 1.0 - rest / variance
    return found


def _of_data(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Shares are of groups, or of the rows of the data. ``prompts_truncated`` counts the step's
    groups, ``prompts_too_long`` what was dropped since the run began. A source without a group in
    the step has a share of 0 and no reward."""
    metrics = {
        "prompts_truncated": float(sum(group.prompt_cut > 0 for group in groups)),
        "prompts_too_long": float(state.tasks.dropped.get(TOO_LONG, 0)),
    }
    order = state.run.order
    of_source: list[list[GroupMeta]] = [[] for _ in order.sources]
    for group in groups if order.sources else ():
        row = order.place(ordinal_of(group.task_id))[1]
        of_source[order.source_of(row)].append(group)
    for source, found in zip(order.sources, of_source, strict=True):
        metrics[f"source_share_{source.name}"] = len(found) / len(groups)
        if found:
            totals = reward_totals(found)
            metrics[f"source_reward_{source.name}"] = totals.total / totals.samples
    return metrics


@dataclass(frozen=True, slots=True)
class RewardTotals:
    samples: int
    total: float
    squares: float  # Of each reward's difference from the mean of all
    within: float  # Of each reward's difference from the mean of its group, squared


def reward_totals(groups: Collection[GroupMeta]) -> RewardTotals:
    """The same bits in whatever order the groups are."""
    samples = sum(g.samples for g in groups)
    total = math.fsum(g.samples * g.reward_mean for g in groups)
    mean = total / max(samples, 1)
    within = math.fsum((g.samples - 1) * g.reward_std**2 for g in groups)
    between = math.fsum(g.samples * (g.reward_mean - mean) ** 2 for g in groups)
    return RewardTotals(samples, total, within + between, within)


def _rewards(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Metrics of samples: the reward of a recorded row says nothing of the policy.
    ``zero_variance_share`` counts groups whose rewards are all equal, those that were dropped for
    it included; a group of one has no variance to speak of."""
    totals = reward_totals(groups)
    deviation = math.sqrt(totals.squares / max(totals.samples - 1, 1))
    found = {"reward_mean": totals.total / totals.samples, "reward_std": deviation}
    if state.run.group_size > 1:
        dull = _dropped(state, DropReason.UNINFORMATIVE).groups
        equal = dull + sum(group.reward_std == 0.0 for group in groups)
        found["zero_variance_share"] = equal / (dull + len(groups))
    return found


def _of_ages(
    s: State, groups: Sequence[GroupMeta], ages: Sequence[list[tuple[int, int]]], limit: int
) -> dict[str, float]:
    """Shares are of the step's tokens or groups; dropped ones count with those of the step. Lengths
    are in tokens a completion, and absent if there is no such completion. Ages are in steps: those
    of each group's tokens, and the highest of tokens that are trained."""
    trained = [(age, n) for of_group in ages for age, n in of_group if age <= limit]
    tokens = sum(n for _, n in trained)
    by_age = [(max(of_group)[0], group) for of_group, group in zip(ages, groups, strict=True)]
    late = sizes_of(group for oldest, group in by_age if oldest > s.run.max_staleness)
    masked = sizes_of(group for oldest, group in by_age if oldest > limit)
    expired, dull = _dropped(s, *DROPPED_FOR_AGE), _dropped(s, DropReason.UNINFORMATIVE)
    parts = {"late": late, "masked": masked, "dropped": expired, "uninformative": dull}
    counts = [0] * len(_BUCKETS)
    for age, n in trained:
        counts[bisect_left(_BUCKET_ENDS, age)] += n
    return {
        "staleness_mean": sum(age * n for age, n in trained) / tokens,
        "staleness_max": float(max(age for age, _ in trained)),
        "late_share": late.groups / len(groups),
        "masked_share": 1.0 - tokens / sum(g.tokens for g in groups),
        "dropped_share": expired.groups / (expired.groups + len(groups)),
        "uninformative_share": dull.groups / (dull.groups + len(groups)),
        **{
            f"{name}_response_tokens_mean": part.tokens / part.sequences
            for name, part in parts.items()
            if part.groups
        },
        **{f"token_age_{name}": n / tokens for name, n in zip(_BUCKETS, counts, strict=True)},
    }


def _dropped(s: State, *reasons: DropReason) -> GroupSizes:
    """Groups that were dropped for one of these reasons since the newest commit."""
    sizes = s.tasks.dropped_groups
    return sum((sizes[reason] for reason in reasons if reason in sizes), GroupSizes())
