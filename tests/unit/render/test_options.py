"""Options of `paceline render`. What is refused: tests/golden/commands.txt."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.render.options import limit_minutes
from tests.fixtures.rendered import CPU, IMAGE, render

K8S = ("--target", "kubernetes", "--image", IMAGE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7-00:00:00", 10080), ("90", 90), ("1:30:01", 91), ("2-12", 3600), ("5:30", 6), ("0", None)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, expected: int | None) -> None:
    assert limit_minutes(text) == expected


def test_an_edited_template_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    edited = tmp_path / "kubernetes/storage.yaml.j2"
    edited.write_text("# {{ run.name }}, {{ options.storage_gib }} GiB\n")
    files = render(CPU, *K8S[1:], "--templates", str(tmp_path))
    assert files["storage.yaml"] == "# demo, 50 GiB\n"
    assert files["redis.yaml"] == render(CPU, *K8S[1:])["redis.yaml"]
    edited.write_text("{{ run.nothing }}")
    with pytest.raises(BadInput, match=r"storage\.yaml\.j2"):
        render(CPU, *K8S[1:], "--templates", str(tmp_path))


def test_existing_files_are_replaced_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["render", str(CPU), *K8S, "--out", "here"]
    done = CliRunner().invoke(app, [*words, "--out=-"])
    assert "# ---- redis.yaml\n" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, words).exit_code == 0
    assert {path.name for path in Path("here").iterdir()} == set(render(CPU, *K8S[1:]))
    changed = Path("here/redis.yaml")
    changed.write_text("mine")
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, BadInput) and "--force replaces them" in str(done.exception)
    assert changed.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert changed.read_text() == render(CPU, *K8S[1:])["redis.yaml"]
