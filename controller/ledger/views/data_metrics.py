"""Metrics of the data: rewards and shares of each source, truncated and dropped prompts, and the
curriculum."""

from collections.abc import Sequence

from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from controller.ledger.state.tasks import ordinal_of

TOO_LONG = "prompt_too_long"
"""Reason that rollout workers give for a prompt which they drop for its length."""


def data_metrics(state: State, groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Of a step with ``groups``. Rewards are means over sequences; shares are of groups, or of the
    rows of the data. ``prompts_truncated`` counts the step's groups, ``prompts_too_long`` what was
    dropped since the run began."""
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
