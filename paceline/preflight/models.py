"""Checks of the models that a run reads: directories, names of the hub, and chat templates."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, load_rows, prompt_of

GIVE_MODEL = "Give a model directory or a hub name"
WEIGHTS = (".safetensors", ".bin")
HUB_S = 5.0
TEMPLATES = ("chat_template.jinja", "chat_template.json")

Problem = tuple[str, str]
"""What is wrong, and the remedy."""


def model_problems(config: Config) -> Iterator[Problem]:
    model, train = config.model, config.train
    used = [("model.path", model.path, True)]
    if model.tokenizer is not None:
        used.append(("model.tokenizer", model.tokenizer, False))
    if train.kl_coef > 0 and train.reference_path is not None:
        used.append(("train.reference_path", train.reference_path, True))
    bad = False
    for setting, path, whole in used:
        if problem := _model_problem(path, whole):
            found, remedy = problem
            bad = True
            yield f"{setting}: {path}{found}", remedy
    if not bad:
        yield from _template_problem(config)


def _model_problem(path: str, whole: bool) -> Problem | None:
    """``whole``: it needs a model's weights too."""
    local = Path(path).expanduser()
    if not local.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            return ": no such directory", GIVE_MODEL
        if local.parent.is_dir() and "/" in path:
            return f": no such directory, though {local.parent} is one", GIVE_MODEL
        return _hub_problem(path)
    if not local.is_dir():
        return " is not a directory", "Give the directory of a model"
    try:
        names = {entry.name for entry in local.iterdir()}
        if whole:
            json.loads((local / "config.json").read_text())
    except FileNotFoundError as error:
        return f" has no {Path(error.filename).name}: not a model directory", GIVE_MODEL
    except (OSError, ValueError) as error:
        return f" cannot be read: {error}", GIVE_MODEL
    if whole and not any(name.endswith(WEIGHTS) for name in names):
        return " has no weights (*.safetensors)", "Save the model there first"
    return None


def _hub_problem(name: str) -> Problem | None:
    """Why workers could not load the model from the Hugging Face hub, or from its cache here."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    meant = difflib.get_close_matches(name, [p.name for p in Path().iterdir() if p.is_dir()], n=1)
    remedy = f"Did you mean the directory {meant[0]}?" if meant else GIVE_MODEL
    if constants.HF_HUB_OFFLINE:
        return ": no such directory, nor in the hub's cache (HF_HUB_OFFLINE is set)", remedy
    try:
        HfApi().model_info(name, timeout=HUB_S)
    except RepositoryNotFoundError:
        return ": no such directory, and the hub has no such model that this user may read", remedy
    except Exception as error:  # whatever the HTTP client raises for an unreachable hub
        why = str(error).split("\n", 1)[0]
        return f": no such directory, nor in the hub's cache, and the hub does not answer: {why}", (
            f"{remedy if meant else 'Give a model directory'}, or connect this machine to the hub"
        )
    return None


def _template_problem(config: Config) -> Iterator[Problem]:
    if not _needs_template(config):
        return
    setting = "model.tokenizer" if config.model.tokenizer is not None else "model.path"
    path = config.model.tokenizer or config.model.path
    if _has_template(path):
        return
    yield (
        f"{setting}: the tokenizer of {path} has no chat template, and the prompts are chat messages",
        "Give a tokenizer with one (model.tokenizer), or prompts as text without data.chat",
    )


def _needs_template(config: Config) -> bool:
    if config.data.chat or config.data.system_prompt:
        return True
    try:
        rows = load_rows(config.data.path, name=config.data.name, split=config.data.split)
        return bool(len(rows)) and not isinstance(prompt_of(rows[0], config.data), str)
    except DataError:
        return False  # the check of the data says so


def _has_template(path: str) -> bool:
    """Also true for a model of the hub whose files are not here: nobody can tell."""
    if any(_file(path, name) is not None for name in TEMPLATES):
        return True
    settings = _file(path, "tokenizer_config.json")
    if settings is None:
        return not Path(path).expanduser().is_dir()
    try:
        found: Any = json.loads(settings.read_text())
    except (OSError, ValueError):
        return False
    return bool(isinstance(found, dict) and found.get("chat_template"))


def _file(path: str, name: str) -> Path | None:
    local = Path(path).expanduser()
    if local.is_dir():
        return local / name if (local / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, name)
    return Path(found) if isinstance(found, str) else None
