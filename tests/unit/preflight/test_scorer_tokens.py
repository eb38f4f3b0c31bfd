"""A reward model or teacher of another tokenizer is refused before anything starts, wherever its
files are here."""

from pathlib import Path

import pytest

from paceline.config.model_files import difference
from paceline_launcher.preflight.models import model_problems
from testbed.tiny_model import make_tiny_model
from tests.fixtures.configs import config_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "model", hidden=32)
    make_tiny_model(root / "same", hidden=32, seed=1)
    make_tiny_model(root / "more", vocab="0123456789s=abc", hidden=32)
    # As many tokens, and two of them swapped.
    make_tiny_model(root / "swapped", vocab="0123456789=s", hidden=32)
    make_tiny_model(root / "smaller", vocab="0123456789s", hidden=32)
    bare = make_tiny_model(root / "bare", vocab="0123456789s", hidden=32)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    return root


def problems(models: Path, scorer: str, kind: str, max_tokens: int = 8) -> list[tuple[str, str]]:
    config = config_of(
        model={"path": str(models / "model")},
        rollout={"max_tokens": max_tokens},
        scorers={"helpful": {"kind": kind, "path": str(models / scorer)}},
    )
    return list(model_problems(config))


@pytest.mark.parametrize("kind", ["reward_model", "logprobs"])
@pytest.mark.parametrize("scorer", ["swapped", "smaller", "bare"])
def test_a_scorer_of_another_tokenizer_is_refused_before_anything_starts(
    models: Path, scorer: str, kind: str
) -> None:
    ((found, remedy),) = problems(models, scorer, kind)
    assert found.startswith("scorers.helpful.path: ") and "other tokens" in found
    assert "tokenizer of the run" in remedy and "judge" in remedy


def test_a_scorer_of_the_same_tokenizer_is_taken(models: Path) -> None:
    assert problems(models, "same", "reward_model") == []
    ((_, remedy),) = problems(models, "same", "reward_model", max_tokens=1 << 17)
    assert remedy.startswith("Lower it below")


def test_a_model_that_this_machine_has_not_is_left_to_its_scorer(models: Path) -> None:
    assert difference(str(models / "model"), "nobody/nothing", exact=False) == ""
    assert difference("nobody/nothing", str(models / "swapped"), exact=False) == ""
