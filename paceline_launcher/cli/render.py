"""``paceline render``: files that start a run on a scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.config.load import load_config
from paceline_launcher.cli.common import ConfigArgument, JsonOption, SetOption, print_json
from paceline_launcher.render.options import RenderOptions

TARGETS = ("kubernetes", "pytorchjob", "pai-dlc", "ray", "slurm")


def render(
    config: ConfigArgument,
    *,
    options: RenderOptions,
    target: Annotated[str, typer.Option(autocompletion=lambda: list(TARGETS))],
    out: str = "",
    force: bool = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the files that start a run on Kubernetes, as a PyTorchJob, on PAI-DLC, Ray or Slurm.

    Counts, names and resources follow from the configuration; the options are what it does not say.
    Secrets are in none of the files. docs/clusters.md shows the commands that use them.

    Example: paceline render run.toml --target kubernetes --image registry/paceline:0.1.0
    --gpus-per-node 8

    Example: paceline render run.toml --target slurm --gpus-per-node 8 --partition gpu

    Args:
        target NAME: kubernetes, pytorchjob, pai-dlc, ray or slurm.
        out DIR: Directory of the files; - for standard output. Default: rendered/TARGET.
        force: Replace existing files.
    """
    from paceline_launcher.render.request import RenderRequest
    from paceline_launcher.render.targets import rendered, write_files

    files = rendered(target, RenderRequest(load_config(config, overrides or ()), options))
    if out == "-":
        if as_json:
            print_json({"target": target, "written": None, "files": files})
        else:
            texts = (f"# ---- {name}\n{text}" for name, text in files.items())
            typer.echo("\n".join(texts), nl=False)
        return
    paths = write_files(files, Path(out or f"rendered/{target}"), force=force)
    if as_json:
        print_json({"target": target, "written": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: docs/clusters.md, section {target}")
