"""``paceline alerts``."""

import time

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import ConfigArgument, JsonOption, SetOption, print_json

alerts = typer.Typer(
    help="Alerts of a run.\n\nExample: paceline alerts test run.toml", no_args_is_help=True
)


@alerts.callback()
def _group() -> None:
    """Alerts of a run."""


@alerts.command()
def test(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Send a test alert to the webhook and the command of the `alerts` settings.

    Exit status 1 if it is not delivered.

    Example: paceline alerts test run.toml

    Example: paceline alerts test run.toml --set alerts.webhook_file=/etc/paceline/webhook
    """
    from paceline.config.load import load_config
    from paceline.observe.alerts import Alert, NotDelivered, deliver

    loaded = load_config(config, overrides or [])
    if loaded.alerts.webhook_file is None and not loaded.alerts.command:
        raise BadInput(
            f"{config}: [alerts] names no receiver. Set alerts.webhook_file or alerts.command"
        )
    alert = Alert("end", "test", "this is a test of the run's alerts", time.time())
    problem = None
    try:
        deliver(loaded.alerts, alert.message(loaded.run.name))
    except NotDelivered as why:
        problem = str(why)
    if as_json:
        print_json({"delivered": problem is None, "problem": problem})
    else:
        typer.echo(f"not delivered: {problem}" if problem else "delivered", err=bool(problem))
    raise typer.Exit(0 if problem is None else 1)
