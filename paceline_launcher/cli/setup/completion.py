"""``paceline completion``: scripts that make the shell ask this command for completions."""

import os
from enum import StrEnum
from typing import Annotated

import typer

VARIABLE = "_PACELINE_COMPLETE"
"""Variable with which the command answers the shell's question and does nothing else."""


Shell = StrEnum("Shell", ["bash", "zsh", "fish"])


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a script that lets the shell complete commands, options and their values.

    bash: add eval "$(paceline completion bash)" to ~/.bashrc. zsh: the same with zsh in ~/.zshrc,
    after compinit. fish: paceline completion fish > ~/.config/fish/completions/paceline.fish

    Example: paceline completion bash
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="paceline", complete_var=VARIABLE, shell=str(shell))
    typer.echo(script)


def prepare() -> None:
    """Prepares typer if the shell has started this command to ask for completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
