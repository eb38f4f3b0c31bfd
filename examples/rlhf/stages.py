"""Stages of the pipelines: what each one reads, runs and leaves behind. Pure but for the files that
say how far it is.

    base model ─► sft ─► preferences ─► reward_model ─► ppo
                   └───────────┴──────────────────────► dpo

A stage begins with the exports of the stages that it needs, never with their checkpoints. It is
done once its output is complete, so a command that is started again begins with the first stage
that is not.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import RunHandle

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
Settings = Mapping[str, Any]


class PipelineProblem(Exception):
    """What a user can mend; the text says how."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    needs: tuple[str, ...] = ()
    wiring: Settings = field(default_factory=dict)
    """Setting to path in the pipeline's directory. Of a run."""
    short: Settings = field(default_factory=dict)
    """Settings of a short run, which shows that everything works and trains nothing to speak of."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """Metric of a step to its name in the progress line."""

    @property
    def is_run(self) -> bool:
        return self.name != PREFERENCES

    @property
    def config(self) -> Path:
        return HERE / f"{self.name}.toml"


PREFERENCES = "preferences"
FILES = ("pairs.jsonl", "held_out_pairs.jsonl")
"""Of the preferences: to train on, and to evaluate on."""
_RECORDED = {"train.checkpoint_every": 2, "train.eval_every": 2, "train.eval_limit": 16}
_PAIRS = {
    "data.path": "preferences/pairs.jsonl",
    "data.eval_path": "preferences/held_out_pairs.jsonl",
}
_OF_PAIRS = {"pair_accuracy": "accuracy over pairs"}
STAGES = {
    stage.name: stage
    for stage in (
        Stage("sft", short={"train.steps": 4, **_RECORDED}, shows={"nll": "loss"}),
        Stage(PREFERENCES, ("sft",), short={"pairs": 96, "held_out": 32}),
        Stage(
            "reward_model",
            ("sft", PREFERENCES),
            {"model.path": "sft/export", **_PAIRS},
            {
                "train.steps": 8,
                "train.optimizer.warmup_steps": 2,
                "train.groups_per_step": 32,
                **_RECORDED,
            },
            _OF_PAIRS,
        ),
        Stage(
            "ppo",
            ("sft", "reward_model"),
            {"model.path": "sft/export", "scorers.preference.path": "reward_model/export"},
            {
                "train.steps": 4,
                "train.checkpoint_every": 2,
                "train.eval_every": 4,
                "evaluation.sets.truth.limit": 16,
            },
            {
                "reward_mean": "mean score by the reward model (to rise)",
                "kl": "KL from the SFT model in nats a token (to stay small)",
            },
        ),
        Stage(
            "dpo",
            ("sft", PREFERENCES),
            {"model.path": "sft/export", **_PAIRS},
            {"train.steps": 4, "train.groups_per_step": 16, **_RECORDED},
            _OF_PAIRS,
        ),
    )
}
PIPELINES = {
    "ppo": ("sft", PREFERENCES, "reward_model", "ppo"),
    "dpo": ("sft", PREFERENCES, "dpo"),
    "all": ("sft", PREFERENCES, "reward_model", "ppo", "dpo"),
}


def chosen_stages(pipeline: str, only: Sequence[str]) -> list[Stage]:
    """Stages of a pipeline, or of these ``only`` some, in the order in which they run. Raises
    PipelineProblem."""
    for name in only:
        if name not in PIPELINES[pipeline]:
            known = ", ".join(PIPELINES[pipeline])
            raise PipelineProblem(
                f"--stages: the pipeline {pipeline} has no stage {name!r}. Name some of {known}"
            )
    return [STAGES[name] for name in PIPELINES[pipeline] if not only or name in only]


def overrides_by_stage(given: Sequence[str], stages: Iterable[Stage]) -> dict[str, dict[str, str]]:
    """``STAGE.SETTING=VALUE`` of --set, by stage. Raises PipelineProblem."""
    names = [stage.name for stage in stages]
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for text in given:
        dotted, equals, value = text.partition("=")
        name, dot, setting = dotted.partition(".")
        if not equals or not dot or not setting:
            raise PipelineProblem(
                f"--set {text}: write STAGE.SETTING=VALUE, for example ppo.train.loss.kl_coef=0.1"
            )
        if name not in names:
            raise PipelineProblem(
                f"--set {text}: no stage {name!r} is to run. Begin with one of {', '.join(names)}"
            )
        found[name][setting] = value
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """A stage in the directory of a pipeline."""

    stage: Stage
    root: Path
    settings: Settings
    """Beside those of its config, as dotted names."""

    @property
    def directory(self) -> Path:
        """Of the run, or of the preferences."""
        return self.root / self.stage.name

    @property
    def log(self) -> Path:
        return self.root / f"{self.stage.name}.log"

    @property
    def record(self) -> Path:
        """JSON: what the stage was begun with."""
        return self.root / f"{self.stage.name}.json"

    @property
    def output(self) -> Path:
        return self.directory / ("export" if self.stage.is_run else FILES[0])

    @property
    def finished(self) -> bool:
        summary = RunHandle(self.directory).summary() or {}
        return self.stage.is_run and summary.get("status") == "finished"

    @property
    def done(self) -> bool:
        if not self.stage.is_run:
            return self.output.is_file()
        return self.finished and exported(self.output)

    @property
    def finished_without_export(self) -> bool:
        """The run has ended and its export is missing, for example because the disk was full."""
        return self.finished and not exported(self.output)

    def command(self) -> list[str]:
        if not self.stage.is_run:
            words = [sys.executable, "-m", "examples.rlhf.preferences"]
            words += ["--model", str(self.root / "sft/export"), "--out", str(self.directory)]
            for name, value in self.settings.items():
                words += [f"--{name.replace('_', '-')}", str(value)]
            return words
        words = [*paceline(), "up", str(self.stage.config), "--run-dir", str(self.directory)]
        for name, value in self.settings.items():
            words += ["--set", f"{name}={value}"]
        return words

    def begun_with(self) -> dict[str, Any]:
        """Config, settings and inputs: a stage that was made from others is not the one that is
        asked for."""
        config = self.stage.config.read_bytes() if self.stage.is_run else b""
        return {
            "config": hashlib.sha256(config).hexdigest(),
            "settings": {name: str(value) for name, value in sorted(self.settings.items())},
            "inputs": {name: _identity(self.root, name) for name in self.stage.needs},
        }

    def check_record(self) -> None:
        """Raises PipelineProblem if the stage was begun with something else."""
        try:
            was = json.loads(self.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except ValueError:
            was = {}
        if changed := _difference(was, self.begun_with()):
            raise PipelineProblem(
                f"{self.stage.name} in {self.root} was begun with {changed}. To do it again, "
                f"remove {self.directory} and {self.record}; to keep it, give another --dir"
            )


def place(stage: Stage, root: Path, *, short: bool, given: Settings) -> Place:
    wired = {name: str(root / path) for name, path in stage.wiring.items()}
    return Place(stage, root, {**wired, **(stage.short if short else {}), **given})


def paceline() -> list[str]:
    return [str(Path(sysconfig.get_path("scripts")) / "paceline")]


def exported(directory: Path) -> bool:
    """``paceline.json`` is written last."""
    return (directory / "paceline.json").is_file()


def _identity(root: Path, name: str) -> str:
    """Of the output of a stage; empty if it is not there."""
    if name == PREFERENCES:
        path = root / name / FILES[0]
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    about = root / name / "export" / "paceline.json"
    return hashlib.sha256(about.read_bytes()).hexdigest() if about.is_file() else ""


def _difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that differs, in words; empty if nothing does."""
    if was.get("config") != now["config"]:
        return "another version of its config"
    before, after = was.get("settings", {}), now["settings"]
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            shown = f"{name} = {before[name]}" if name in before else f"no setting of {name}"
            wanted = f"= {after[name]}" if name in after else "the one of the config"
            return f"{shown}, now it is {wanted}"
    for name, value in now["inputs"].items():
        if was.get("inputs", {}).get(name) != value:
            return f"another output of {name}"
    return ""
