"""Checks of the models that a run reads: directories, names of the hub, and chat templates."""

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.config.model_files import context_length, difference, misread, model_file
from paceline.config.schema import Config
from paceline.dataset.rows import DataError, Row, RowSource, prompt_of
from paceline.errors import BadInput, seen_from
from paceline_launcher.preflight.data import CHECK_HUB, HUB_S, hub_silence
from paceline_launcher.preflight.findings import Findings, Start, fail, ok

GIVE_MODEL = "Give a model directory or a hub name"
ROWS_LOOKED_AT = 20_000
WEIGHTS = (".safetensors", ".bin")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
Problem = tuple[str, str]
"""A problem and its remedy."""


def model_findings(start: Start) -> Findings:
    problems = list(model_problems(start.config, start.data.first_row))
    yield from (fail(found, remedy) for found, remedy in problems)
    if not problems:
        yield ok(start.config.model.path)


def model_problems(config: Config, first_row: Row | None) -> Iterator[Problem]:
    bad = False
    for setting, path, weights in _models(config):
        if problem := _model_problem(path, weights):
            bad = True
            yield f"{setting}: {path}{problem[0]}", problem[1]
    if bad:
        return
    yield from _token_problems(config)
    if _needs_template(config, first_row):
        setting = "model.tokenizer" if config.model.tokenizer is not None else "model.path"
        path = config.model.tokenizer or config.model.path
        if not _has_template(path):
            yield (
                f"{setting}: the tokenizer of {path} has no chat template, and the prompts are "
                "chat messages",
                "Give a tokenizer with one (model.tokenizer), or prompts as text without data.chat",
            )


def lengths(start: Start) -> Findings:
    """Checks whether prompts and completions fit: the run's limits, and the model's context."""
    config = start.config
    if config.recorded:
        return
    limit, context = config.rollout.max_tokens, context_length(config.model.path)
    if context is not None and limit >= context:
        yield fail(
            f"rollout.max_tokens: {limit} tokens, and with its prompt a completion of "
            f"{config.model.path} may have {context}",
            f"Lower it below {context}",
        )
    if config.data.long_prompts == "drop" and start.data.training:
        shortest = _shortest_prompt(config, start.data.training)
        if shortest is not None and shortest > config.data.max_prompt_tokens:
            yield fail(
                f"data.max_prompt_tokens = {config.data.max_prompt_tokens}: every prompt is longer "
                f"(the shortest has {shortest} tokens) and would be dropped",
                "Raise it, or set data.long_prompts to truncate them",
            )


def _shortest_prompt(config: Config, sources: Sequence[RowSource]) -> int | None:
    """Tokens of the first prompt that fits, or of the shortest of the rows looked at, without what
    a chat template adds; None if nobody can tell here."""
    from tokenizers import Tokenizer

    path, shortest = config.model.tokenizer or config.model.path, None
    try:
        tokenizer = Tokenizer.from_file(str(model_file(path, "tokenizer.json")))
    except Exception:  # whatever that library raises for a missing or another kind of file
        return None
    suffix = len(tokenizer.encode(config.data.prompt_suffix or "", add_special_tokens=False).ids)
    rows = (source[index] for source in sources for index in range(len(source)))
    for row in itertools.islice(rows, ROWS_LOOKED_AT):
        try:
            content = prompt_of(row, config.data)
        except DataError:
            continue
        texts = [content] if isinstance(content, str) else [str(m["content"]) for m in content]
        count = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        count -= suffix  # it may or may not be in the text already
        shortest = count if shortest is None else min(shortest, count)
        if shortest <= config.data.max_prompt_tokens:
            return shortest
    return shortest


def _models(config: Config) -> Iterator[tuple[str, str, bool]]:
    """(setting, path, whether its weights are read)."""
    model, train = config.model, config.train
    yield "model.path", model.path, True
    if model.tokenizer is not None:
        yield "model.tokenizer", model.tokenizer, False
    if (
        train.loss.kl_coef > 0
        and train.loss.reference_path is not None
        and train.loss.reference == "model"
    ):
        yield "train.loss.reference_path", train.loss.reference_path, True
    if config.critic_path is not None:
        yield "objective.critic_path", config.critic_path, True
    for name, scorer in config.scorers.by_name.items():
        if scorer.path is not None:
            yield f"scorers.{name}.path", scorer.path, True


def check_model_config(path: str) -> None:
    """Raises BadInput if model.path is no directory and no model of the hub. The hub's own client
    would try for more than a minute."""
    if problem := _model_problem(path, weights=False):
        found, remedy = problem
        raise BadInput(f"model.path: {path}{found}. {remedy}")


def _token_problems(config: Config) -> Iterator[Problem]:
    tokens = config.model.tokenizer or config.model.path
    critic = config.critic_path
    if critic is not None and (why := difference(tokens, critic)):
        yield (
            f"objective.critic_path: {critic} has other tokens than model.path ({why})",
            "Give a critic with the tokenizer of model.path, or leave objective.critic_path out",
        )
    for name, scorer in config.scorers.by_name.items():
        if scorer.kind == "judge" or scorer.path is None:
            continue
        if why := misread(tokens, scorer.path):
            yield (
                f"scorers.{name}.path: {scorer.path} has other tokens than the run, {tokens} "
                f"({why})",
                "Give a model with the tokenizer of the run, or use a judge, which reads text",
            )


def _model_problem(path: str, weights: bool) -> Problem | None:
    local = Path(path).expanduser()
    if not local.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            return f": no such directory{seen_from(path)}", GIVE_MODEL
        if local.parent.is_dir() and "/" in path:
            return f": no such directory, though {local.parent} is one", GIVE_MODEL
        return _hub_problem(path)
    if not local.is_dir():
        return " is not a directory", "Give the directory of a model"
    try:
        names = {entry.name for entry in local.iterdir()}
        if weights:
            json.loads((local / "config.json").read_text())
    except FileNotFoundError as error:
        return f" has no {Path(error.filename).name}: not a model directory", GIVE_MODEL
    except (OSError, ValueError) as error:
        return f" cannot be read: {error}", GIVE_MODEL
    if weights and not any(name.endswith(WEIGHTS) for name in names):
        return " has no weights (*.safetensors)", "Save the model there first"
    return None


def _hub_problem(name: str) -> Problem | None:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    meant = difflib.get_close_matches(name, [p.name for p in Path().iterdir() if p.is_dir()], n=1)
    remedy = f"Did you mean the directory {meant[0]}?" if meant else GIVE_MODEL
    if constants.HF_HUB_OFFLINE:
        return ": no such directory, nor in the hub's cache (HF_HUB_OFFLINE is set)", remedy
    try:
        silence = hub_silence(lambda hub: hub.model_info(name, timeout=HUB_S))
    except RepositoryNotFoundError:
        return ": no such directory, and the hub has no such model that this user may read", remedy
    except HfHubHTTPError as error:
        silence = f"the hub refuses it: {str(error).partition(chr(10))[0]}"
    if silence:
        found = f": no such directory, nor in the hub's cache, and {silence}"
        return found, f"{remedy} {CHECK_HUB}" if meant else CHECK_HUB
    return None


def _needs_template(config: Config, first_row: Row | None) -> bool:
    if config.data.chat or config.data.system_prompt:
        return True
    try:
        return first_row is not None and not isinstance(prompt_of(first_row, config.data), str)
    except DataError:
        return False  # the check of the data says so


def _has_template(path: str) -> bool:
    """True if a chat template was found, or if the files of a hub model are not here to look at."""
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
    try:
        found = model_file(path, name)
    except LookupError:
        return None
    return found if found.is_file() else None
