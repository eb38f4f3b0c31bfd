"""``paceline up``: a whole fleet on this machine, or a new run from an earlier one's weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.config.load import load_config
from paceline.errors import BadInput, plural
from paceline.observe.checkpoints import META, VOID
from paceline.process.files import set_process_limits, without_links
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
    run_config,
)
from paceline_launcher.cli.models import find_checkpoint
from paceline_launcher.terminal import out_console, printable, short, table

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.observe.fleet_file import FleetRecord
    from paceline_launcher.launch.node_workers import NodeWorkers


def up(
    config: ConfigArgument,
    *,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    fresh: bool = False,
    attach: bool = False,
    begin_with: Path | None = None,
    dry_run: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole fleet on this machine until the run ends.

    The same command continues an unfinished run from its last state; settings that may change can
    be others then, and a finished run goes on with a larger train.steps. What may not change needs
    a new run: with --from it begins with the weights of a checkpoint. Processes that an earlier
    session left running are ended first; --attach takes them over without an interruption. Ctrl-C
    (or SIGTERM) writes a checkpoint and stops every process of the fleet, within fleet.stop_s
    seconds; a second Ctrl-C kills them at once. With --json, the live view goes to standard error
    and the summary to standard output.

    Example: paceline up demo.toml --set train.steps=50 --run-dir runs/try1

    Args:
        fresh: Delete the earlier run in the directory first.
        attach: Take over a running fleet whose `paceline up` has ended.
        begin_with --from CHECKPOINT: Begin a new run with the weights of a checkpoint, or of a
            run's newest one.
        dry_run: Run the checks and start nothing.
    """
    from paceline_launcher.launch.node_workers import NodeWorkers
    from paceline_launcher.launch.run_dir import check_no_leader, clear, end_leftovers, locked
    from paceline_launcher.node_placement import machine_gpus
    from paceline_launcher.preflight.checks import (
        LENGTH,
        PLACEMENT,
        Place,
        default_run_dir,
        passed,
    )
    from paceline_launcher.preflight.findings import Start
    from paceline_launcher.preflight.machine import turns_needed

    set_process_limits()
    given = [*(overrides or ()), *from_override(begin_with)]
    settings = load_config(config, given)
    turns, why = turns_needed(settings)
    if turns:
        settings = load_config(config, [*given, 'fleet.sharing="turns"'])
    if why:
        typer.echo(why, err=as_json)
    directory = without_links(run_dir or default_run_dir(settings))
    note = check_begins_elsewhere(settings, directory)
    fleet = settings.fleet
    line = (
        f"{settings.run.name}: {plural(fleet.controllers, 'controller')}, "
        f"{plural(fleet.policy, 'policy replica')} of {plural(fleet.policy_ranks, 'rank')}, "
        f"{plural(fleet.rollout, 'rollout worker')} in {directory}"
    )
    workers = NodeWorkers(settings, machine_gpus(settings, os.environ))
    if attach and fresh:
        raise BadInput("--attach takes over a running fleet, --fresh removes it: give one of them")
    if attach:
        _fleet_left(settings, directory)  # before the lock, which makes the directory
        with locked(directory):
            earlier = _fleet_left(settings, directory)
            raise typer.Exit(
                run_to_end(settings, directory, workers, line, as_json=as_json, earlier=earlier)
            )
    start = Start(settings, directory, fresh=fresh, here=True)
    checks = passed(start, Place.ANYWHERE | Place.CONTROL | Place.WORKERS)
    if dry_run:
        told = {c.name: c.found for c in checks if c.state == "ok"}
        told = {"ready": line} | {name: told[name] for name in (LENGTH, PLACEMENT) if name in told}
        if as_json:
            print_json(told)
        else:
            typer.echo("\n".join(f"{name}: {text}" for name, text in told.items()))
        return
    with locked(directory):
        if fresh:
            clear(settings, directory)
        extends_to = steps_to_extend_to(settings, directory)
        if left := end_leftovers(directory):
            ended = f"ended {plural(len(left), 'process')} that an earlier session left behind"
            typer.echo(ended, err=as_json)
        if not fresh:
            check_no_leader(settings)
        if note:
            typer.echo(note, err=as_json)
        raise typer.Exit(
            run_to_end(settings, directory, workers, line, as_json=as_json, extends_to=extends_to)
        )


def steps_to_extend_to(settings: Config, directory: Path) -> int:
    """Steps of a finished run that is given more of them; 0 for any other."""
    from paceline.observe.projection import Projection
    from paceline.observe.runs import can_extend
    from paceline_launcher.preflight.data import steps_of
    from paceline_launcher.preflight.earlier_run import in_force

    now, _ = in_force(settings, directory)
    run = Projection.read(directory)
    return steps_of(now) if can_extend(run, lambda: steps_of(now)) else 0


def _fleet_left(settings: Config, directory: Path) -> FleetRecord:
    """Record of the fleet in ``directory``, which runs without its supervisor. Raises BadInput."""
    from paceline.observe.fleet_file import FleetRecord

    record = FleetRecord.read(directory)
    known = {p.name for p in record.processes if p.role == "controller"} if record else set()
    needed = {f"controller-{index}" for index in range(settings.fleet.controllers)}
    if record is not None and record.survivors() and needed <= known:
        if run_config(directory) == settings:
            return record
        raise BadInput(
            f"--attach: the fleet in {directory} runs with other settings (its config.toml). Give "
            "the same settings. To end that fleet and continue with the new ones, remove --attach"
        )
    raise BadInput(f"--attach: no fleet runs in {directory}. To start the run, remove --attach")


def run_to_end(
    settings: Config,
    directory: Path,
    workers: NodeWorkers,
    line: str,
    *,
    as_json: bool,
    **options: Any,
) -> int:
    """Leads the run from this node, and prints how it ended. Returns the exit status. ``line``:
    what is started, for people. ``options``: further fields of ``Run``."""
    from paceline_launcher.launch.ending import exit_status
    from paceline_launcher.launch.run import Run
    from paceline_launcher.live_view import Console, RunOutput

    console = Console(RunOutput(directory / "logs" / "up.log", stderr=as_json))
    console.note(line)

    async def run() -> dict[str, Any]:
        return await Run(settings, directory, console, workers, **options).run()

    summary = asyncio.run(run())
    # How it ended counts, whoever reads it.
    try:
        if as_json:
            print_json({**summary, "run_dir": str(directory)})
        else:
            print_outcome(summary, directory)
        sys.stdout.flush()
    except (OSError, SystemExit):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_status(summary)


def print_outcome(summary: dict[str, Any], directory: Path) -> None:
    rows = [(name, printable(text)) for name, text in outcome(summary)]
    out_console().print(table("|", rows, header=False))
    typer.echo(f"more: {directory / 'summary.json'}")
    if summary.get("export"):
        typer.echo(f"exported model: {summary['export']}")
    if summary["status"] == "interrupted":
        saved = summary.get("checkpoint_step")
        typer.echo(f"the run is not finished: the same command continues it from step {saved}")
    if summary["status"] == "failed":
        reason = printable(str(summary.get("reason")))
        typer.echo(f"error: {reason} (logs: {directory / 'logs'})", err=True)


RESULTS = {
    "run": "{status} after {steps}",
    "reason": "{reason}",
    "trained": "{samples_trained}, {samples_per_s} samples/s",
    "training reward": "{reward_first5} -> {reward_last5}, mean of 5 steps, of sampled completions",
    "held-out reward": "{eval_first} -> {eval_last}, of the most likely completions of other "
    "prompts",
    "held-out prompts": "{eval_left_out}",
    "best checkpoint": "step {best_checkpoint_step}, held-out reward {best_checkpoint_eval}",
    "staleness": "at most {max_staleness} (a group begins within train.max_staleness steps, "
    "and a long one ends later)",
    "equal rewards": "within a share of {zero_variance_share} of the groups, which teaches nothing",
    "dropped groups": "{groups_dropped}; paceline events names them",
    "failovers": "{controller_failovers}",
    "mesh rebuilds": "{mesh_rebuilds}",
    "rollbacks": "{rollbacks}",
}
"""Results of a run that is over, by name. One with a field that is not known is left out."""


def outcome(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    known = {n: short(v) for n, v in summary.items() if v not in (None, 0, "", [], {})}
    known["steps"] = plural(int(summary.get("steps") or 0), "step")
    for name, noun in (("samples_trained", "sample"), ("max_staleness", "step")):
        if name in known:
            known[name] = plural(round(summary[name]), noun)
    for name, line in RESULTS.items():
        with contextlib.suppress(KeyError):
            yield name, line.format_map(known)
    if "ledger_ok" in summary:
        lost, twice = summary.get("samples_lost"), summary.get("samples_duplicated")
        counted = f"{lost} lost, {twice} trained twice"
        if lost is None:
            counted = "not counted, because no controller answered at the end"
        yield "samples", "; ".join([counted, *(summary.get("ledger_problems") or ())])


def from_override(given: Path | None) -> list[str]:
    """Override that makes a run begin with a checkpoint, or with the newest of a directory."""
    if given is None:
        return []
    found = find_checkpoint(given)
    if found is None:
        raise BadInput(
            f"--from: {given} is no checkpoint, and no run directory with one. Checkpoints are in "
            "RUN_DIR/checkpoints/step-NNNNNN, and the best one is RUN_DIR/checkpoints/best"
        )
    return [f"model.initial_checkpoint={json.dumps(str(found.resolve()))}"]


def check_begins_elsewhere(settings: Config, directory: Path) -> str:
    """Sentence for users about a run that begins with a checkpoint; empty for any other. Raises
    BadInput if the checkpoint is not complete, void, or the run's own."""
    if settings.model.initial_checkpoint is None:
        return ""
    path = Path(settings.model.initial_checkpoint)
    if not (path / META).is_file() or (path / VOID).exists():
        raise BadInput(
            f"model.initial_checkpoint: {path} is not a complete checkpoint, or it is void: the "
            "weights of the other replicas of its run differed. Give another checkpoint"
        )
    if directory in path.resolve().parents:
        raise BadInput(
            f"--from: {path} is a checkpoint of the run in {directory} itself. Give the new run "
            "another directory with --run-dir, and another run.name"
        )
    return (
        f"begins with the weights of {path}, and with its optimizer state if "
        "that fits. Steps, data order, learning-rate schedule and versions begin anew; "
        "the KL reference stays model.path"
    )
