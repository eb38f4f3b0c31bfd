"""The ``paceline`` command, with one module for each group of commands.

A command imports its dependencies when it runs, so that --help and status never wait for torch.

Exit status: 0 done, 1 it failed or was refused, 2 bad input, 3 no controller answers,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from paceline.errors import UserError
from paceline.masking import masked
from paceline_launcher.cli import export, serve
from paceline_launcher.cli.control import admin, node, roles, up, wait
from paceline_launcher.cli.evaluation import command as evaluation
from paceline_launcher.cli.plan_memory import plan
from paceline_launcher.cli.reports import events, ledger, runs, samples, status, why
from paceline_launcher.cli.reports import open as page
from paceline_launcher.cli.setup import alerts, completion, config, doctor, objective, render

app = typer.Typer(
    name="paceline",
    help="Asynchronous, fault-tolerant reinforcement learning for language models.\n\n"
    "Example: paceline up examples/digit_sort/digit_sort.toml",
    epilog="Exit status: 0 done, 1 failed or refused, 2 bad input, 3 no controller answers, "
    "130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
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


for command in (
    *(
        up.up,
        node.node,
        wait.wait,
        config.init,
        doctor.doctor,
        status.status,
        status.top,
        events.events,
        events.logs,
    ),
    *(why.why, why.stacks, samples.samples, runs.runs, runs.compare),
    *(roles.controller, roles.policy, roles.rollout, roles.scorer),
    *(admin.scale, admin.drain, admin.pause, admin.resume, admin.checkpoint, admin.stop),
    export.export,
    serve.serve,
    objective.check_objective,
    render.render,
    completion.completion,
):
    app.command()(command)
app.command("open")(page.open_run)
app.command("set")(admin.set_settings)
app.command("eval")(evaluation.evaluate)
app.add_typer(ledger.ledger, name="ledger")
app.add_typer(config.config, name="config")
app.add_typer(plan, name="plan")
app.add_typer(alerts.alerts, name="alerts")


def main() -> None:
    try:
        completion.prepare()
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
        hint = "set PACELINE_TRACEBACK=1 to see the traceback"
        print(masked(f"error: {type(error).__name__}: {error} ({hint})"), file=sys.stderr)
        sys.exit(1)


def _reader_has_gone() -> NoReturn:
    """The reader of standard output (head, less) has closed it: that is no failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
