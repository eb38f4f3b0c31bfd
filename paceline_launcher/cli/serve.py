"""``paceline serve``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer


def serve(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|EXPORT",
            help="Directory of an export, or of a run, whose newest export is served.",
        ),
    ],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_FLAGS]", help="More flags of vLLM's server, after --."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; any but loopback needs a key (--api-key-env)."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens of a prompt and its answer; default: as the model.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="auto, bfloat16, half, float32; default: vLLM's choice."),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name that clients ask for; default: the run's, or the directory's.",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the key that clients have to send; default: VLLM_API_KEY, if it is set.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, and start nothing.")
    ] = False,
) -> None:
    """Serve an export with vLLM's OpenAI-compatible server, until it is ended.

    Works with vLLM for GPUs and with its CPU wheel. With a key, every path but /health and /ping
    asks for it.

    Example: paceline serve runs/demo

    Example: paceline serve exported --host 0.0.0.0 --api-key-env SERVE_KEY --max-model-len 8192

    Example: paceline serve exported -- --tensor-parallel-size 2 --enable-prefix-caching
    """
    from paceline.process.spawned_children import VLLM_MARK
    from paceline_launcher.serving.key_check import KEY_VARIABLE
    from paceline_launcher.serving.server_command import ServeOptions, server_command

    options = ServeOptions(
        source=source,
        host=host,
        port=port,
        max_model_len=max_model_len,
        dtype=dtype,
        served_name=served_name,
        key_variable=api_key_env,
        flags=tuple(flags or ()),
    )
    command = server_command(options, os.environ)
    # vLLM's other processes end with the server, however that ends.
    environment = {**command.environment, VLLM_MARK: "1"}
    if dry_run:
        shown = (f"{k}={v}" for k, v in environment.items() if k != KEY_VARIABLE)
        typer.echo(" ".join([*map(shlex.quote, shown), shlex.join(command.words)]))
        return
    os.execve(command.words[0], command.words, {**os.environ, **environment})
