"""The demo deletes no run but its own, and ends without an evaluation, too."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import BadInput
from paceline_launcher.cli import demo as module
from paceline_launcher.cli.demo import demo


def test_a_run_of_another_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "precious"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.toml").write_text('[run]\nname = "precious"\n')
    with pytest.raises(BadInput, match="holds the run 'precious', which would be deleted"):
        demo(run_dir=run_dir)
    assert (run_dir / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (None, None, "? of the held-out digits before, and ?"),
        (0.5, None, "50% of"),
        (None, 0.5, "?"),
    ],
)
def test_evaluations_without_a_score_are_told_as_unknown(
    first: float | None,
    last: float | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = {"eval_first": first, "eval_last": last, "steps": 100, "export": "model"}
    summary |= {"samples_lost": 0, "samples_duplicated": 0}

    def up(*_: Any, run_dir: Path, **__: Any) -> None:
        run_dir.mkdir(parents=True)
        (run_dir / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(module, "up", up)
    monkeypatch.setattr(module, "ask", lambda model: 5)
    demo(run_dir=tmp_path / "run")
    assert f"The model sorted {said}" in capsys.readouterr().out
