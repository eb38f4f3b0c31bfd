"""Random faults on a running fleet, and the verdict on what became of it.

python -m testbed.faults.chaos --run-dir runs/demo --seed 7 --minutes 5
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import BadInput
from paceline.observe.vocabulary import EventType
from paceline.process.lifetime import exit_status
from paceline_launcher.cli.common import JsonOption, print_json

RECOVERY_LIMIT_S = 120.0
STEPS_AFTER = 2


def chaos(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Directory of the running fleet.")
    ],
    seed: Annotated[int, typer.Option(help="Decides every fault; the same seed repeats them.")] = 0,
    minutes: Annotated[float, typer.Option(help="Length of the schedule.", min=0.05)] = 1.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the schedule and touch nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop and continue random processes of a running fleet, then judge the run.

    Only processes that DIR/fleet.json names are touched. Exit status 0 means that the run committed
    steps again or finished, that its ledger verifies (nothing lost, nothing trained twice), and
    that the weight digests of all replicas were equal in every step.

    Example: python -m testbed.faults.chaos --run-dir runs/demo --seed 7 --minutes 5
    """
    from paceline.observe.fleet_file import FleetRecord
    from paceline.observe.runs import read_summary
    from testbed.faults.fault_schedule import Mayhem, plan

    faults = plan(seed, minutes)
    if dry_run:
        if as_json:
            shown = [asdict(fault) for fault in faults]
            print_json({"seed": seed, "minutes": minutes, "faults": shown})
            return
        for fault in faults:
            typer.echo(str(fault))
        return
    record = FleetRecord.read(run_dir)
    if record is None or not record.supervisor.alive():
        raise BadInput(f"--run-dir: no `paceline up` runs a fleet in {run_dir}")

    def over() -> bool:
        return read_summary(run_dir) is not None or not record.supervisor.alive()

    def note(line: str) -> None:
        if not as_json:
            typer.echo(line)

    mayhem = Mayhem(run_dir, note)
    mayhem.run(faults, over)
    recovered_s = _recovery(run_dir, over)
    verdict = {
        "seed": seed,
        "minutes": minutes,
        "faults": mayhem.done,
        "recovered_s": recovered_s,
        "failed": (read_summary(run_dir) or {}).get("status") == "failed",
        **_judge(run_dir),
    }
    verdict["ok"] = bool(
        verdict["ledger_ok"]
        and verdict["digests_equal"]
        and recovered_s is not None
        and not verdict["failed"]
    )
    if as_json:
        print_json(verdict)
    else:
        _print(verdict)
    raise typer.Exit(0 if verdict["ok"] else 1)


def _recovery(run_dir: Path, over: Any) -> float | None:
    """Seconds until the fleet has committed some steps more; None where it did not."""
    begun = time.monotonic()
    wanted = _newest_step(run_dir) + STEPS_AFTER
    while time.monotonic() - begun < RECOVERY_LIMIT_S:
        if over() or _newest_step(run_dir) >= wanted:
            return time.monotonic() - begun
        time.sleep(0.5)
    return None


def _newest_step(run_dir: Path) -> int:
    from paceline.observe.projection import Projection

    return Projection.read(run_dir).step


def _judge(run_dir: Path) -> dict[str, Any]:
    """Ledger, digests and held-out reward, from the journal and the run files."""
    from controller.store.journal_audit import verify
    from paceline.observe.projection import Projection
    from paceline_launcher.cli.ledger import redis_of, settings_of

    name, redis = settings_of(run_dir)
    with redis_of(run_dir, redis) as url:
        report = verify(url, name)
        unequal, compared = _digests(url, name)
    records = Projection.read(run_dir)
    evals = {str(row["step"]): row["eval_reward_mean"] for row in records.evals}
    return {
        "ledger_ok": report.ok and not report.counts["lost"] and not report.counts["duplicates"],
        "problems": list(report.problems),
        "counts": dict(report.counts),
        "digests_equal": not unequal,
        "votes_compared": compared,
        "unequal_steps": unequal,
        "steps": records.step,
        "held_out_reward": evals,
    }


def _digests(url: str, run: str) -> tuple[list[int], int]:
    """Steps in which replicas of one mesh epoch voted with different digests, and votes
    compared."""
    unequal: set[int] = set()
    votes = 0
    seen: dict[tuple[int, int], str] = {}
    for event in _events(url, run):
        if event["type"] != EventType.VOTE_CAST:
            continue
        votes += 1
        key = (event["step"], event["mesh_epoch"])
        if seen.setdefault(key, event["digest"]) != event["digest"]:
            unequal.add(event["step"])
    return sorted(unequal), votes


def _events(url: str, run: str) -> Iterator[dict[str, Any]]:
    """Every event the journal still holds."""
    from controller.store.journal import decode_entry
    from controller.store.redis_keys import Keys
    from paceline.redis.client import connect_sync

    at = "-"
    with connect_sync(url, timeout_s=30.0) as client:
        while found := client.xrange(Keys(run).journal, min=at, count=500):
            for position, fields in found:
                for event in decode_entry(position, fields).events:
                    yield dict(event)
            at = f"({found[-1][0].decode()}"


def _print(verdict: dict[str, Any]) -> None:
    counts = verdict["counts"]
    typer.echo(
        f"{len(verdict['faults'])} faults; {verdict['steps']} steps; "
        f"{counts.get('trained', 0)} groups trained, {counts.get('lost', 0)} lost, "
        f"{counts.get('duplicates', 0)} trained twice"
    )
    for problem in verdict["problems"]:
        typer.echo(f"  violated: {problem}")
    said = "equal in every step" if verdict["digests_equal"] else "NOT equal"
    typer.echo(f"weight digests of the replicas: {said} ({verdict['votes_compared']} votes)")
    for step, reward in verdict["held_out_reward"].items():
        said = "no answer was scored" if reward is None else f"{reward:.4f}"
        typer.echo(f"held-out reward after step {step}: {said}")
    if verdict["failed"]:
        typer.echo("the run failed: see its summary.json")
    elif verdict["recovered_s"] is None:
        typer.echo(f"no step was committed within {RECOVERY_LIMIT_S:.0f} s of the last fault")
    else:
        typer.echo(
            f"steps were committed again {verdict['recovered_s']:.1f} s after the last fault"
        )
    typer.echo("everything that was promised holds" if verdict["ok"] else "a promise was BROKEN")


def main() -> int:
    app = typer.Typer(add_completion=False)
    app.command()(chaos)
    app(prog_name="python -m testbed.faults.chaos")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, "error"))
