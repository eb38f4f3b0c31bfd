"""``paceline plan``: what a run needs and how fast it would be, before it starts."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from paceline.cli.plan.memory import memory
from paceline.cli.plan.pace import pace


class _PaceByDefault(TyperGroup):
    """``paceline plan RUN.toml`` is ``paceline plan pace RUN.toml``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["pace", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(
    cls=_PaceByDefault,
    help="Compute what a run needs, and how fast it would be, before it starts.\n\n"
    "Example: paceline plan run.toml --gpus 16,32,64,128 --gpu h100\n\n"
    "Example: paceline plan memory run.toml --gpu h100",
    no_args_is_help=True,
)
plan.command()(pace)
plan.command()(memory)
