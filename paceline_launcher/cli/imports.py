"""``paceline import``: the configuration of another framework as one of ours."""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import tomli_w
import typer
from pydantic import ValidationError

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline_launcher.cli.common import write_new

Table = dict[str, Any]
COSMOS_RL = Path(__file__).with_name("cosmos_rl.toml")
POLICY = "train.train_policy"
REWARDS = f"{POLICY}.reward_function"
UNKNOWN = "no setting of Cosmos-RL that is known here"


def cosmos_rl(source: Path, *, out: Path | None = None, force: bool = False) -> None:
    """Write a TOML file of Cosmos-RL as a configuration of Paceline.

    The first lines of the result name each setting that has no counterpart, with the reason. Where
    defaults differ, those of Cosmos-RL are written.

    Example: paceline import cosmos-rl qwen2-5-7b-grpo.toml --out run.toml

    Args:
        source FILE: Configuration of Cosmos-RL.
        out OUT: File to write; default: standard output.
        force: Replace an existing file.
    """
    try:
        theirs = tomllib.loads(source.read_text("utf-8"))
        ours, left = converted(theirs, source.stem)
    except OSError as error:
        raise BadInput(f"{source}: {error.strerror}. Give a TOML file of Cosmos-RL") from None
    except ValueError as error:
        raise BadInput(f"{source}: {error}") from None
    head = f"# From {source.name}, a configuration of Cosmos-RL. Not taken over as they are:"
    settings = {name: ours[name] for name in Config.model_fields if name in ours}
    text = "\n".join([head, *sorted(left), "", tomli_w.dumps(settings)])
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_new(out, text, force=force)
        typer.echo(f"wrote {out}; its first lines name {len(left)} settings without counterpart")


def converted(theirs: Mapping[str, Any], name: str) -> tuple[Table, list[str]]:
    """Settings of ours, and a line of comment for each of theirs without counterpart. ``name``: of
    the run. Raises ValueError for what cannot be a run of ours, with the setting."""
    table = tomllib.loads(COSMOS_RL.read_text("utf-8"))
    settings: dict[str, Table] = table["settings"]
    given: Table = dict(_flat(theirs, settings))
    kind = given["kind"] = _kind(theirs)
    ours: Table = {"run": {"name": re.sub(r"[^\w.-]+", "-", name)}}
    left: list[str] = []
    came = {entry["to"]: their for their, entry in settings.items() if "to" in entry}
    came["reward.functions"] = REWARDS

    def leave(name: str, why: str) -> None:
        if name in given:  # not a default
            left.append(f"#   {_shown(name, given[name])}: {why}")

    for theirs_name, entry in settings.items():
        value = given.get(theirs_name, entry.get("default"))
        if theirs_name.endswith(".split") and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value in (None, "", []):
            leave(theirs_name, "empty")
        elif not _at(theirs, entry.get("when", POLICY)):
            leave(theirs_name, f"without {entry['when']} it means nothing")
        elif kind not in entry.get("of", [kind]):
            leave(theirs_name, f"a run of {kind} has no such setting")
        elif value not in entry.get("only", [value]):
            leave(theirs_name, entry["why"])
        elif to := entry.get("to"):
            written = (our for their, our in entry.get("as", ()) if their == value)
            _put(ours, to, next(written, value))
    if "train.max_num_steps" in given:
        leave("train.epoch", "the run ends after train.max_num_steps")
    for entry in table["also"]:
        if given.get(entry["theirs"]) == entry["is"]:
            for to, value in entry["ours"].items():
                _put(ours, to, value)
    _put_sizes(ours, given, left)
    if kind == "grpo":
        _put_rewards(ours, given, table["rewards"], left)
    reasons = [(pattern, why) for why, names in table["without"].items() for pattern in names]
    for unknown in given.keys() - settings.keys() - {"kind"}:
        leave(unknown, next((why for names, why in reasons if fnmatch(unknown, names)), UNKNOWN))
    try:
        Config.model_validate(ours)
    except ValidationError as error:
        setting = ".".join(map(str, error.errors()[0]["loc"]))
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        named = next((came[to] for to in came if f"{setting}.".startswith(f"{to}.")), setting)
        raise ValueError(f"{named}: {message}") from None
    return ours, left


def _kind(theirs: Mapping[str, Any]) -> str:
    for name in ("train.non_text", "policy.is_diffusers", "vla"):
        if _at(theirs, name):
            raise ValueError(f"{name}: only language models are trained here, on text")
    if not isinstance(_at(theirs, POLICY), Mapping):
        raise ValueError(f"no [{POLICY}], which Cosmos-RL needs")
    kind = _at(theirs, f"{POLICY}.type")
    if kind not in ("grpo", "sft"):
        raise ValueError(f"{_shown(f'{POLICY}.type', kind)}: only grpo and sft are imported")
    for name in ("policy.model_name_or_path", f"{POLICY}.dataset.name"):
        if not _at(theirs, name):
            raise ValueError(f"{name} is not given: a run needs it")
    return "distill" if _at(theirs, "distillation.enable") else str(kind)


def _put_sizes(ours: Table, given: Table, left: list[str]) -> None:
    """Sizes that several of theirs give: of a replica, of a step, of the run."""

    def size(name: str, default: int) -> int:
        value = given.get(name, default)
        if value == -1:  # GPUs that the others leave; their launcher counts none
            left.append(f"#   {name} = -1: 1 is taken, as GPUs are not counted here")
            return 1
        if type(value) is not int or value < 1:
            raise ValueError(f"{_shown(name, value)}: give a whole number of 1 or more")
        return value

    parts = {"tp": 2, "cp": 1, "pp": 1, "dp_shard": 1, "dp_replicate": 1}
    sizes = {name: size(f"policy.parallelism.{name}_size", n) for name, n in parts.items()}
    replicas = size("policy.parallelism.n_init_replicas", 1)
    fleet, train = ours["fleet"], ours["train"]
    fleet["policy_ranks"] = math.prod(sizes.values())
    batch = size("train.train_batch_per_replica", 8) * replicas
    if given["kind"] == "sft":  # each data-parallel rank reads a batch of rows
        batch *= sizes["dp_shard"] * sizes["dp_replicate"]
        train["groups_per_step"] = batch
    else:
        group = size("rollout.n_generation", 16)
        train["groups_per_step"] = math.ceil(batch / group)
        if batch % group:
            why = f"{batch} samples are no whole number of groups of {group}: rounded up"
            left.append(f"#   train.train_batch_per_replica: {why}")
    if fleet.get("sharing") == "turns":
        fleet["rollout"] = replicas
        ours["rollout"]["tensor_parallel"] = fleet["policy_ranks"]
    warmup = given.get("train.optm_warmup_steps", 20)
    if type(warmup) not in (int, float):
        raise ValueError(f"{_shown('train.optm_warmup_steps', warmup)}: give a number")
    share = isinstance(warmup, float) and warmup <= 1
    if "train.max_num_steps" in given:
        steps = size("train.max_num_steps", 1)
        train["optimizer"]["warmup_steps"] = min(int(warmup * steps) if share else warmup, steps)
        train.pop("epochs", None)
    elif share:
        why = "a share of steps that only the data tells: give a number of steps"
        raise ValueError(f"train.optm_warmup_steps = {warmup}: {why}")


def _put_rewards(ours: Table, given: Table, known: Mapping[str, str], left: list[str]) -> None:
    found = given.get(REWARDS, "single_choice")
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list | Mapping) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{_shown(REWARDS, found)}: give a name, a list or a table of weights")
    if isinstance(found, list):
        found = dict.fromkeys(found, 1.0)
    for name in found.keys() - known.keys():
        why = f"yours to write, as {name} in rewards.py (docs/rewards.md)"
        left.append(f"#   {REWARDS} {name}: {why}")
    functions = {known.get(name, f"rewards:{name}"): weight for name, weight in found.items()}
    ours["reward"] = ours.get("reward", {}) | {"functions": functions}


def _shown(name: str, value: Any) -> str:
    return f"{name} = {json.dumps(value, default=str)}"


def _flat(
    table: Mapping[str, Any], whole: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, Any]]:
    """Settings by dotted name. A table that is ``whole`` is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and f"{at}{key}" not in whole:
            yield from _flat(value, whole, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _at(table: Any, name: str) -> Any:
    for key in name.split("."):
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def _put(table: Table, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for key in path:
        table = table.setdefault(key, {})
    table[last] = value
