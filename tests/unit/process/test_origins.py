"""Code and models of the user's that a worker tells of when it registers."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.config.sections.inputs import LoraConfig
from paceline.process import origins
from paceline.process.origins import origins_of
from tests.fixtures.configs import config_of

LORA = LoraConfig(rank=1)


def config(tmp_path: Path, **sections: Any) -> Config:
    return config_of(model={"path": str(tmp_path)}, **sections)


@pytest.mark.parametrize(
    ("setting", "sections"),
    [
        ("reward.functions points_of:score", {"reward": {"functions": ["points_of:score"]}}),
        ("rollout.environment", {"rollout": {"environment": "points_of:Env", "max_context": 2048}}),
    ],
)
def test_code_of_the_user_has_another_digest_once_it_is_edited(
    setting: str, sections: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    source, run = tmp_path / "points_of.py", config(tmp_path, **sections)
    source.write_text("def score(): return 1\n")
    before = origins_of(run, "rollout")[setting]
    assert origins_of(run, "rollout")[setting] == before
    source.write_text("def score(): return 2\n")
    assert origins_of(run, "rollout")[setting] != before
    assert setting not in origins_of(run, "policy")
    source.unlink()
    assert setting not in origins_of(run, "rollout"), "its import says what is wrong"


@pytest.mark.parametrize(
    ("role", "scorer", "setting"),
    [
        ("policy", "", "train.loss.reference_path"),
        ("policy", "", "model.path"),
        ("rollout", "", "model.path"),
        ("scorer", "kind", "scorers.kind.path"),
    ],
)
def test_a_frozen_model_has_another_digest_if_its_weights_or_its_config_differ(
    role: str, scorer: str, setting: str, tmp_path: Path
) -> None:
    scorers = {"kind": {"kind": "reward_model", "path": str(tmp_path)}}
    functions = {"functions": ["scorer:kind"]}
    run = config(tmp_path, scorers=scorers, reward=functions)
    if setting == "model.path":  # the base of adapters
        assert setting not in origins_of(run, role)
        run = run.model_copy(update={"model": run.model.model_copy(update={"lora": LORA})})
    weights = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"a" * 9, b"b" * 9, b"b" * 10):
        weights.write_bytes(content)
        seen.add(origins_of(run, role, scorer)[setting])
    (tmp_path / "config.json").write_text("{}")
    seen.add(origins_of(run, role, scorer)[setting])
    assert len(seen) == 4
    assert origins_of(config(tmp_path / "of-the-hub"), "policy") == {}


def test_a_checkout_that_is_not_installed_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine may have torch and this repository, and no environment for it."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(origins, "version", missing)
    assert origins.release.__wrapped__() == ""
