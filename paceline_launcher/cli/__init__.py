"""The ``paceline`` command, with one module for each group of commands.

A command imports its dependencies when it runs, so that --help and status never wait for torch.

Exit status: 0 done, 1 it failed or was refused, 2 bad input, 3 no controller answers,
130 interrupted.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from paceline.errors import UserError, in_words
from paceline.masking import masked
from paceline_launcher.cli import (
    admin,
    cluster,
    config,
    demo,
    doctor,
    eval_command,
    events,
    imports,
    ledger,
    models,
    node,
    runs,
    samples,
    status,
    timeline,
    up,
)
from paceline_launcher.cli.common import command_line

app = typer.Typer(
    name="paceline",
    help="Asynchronous, fault-tolerant reinforcement learning for language models.\n\n"
    "A run is one file: `paceline up` runs all of it on this machine; `paceline node`, started on "
    "each of several machines, runs it on all of them.\n\n"
    "Example: paceline demo",
    epilog="Exit status: 0 done, 1 failed or refused, 2 bad input, 3 no controller answers, "
    "130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _group(name: str, text: str, example: str, *commands: Callable[..., None]) -> typer.Typer:
    """Commands of two words."""
    group = typer.Typer(
        name=name, help=f"{text}\n\nExample: paceline {example}", no_args_is_help=True
    )
    group.callback()(lambda: None)  # else a single command would be the group
    for inner in commands:
        group.command()(command_line(inner))
    return group


GROUPS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Start a run": (
        *(demo.demo, up.up, node.node, config.init),
        _group("config", "Check settings.", "config check run.toml", config.check),
        _group(
            *("import", "Bring a configuration of another framework.", "import cosmos-rl a.toml"),
            imports.cosmos_rl,
        ),
        doctor.doctor,
    ),
    "Watch a run": (
        *(status.status, status.top, status.why, events.events, events.logs, samples.samples),
        *(status.stacks, timeline.timeline, runs.runs, runs.compare),
    ),
    "Steer a run": (
        *(admin.set_settings, admin.scale, admin.drain, admin.pause, admin.resume),
        *(admin.hosts, admin.checkpoint, admin.stop),
    ),
    "Use the model": (eval_command.evaluate, models.export, models.serve),
    "Plan and check": (
        _group("plan", "Compute a run's needs.", "plan memory run.toml", doctor.memory),
        *(config.check_reward, config.check_objective),
        _group("ledger", "Verify a run.", "ledger verify --run-dir runs/demo", ledger.verify),
        _group("alerts", "Alerts of a run.", "alerts test run.toml", doctor.test),
    ),
    "On a cluster": (
        *(cluster.render, cluster.controller, cluster.policy, cluster.rollout),
        *(cluster.scorer, cluster.wait),
    ),
}
NAMES = {admin.set_settings: "set", eval_command.evaluate: "eval"}
for title, commands in GROUPS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=title)
        else:
            name = NAMES.get(command)  # None: that of the function, with - for _
            app.command(name, rich_help_panel=title)(command_line(command))


def main() -> None:
    try:
        app(prog_name="paceline")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _reader_has_gone()
    except SystemExit as left:
        # typer exits with a failure; the broken pipe is the context of that.
        if isinstance(left.__context__, BrokenPipeError):
            _reader_has_gone()
        raise
    except Exception as error:
        if os.environ.get("PACELINE_TRACEBACK"):
            raise
        if isinstance(error, UserError):
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            sys.exit(error.exit_status)
        if isinstance(error, OSError) and error.errno:
            print(f"error: {in_words(error)}", file=sys.stderr)
            sys.exit(1)
        hint = "set PACELINE_TRACEBACK=1 to see the traceback"
        print(masked(f"error: {type(error).__name__}: {error} ({hint})"), file=sys.stderr)
        sys.exit(1)


def _reader_has_gone() -> NoReturn:
    """The reader of standard output (head, less) has closed it: that is no failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
