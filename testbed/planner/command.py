"""The planner's command: arguments, checks and output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    SetOption,
    is_number,
    print_json,
)

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.memory_plan import Gpu
    from paceline.model_shape import ModelShape
    from testbed.planner.lengths import Lengths
    from testbed.planner.sizes import SizePlan
    from testbed.planner.systems import Calibrated
    from testbed.planner.times import RunTimes, TimesFile

SPEEDS = {
    "l4-24g": (0.30, 121),
    "a10-24g": (0.60, 125),
    "rtx4090-24g": (1.01, 165),
    "l40s-48g": (0.86, 362),
    "a100-40g": (1.56, 312),
    "a100-80g": (2.04, 312),
    "h100-80g": (3.35, 989),
    "h800-80g": (3.35, 989),
    "h20-96g": (4.00, 148),
    "h200-141g": (4.80, 989),
    "b200-180g": (8.00, 2_250),
}
"""Published TB/s of memory and dense bfloat16 TFLOP/s."""


PICTURE = Path("plan.png")
MOST_GPUS = 16_384


@dataclass(frozen=True, slots=True)
class Given:
    """Times that the user has: of a file, of runs, or none."""

    file: TimesFile | None
    runs: list[RunTimes]
    lengths: Lengths


class OldLogProb(StrEnum):
    """Who recomputes behaviour log-probs before the update."""

    NEITHER = "neither"
    BASELINE = "baseline"
    BOTH = "both"


def pace(
    config: ConfigArgument,
    gpus: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of GPUs to plan for, in all.")
    ] = "16,32,64,128",
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU, such as h100."),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured generation, log-prob and update seconds, best at two numbers of GPUs.",
        ),
    ] = None,
    from_run: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Take the times of this run; may be repeated."),
    ] = None,
    mean_tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="Mean length of a completion, if nothing was measured."),
    ] = None,
    old_log_prob: Annotated[
        OldLogProb,
        typer.Option(
            help="Who recomputes behaviour log-probs. Leaving them out is faster, and no overlap."
        ),
    ] = OldLogProb.NEITHER,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"File of the picture; default: {PICTURE}.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print, for each number of GPUs, the best division between policy and rollout and the pace it
    reaches.

    A simulation with the ledger's own admission rule. Its times are measured ones (--times,
    --from-run) or, without them, published ones of other systems: then every figure is an interval.
    The last column compares with synchronous training that has the same GPUs for generation and
    then for updates.

    Example: python -m testbed.planner run.toml --gpus 16,32,64,128 --gpu h100 --times times.toml

    Example: python -m testbed.planner run.toml --gpus 8,16 --gpu h100 --from-run runs/demo
    """
    from paceline.config.load import load_config
    from paceline.memory_plan import memory_plan, named_gpu, problems, settled
    from paceline.model_shape import read_shape
    from paceline_launcher.preflight.models import check_model_config
    from testbed.planner.sizes import NoSplit, best_size

    sizes = _sizes(gpus)
    if times is not None and from_run:
        raise BadInput("--times and --from-run both give times: give one of them")
    if gpu is None:
        raise BadInput(f"--gpu: give the GPU to plan for: one of {', '.join(SPEEDS)}")
    resolved = load_config(config, overrides or ())
    if resolved.recorded:
        raise BadInput(f"{config}: its data is recorded: it has no engines to plan")
    model, device = resolved.model, named_gpu(gpu)
    given = _given(resolved, device, times, from_run or [], mean_tokens)
    check_model_config(model.path)
    shape = read_shape(resolved)
    known = _calibrated(resolved, shape, device, given, max(sizes))
    found: list[SizePlan] = []
    notes = [
        f"does not fit: {wrong}. {remedy}"
        for wrong, remedy in problems(memory_plan(settled(resolved, shape, device), shape), device)
    ]
    for number, size in enumerate(sizes, 1):
        typer.echo(f"simulating {size} GPUs ({number} of {len(sizes)})", err=True)
        try:
            plan = best_size(
                known.systems,
                size,
                resolved.fleet.policy_ranks,
                log_prob=old_log_prob is OldLogProb.BOTH,
                baseline_log_prob=old_log_prob is not OldLogProb.NEITHER,
            )
        except NoSplit as error:
            notes.append(f"{error}: raise --gpus, or lower fleet.policy_ranks")
            continue
        found.append(plan)
    if not found:
        raise BadInput("; ".join(notes))
    _say(found, known, [*known.notes, *notes], gpu, as_json)
    _draw(found, out)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not is_number(part, 2, MOST_GPUS):
            raise BadInput(f"--gpus {text}: {part!r} is no number from 2 to {MOST_GPUS}")
    return sorted({int(part) for part in parts})


def _given(
    config: Config, gpu: Gpu, times: Path | None, runs: list[Path], mean_tokens: float | None
) -> Given:
    """Raises BadInput for what cannot be, before a model is looked for."""
    from testbed.planner.systems import planned_lengths
    from testbed.planner.times import read_run, read_times

    if gpu.name not in SPEEDS:
        raise BadInput(f"--gpu {gpu.name}: its speed is not known: give one of {', '.join(SPEEDS)}")
    if mean_tokens is not None and (times is not None or runs):
        raise BadInput(
            "--mean-tokens: the measured times say the mean length already: leave it out"
        )
    file = read_times(times) if times is not None else None
    measured = [read_run(run) for run in runs]
    lengths = planned_lengths(file.mean_tokens if file else mean_tokens, config.rollout.max_tokens)
    return Given(file, measured, lengths)


def _calibrated(
    config: Config, shape: ModelShape, gpu: Gpu, given: Given, most_gpus: int
) -> Calibrated:
    from testbed.planner.systems import (
        active_parameters,
        bare_system,
        by_file,
        by_published,
        by_runs,
    )

    speeds, active = SPEEDS[gpu.name], active_parameters(config, shape.parameters)
    bare = bare_system(config, shape, active, gpu, speeds, given.lengths)
    if given.file is not None or given.runs:
        typer.echo("fitting the engine's time per token", err=True)
    if given.file is not None:
        return by_file(bare, given.file)
    if given.runs:
        return by_runs(bare, given.runs)
    return by_published(bare, speeds[1], most_gpus, active)


def _say(
    found: list[SizePlan], known: Calibrated, notes: list[str], gpu: str, as_json: bool
) -> None:
    from testbed.planner.report import plan_json, print_table

    if as_json:
        print_json({"gpu": gpu, "basis": known.basis, "notes": notes, "sizes": plan_json(found)})
        return
    print_table(found)
    typer.echo(f"times: {known.basis}; GPU: {gpu}")
    for note in notes:
        typer.echo(note)


def _draw(found: list[SizePlan], out: Path | None) -> None:
    from testbed.planner.report import draw

    try:
        draw(found, out or PICTURE)
    except ImportError as error:
        if out is not None:
            raise
        typer.echo(f"no picture: {error}", err=True)
        return
    typer.echo(f"picture: {out or PICTURE}", err=True)
