"""Answers of the storage that a run reads: a dead mount would hang each check."""

from collections.abc import Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.threads import call_within
from paceline_launcher.preflight.findings import Findings, Start, fail

ANSWER_S = 10.0
RECORDS = ("config.json", "config.toml", "meta.json", "summary.json")
"""Small files of the directories of models, runs and checkpoints."""


def silent(start: Start) -> Findings:
    settings = {} if start.given is None else dict(_paths(start.given))
    for setting, path in {"--run-dir": str(start.run_dir), **settings}.items():
        try:
            require_answer(setting, path)
        except NoAnswer as error:
            yield fail(error.found, error.remedy)


class NoAnswer(BadInput):
    def __init__(self, setting: str, path: str) -> None:
        self.found = f"{setting}: {path} does not answer within {ANSWER_S:g} s"
        self.remedy = "Check the mount or the disk behind it (ls it), or give another path"
        super().__init__(f"{self.found}. {self.remedy}")


def require_answer(setting: str, path: str | Path | None) -> None:
    """Raises NoAnswer."""
    if path is None:
        return
    try:
        call_within(ANSWER_S, lambda: _touch(Path(path).expanduser()), f"read {setting}")
    except TimeoutError:
        raise NoAnswer(setting, str(path)) from None


def _touch(path: Path) -> None:
    files = [path / name for name in RECORDS] if path.is_dir() else [path]
    for file in files:
        try:
            if file.is_file():
                with file.open("rb") as opened:
                    opened.read(1)
        except OSError:
            continue  # the check that reads it says what is wrong


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    data, model, auth = config.data, config.model, config.auth
    paths = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.initial_checkpoint": model.initial_checkpoint,
        "train.loss.reference_path": config.train.loss.reference_path,
        "objective.critic_path": config.critic_path,
        "auth.token_file": auth.token_file,
        "auth.tls_cert": auth.tls_cert,
        "auth.tls_key": auth.tls_key,
        "auth.tls_ca": auth.tls_ca,
        **{f"data.sources.{name}": source.path for name, source in data.sources.items()},
        **{f"evaluation.sets.{n}.path": each.path for n, each in config.evaluation.sets.items()},
        **{f"scorers.{n}.path": scorer.path for n, scorer in config.scorers.by_name.items()},
    }
    yield from ((setting, path) for setting, path in paths.items() if path is not None)
