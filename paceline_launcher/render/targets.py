"""Targets of `paceline render` by name, and the files that one of them makes of a run."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

from paceline.errors import BadInput
from paceline_launcher.render.options import RenderOptions, check_image
from paceline_launcher.render.request import RenderRequest

TARGETS = {
    "kubernetes": "paceline_launcher.render.kubernetes.target",
    "pytorchjob": "paceline_launcher.render.kubernetes.pytorchjob",
    "pai-dlc": "paceline_launcher.render.pai_dlc",
    "ray": "paceline_launcher.render.ray",
    "slurm": "paceline_launcher.render.slurm",
}
"""Module of each: its ``render(request)`` returns the files, and ``USES`` names the options that it
heeds."""
FLAGS = {
    "volumes": "--volume",
    "environment": "--nccl-env",
    "quota": "--resource-quota",
}
"""Options whose flag is not their name."""


def flag(option: str) -> str:
    return FLAGS.get(option, "--" + option.replace("_", "-"))


def rendered(target: str, request: RenderRequest, given: Collection[str]) -> dict[str, str]:
    """Texts of the target's files, by name. ``given``: options that the user chose. Raises
    BadInput."""
    if target not in TARGETS:
        raise BadInput(f"--target {target}: choose {', '.join(TARGETS)}")
    module = import_module(TARGETS[target])
    for option in given:
        if option not in module.USES:
            raise BadInput(f"{flag(option)} has no effect with --target {target}: remove it")
    _check(target, request, module.USES)
    files: dict[str, str] = module.render(request)
    return files


def _check(target: str, request: RenderRequest, uses: Collection[str]) -> None:
    options: RenderOptions = request.options
    if "image" in uses:
        if options.image is None:
            raise BadInput(
                f"--image is missing: --target {target} starts containers. deploy/containers/Dockerfile builds an image"
            )
        check_image(options.image)
    request.check()


def write_files(files: dict[str, str], directory: Path, *, force: bool) -> list[Path]:
    """Writes all or, if one exists and is not to be replaced, none; their paths. Raises BadInput."""
    paths = [directory / name for name in files]
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise BadInput(f"{', '.join(there)}: --force replaces them, and --out names another directory")  # fmt: skip
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            # Beside it first: a reader never sees half a file.
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.chmod(0o755 if text.startswith("#!") else 0o644)
            partial.replace(path)
    except OSError as error:
        raise BadInput(f"{directory}: cannot be written: {error.strerror or error}") from None
    return paths
