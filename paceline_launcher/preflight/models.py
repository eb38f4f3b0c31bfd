"""Checks of the models that a run reads: directories, names of the hub, and tokenizers."""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.config.model_files import context_length, difference
from paceline.config.schema import Config
from paceline.errors import BadInput, one_line, seen_from
from paceline_launcher.preflight.findings import CORRECT, Findings, Start, fail, ok

GIVE_MODEL = "Give a model directory or a hub name"
CHECK_HUB = "Check HF_ENDPOINT and the network to the hub, or give a directory of this machine"
HUB_S = 5.0
WEIGHTS = (".safetensors", ".bin")
Problem = tuple[str, str]
"""A problem and its remedy."""


def model(start: Start) -> Findings:
    problems = list(model_problems(start.config))
    yield from (fail(found, remedy) for found, remedy in problems)
    if not problems:
        yield ok(start.config.model.path)


def model_problems(config: Config) -> Iterator[Problem]:
    tried = [(setting, path, _model_problem(path, read)) for setting, path, read in _models(config)]
    if any(problem for *_, problem in tried):
        for setting, path, problem in tried:
            if problem is not None:
                yield f"{setting}: {path}{problem[0]}", problem[1]
        return
    yield from _token_problems(config)
    yield from _adapter_problems(config)
    limit, context = config.rollout.max_tokens, context_length(config.model.path)
    if not config.recorded and context is not None and limit >= context:
        yield (
            f"rollout.max_tokens: {limit} tokens, and with its prompt a completion of "
            f"{config.model.path} may have {context}",
            f"Lower it below {context}",
        )


def _models(config: Config) -> Iterator[tuple[str, str, bool]]:
    """(setting, path, whether its weights are read)."""
    model, loss = config.model, config.train.loss
    yield "model.path", model.path, True
    if model.tokenizer is not None:
        yield "model.tokenizer", model.tokenizer, False
    if loss.kl_coef > 0 and loss.reference_path is not None and loss.reference == "model":
        yield "train.loss.reference_path", loss.reference_path, True
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
        if scorer.path is None:
            continue
        if why := difference(tokens, scorer.path, exact=False):
            yield (
                f"scorers.{name}.path: {scorer.path} has other tokens than the run, {tokens} "
                f"({why})",
                "Give a model with the tokenizer of the run, or use a judge, which reads text",
            )


def _adapter_problems(config: Config) -> Iterator[Problem]:
    """Layers without an adapter, and adapters of another base, without loading any weights."""
    if (lora := config.model.lora) is None:
        return
    from transformers import AutoConfig

    from paceline.lora import LoraError, adapter_shapes, read_peft

    base, trusted = config.model.path, config.model.trust_remote_code
    try:
        for path in filter(None, (base, config.critic_path)):
            stored = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
            shapes = adapter_shapes(stored, lora, trust_remote_code=trusted)
            if lora.path is not None and path == base:
                read_peft(lora, base, shapes)
    except LoraError as error:
        yield str(error), CORRECT
    except Exception as error:  # of a user's files or model code
        yield f"model.lora: the layers of {path} cannot be listed ({one_line(error)})", GIVE_MODEL


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
        line = f"the hub {constants.ENDPOINT} does not answer: {str(error).partition(chr(10))[0]}"
        found = f": no such directory, nor in the hub's cache, and {line}"
        return found, f"{remedy} {CHECK_HUB}" if meant else CHECK_HUB
    return None
