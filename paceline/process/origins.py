"""Origins of what a process computes with: its release, the user's code, and the models that no
vote compares. The controllers compare them when a worker registers."""

import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.config.schema import Config
from paceline.user_code import search_start_directory_last
from paceline.worker_pools import POLICY, ROLLOUT, SCORER

_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


@cache
def release() -> str:
    """That which is installed; empty in a checkout that is not, which nobody compares."""
    try:
        return version("paceline")
    except PackageNotFoundError:
        return ""


def origins_of(config: Config, role: str, scorer: str = "") -> dict[str, str]:
    """By the setting: a digest of the files that a worker of ``role`` takes it from. What is on no
    disk, such as a model of the hub, is left out."""
    code: Iterable[tuple[str, str]] = ()
    models: list[tuple[str, Path | str | None]] = []
    if role == ROLLOUT:
        code = [(f"reward.functions {name}", name) for name in config.reward.functions]
        code = [*code, ("rollout.environment", config.rollout.environment or "")]
    elif role == POLICY:
        code = [("train.algorithm", config.train.algorithm)]
        reference = config.train.loss.reference_path or config.model.path
        models = [("train.loss.reference_path", reference)]
    elif role == SCORER and scorer in config.scorers.by_name:
        models = [(f"scorers.{scorer}.path", config.scorers.by_name[scorer].path)]
    if config.model.lora is not None and role in (POLICY, ROLLOUT):
        models += [("model.path", config.model.path)]  # the base of adapters is in no transfer
        models += [("objective.critic_path", config.critic_path)] if role == POLICY else []
    found = {setting: _code(name) for setting, name in code if ":" in name}
    found |= {setting: _model(path) for setting, path in models if path}
    return {setting: digest for setting, digest in found.items() if digest}


def _code(name: str) -> str:
    search_start_directory_last()
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return _digest(source.read_bytes()) if source is not None and source.is_file() else ""


def _model(directory: Path | str) -> str:
    """Digest of names and sizes of its files, and of how each begins: its tensors, and some of
    their numbers."""
    seen = b""
    for file in sorted(file for pattern in _WEIGHTS for file in Path(directory).glob(pattern)):
        with file.open("rb") as opened:
            begins = hashlib.sha256(opened.read(1 << 20)).digest()
        seen += f"{file.name} {file.stat().st_size} ".encode() + begins
    return _digest(seen)


def _digest(content: bytes) -> str:
    """Empty for no content."""
    return hashlib.sha256(content).hexdigest()[:16] if content else ""
