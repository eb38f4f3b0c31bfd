"""``paceline export``."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import JsonOption, print_json


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|CHECKPOINT", help="Directory of a run, or of one of its checkpoints."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.")],
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the highest held-out reward.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Model that the run started from, if it has moved."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="float32, bfloat16 or float16; default: as stored."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A part that the run trains, such as critic; default: the policy, or the only "
            "part. One with a scalar head becomes an AutoModelForSequenceClassification.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory of safetensors.

    For a run, the newest recorded checkpoint is exported. For a directory that has only the
    checkpoints of a run, the newest complete one is exported.

    Example: paceline export runs/demo --out exported

    Example: paceline export runs/demo --best --out exported

    Example: paceline export runs/ppo --part critic --out critic
    """
    # Before the choice: this import takes seconds, in which a run that goes on may delete what was
    # chosen.
    from policy_worker.checkpoint.export import export as write

    while True:
        checkpoint = _checkpoint(source, best=best)
        try:
            write(checkpoint, model, out, dtype, part=part, trust_remote_code=trust_remote_code)
            break
        except (BadInput, OSError):
            if checkpoint.is_dir() or _checkpoint(source, best=best) == checkpoint:
                raise
            typer.echo(f"{checkpoint} was deleted meanwhile: exporting the next one", err=True)
    if as_json:
        print_json({"checkpoint": str(checkpoint), "out": str(out)})
    else:
        typer.echo(f"exported {checkpoint} to {out}")


def _checkpoint(source: Path, *, best: bool) -> Path:
    from paceline.observe.checkpoint_links import complete
    from paceline.observe.projection import Projection

    if not source.is_dir():
        raise BadInput(f"{source}: no such directory. Give a run directory or a checkpoint in one")
    if not (source / "events.jsonl").is_file():
        if best:
            raise BadInput(f"{source}: --best needs the directory of a run, with its events.jsonl")
        # The directory of a policy worker that was started by hand may have no events.
        found = next(reversed(complete(source / "checkpoints")), source)
        if found == source and not (source / "meta.json").is_file():
            raise BadInput(
                f"{source} is neither a checkpoint (it has no meta.json) nor the directory of a "
                "run (it has no events.jsonl and no complete checkpoint). Give one of them; "
                "`paceline runs` lists runs"
            )
        return found
    history = Projection.read(source).history
    if not history.checkpoints:
        raise BadInput(f"{source}: the run has no checkpoint yet")
    if best and history.best is None:
        raise BadInput(
            f"{source}: no checkpoint has a held-out reward. Set data.eval_path, and "
            "train.eval_every to a multiple of train.checkpoint_every; or export without --best"
        )
    chosen = history.best if best and history.best is not None else history.checkpoints[-1]
    path = Path(chosen.path)
    # The path was recorded before the run directory was moved.
    return path if path.is_dir() else source / "checkpoints" / path.name
