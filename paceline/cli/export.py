"""``paceline export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import BadInput, JsonOption, print_json


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run, or one of its checkpoints.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write.", show_default=False)
    ],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory of safetensors.

    Of a run, its newest recorded checkpoint is taken.

    Example: paceline export runs/demo --out exported
    """
    checkpoint = _checkpoint(source)
    from policy_worker.export import export as write

    write(checkpoint, None, out, trust_remote_code=trust_remote_code)
    if as_json:
        print_json({"checkpoint": str(checkpoint), "out": str(out)})
    else:
        typer.echo(f"exported {checkpoint} to {out}")


def _checkpoint(source: Path) -> Path:
    from paceline.summary import Story

    if not source.is_dir():
        raise BadInput(f"{source}: no such directory. Give a run directory or a checkpoint in one")
    if not (source / "events.jsonl").is_file():
        return source
    newest = Story.read(source).newest_checkpoint
    if newest is None:
        raise BadInput(f"{source}: the run has no checkpoint yet")
    path = Path(newest)
    # A run directory that was moved takes its checkpoints along.
    return path if path.is_dir() else source / "checkpoints" / path.name


def register(app: typer.Typer) -> None:
    app.command()(export)
