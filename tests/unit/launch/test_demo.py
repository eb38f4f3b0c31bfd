"""The demo deletes no run but its own."""

from pathlib import Path

import pytest

from paceline.errors import BadInput
from paceline_launcher.cli.demo import demo


def test_a_run_of_another_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "precious"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.toml").write_text('[run]\nname = "precious"\n')
    with pytest.raises(BadInput, match="holds the run 'precious', which would be deleted"):
        demo(run_dir=run_dir)
    assert (run_dir / "checkpoints").is_dir()
