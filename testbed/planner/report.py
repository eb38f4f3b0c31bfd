"""Table and picture of a plan."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline_launcher.terminal import out_console
from testbed.planner.sizes import SizePlan, Variant

COLUMNS: tuple[tuple[str, str, Callable[[Variant], float], str], ...] = (
    ("samples_per_s", "samples/s", lambda v: v.asynchronous.samples_per_s, ".3g"),
    ("step_s", "step, s", lambda v: v.asynchronous.step_s, ".3g"),
    ("policy_idle", "policy idle", lambda v: v.asynchronous.policy_idle, ".0%"),
    ("rollout_idle", "rollout idle", lambda v: v.asynchronous.rollout_idle, ".0%"),
    ("staleness", "mean staleness", lambda v: v.asynchronous.staleness, ".1f"),
    ("publish_s", "weights, s", lambda v: v.asynchronous.publish_s, ".3g"),
    (
        "synchronous_samples_per_s",
        "synchronous samples/s",
        lambda v: v.synchronous.samples_per_s,
        ".3g",
    ),
    ("ratio", "async / sync", lambda v: v.ratio, ".2f"),
)


def print_table(found: Sequence[SizePlan]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "GPUs",
        "policy",
        "rollout",
        "max_staleness",
        *[title for _, title, _, _ in COLUMNS],
    ):
        table.add_column(name, justify="right")
    for plan in found:
        table.add_row(
            *(str(plan.gpus), str(plan.policy_gpus), str(plan.rollout_gpus)),
            f"{plan.max_staleness:g}",
            *[_interval(plan.span(of), form) for _, _, of, form in COLUMNS],
        )
    out_console().print(table)


def _interval(span: tuple[float, float], form: str) -> str:
    low, high = (format(value, form) for value in span)
    return low if low == high else f"{low} to {high}"


def plan_json(found: Sequence[SizePlan]) -> list[dict[str, Any]]:
    return [
        {
            "gpus": plan.gpus,
            "policy_gpus": plan.policy_gpus,
            "rollout_gpus": plan.rollout_gpus,
            "max_staleness": plan.max_staleness,
            **{
                name: dict(zip(("low", "high"), plan.span(of), strict=True))
                for name, _, of, _ in COLUMNS
            },
        }
        for plan in found
    ]


def draw(found: Sequence[SizePlan], out: Path) -> None:
    """Samples per second and idle shares by GPUs. Raises ImportError and OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    pace, idle = figure.subplots(1, 2)
    gpus = [plan.gpus for plan in found]
    for label, of in (
        ("asynchronous", lambda v: v.asynchronous.samples_per_s),
        ("synchronous, same GPUs", lambda v: v.synchronous.samples_per_s),
    ):
        _band(pace, gpus, [plan.span(of) for plan in found], label)
    pace.set_ylabel("samples/s")
    pace.set_ylim(bottom=0)
    for label, of in (
        ("policy", lambda v: v.asynchronous.policy_idle),
        ("rollout", lambda v: v.asynchronous.rollout_idle),
    ):
        _band(idle, gpus, [plan.span(of) for plan in found], label)
    idle.set_ylabel("idle share, asynchronous")
    idle.set_ylim(0, 1)
    for axes in (pace, idle):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            gpus, [f"{plan.gpus}\n{plan.policy_gpus}+{plan.rollout_gpus}" for plan in found]
        )
        axes.set_xticks([], minor=True)
        axes.set_xlabel("GPUs (policy + rollout)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=140, format="png")


def _band(axes: Any, gpus: list[int], spans: list[tuple[float, float]], label: str) -> None:
    """A line through the middles, and the interval around it."""
    (line,) = axes.plot(gpus, [(low + high) / 2 for low, high in spans], marker="o", label=label)
    low, high = zip(*spans, strict=True)
    axes.fill_between(gpus, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
