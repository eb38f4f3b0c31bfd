"""The pages for those who come from another framework name settings and commands that exist."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.config.objectives import BUILT_IN
from paceline.config.schema import SETTINGS
from paceline.config.sections.scorers import ScorerConfig
from paceline_launcher.cli import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
WITHOUT = ("no setting", "no counterpart")
"""Text in the place of a setting, if there is none."""


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return [row for row in cells if row[1] != "here"]


def exists(name: str) -> bool:
    section, _, field = name.partition(".")
    if section == "objective":
        return any(field in entry.options.model_fields for entry in BUILT_IN.values())
    if section == "scorers":
        return field.removeprefix("NAME.") in ScorerConfig.model_fields
    return name in SETTINGS


def test_there_is_a_page_for_each_framework() -> None:
    named = {page.stem for page in PAGES}
    assert named == {"aiak-rlhf", "chatlearn", "cosmos-rl", "openrlhf", "trl", "verl"}
    assert all(len(rows(page)) > 25 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_names_a_setting_that_exists_or_says_that_there_is_none(page: Path) -> None:
    for theirs, ours, *_ in rows(page):
        named = re.findall(r"`([a-z_]+\.[a-zA-Z_.]+)(?: = [^`]*)?`", ours)
        command = ours.startswith("`paceline ")
        assert named or command or ours in WITHOUT, f"{theirs}: {ours}"
        for name in named:
            assert exists(name), f"{theirs}: {name} is no setting"
    for name in re.findall(r'train\.algorithm = "([^"]+)"', page.read_text()):
        assert name in BUILT_IN, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_begins_with_commands_that_are_accepted(page: Path, tmp_path: Path) -> None:
    block = [line[4:] for line in page.read_text().splitlines() if line.startswith("    paceline ")]
    starts = [line.partition("#")[0].split()[1:] for line in block]
    assert any(words[0] == "up" for words in starts)
    for words in starts:
        if words[0] == "init":
            done = CliRunner().invoke(app, [*words[:-1], str(tmp_path / words[-1])])
            assert done.exit_code == 0, done.output
        else:
            assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0, words
