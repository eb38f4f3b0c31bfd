"""docs/claims.md and README.md: each figure has a command, and comes from a kept result.

That the written figures are those of the results, `docs_tables --check` says
(test_generated_files.py).
"""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_launcher.cli import app

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "claims.md").read_text()
TEMPLATES = ROOT / "benchmarks" / "tables"
UNIT = r"(?:×|%|(?:s|ms|GB|MB|GiB|nats|times|hours|minutes)\b)"
FIGURE = re.compile(rf"(?<![\w.,-])\d[\d,]*(?:\.\d+|(?=\s{UNIT}|{UNIT}))")
"""A number with a unit, or with a point."""
VERSIONS = {"3.11"}
"""Numbers with a point in the README that are of no measurement."""
CONDITIONS = {"500"}
"""Numbers under which something was measured: MB/s of a slowed disk."""


def rows(title: str) -> list[list[str]]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


OTHERS, OURS = rows("What vendors promise"), rows("What the README says")


def problem(command: str) -> str:
    """What is wrong with ``command``; empty if this checkout has it."""
    program, *words = command.split()
    if program == "make":
        found = re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if found else f"no target {words[0]}"
    if program == "paceline":
        names = words[:2] if words[0] == "plan" else words[:1]
        done = CliRunner().invoke(app, [*names, "--help"])
        missing = [path for path in words if "/" in path and not (ROOT / path).is_file()]
        return f"{done.output}{missing}" if done.exit_code or missing else ""
    assert (program, words[0]) == ("python", "-m"), command
    module = ROOT / words[1].replace(".", "/")
    files = [file for file in (module.with_suffix(".py"), module / "__main__.py") if file.is_file()]
    source = "".join(file.read_text() for file in files)
    unknown = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source]
    return f"no option {unknown}" if files and unknown else "" if files else f"no {words[1]}"


@pytest.mark.parametrize("row", [*OTHERS, *OURS], ids=lambda row: row[0][:40])
def test_each_claim_has_a_command_that_exists_or_says_no(row: list[str]) -> None:
    _, have, measured_on, again = row
    if again == "–":
        assert have.startswith("No: ")
        assert not re.search(r"\d", have), "a figure without a command"
        return
    commands = re.findall(r"`([^`]+)`", again)
    assert commands, again
    assert [problem(command) for command in commands] == [""] * len(commands)
    assert len(measured_on) > 3


def test_every_promise_has_a_row() -> None:
    promised = " ".join(row[0] for row in OTHERS)
    for claim in ("2 to 3 times", "95 %", "a week", "90 %", "115 %", "208 %", "206 %", "300B"):
        assert claim in promised


def figures(text: str) -> set[str]:
    prose = re.sub(r"^    .*$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    return set(FIGURE.findall(re.sub(r"\s+", " ", prose)))


def test_every_figure_of_the_readme_is_among_the_claims() -> None:
    claims = " ".join(row[1] for row in OURS)
    assert len(figures(README)) > 10
    assert figures(README) - VERSIONS - figures(claims) == set()
    headline = README.partition("<!-- headline table: begin -->\n- ")[2].partition("\n<!--")[0]
    for sentence in headline.split("\n- "):
        assert " ".join(sentence.split()) in claims


@pytest.mark.parametrize("name", ["claims_of_others", "claims_of_readme"])
def test_no_figure_of_a_measurement_is_written_by_hand(name: str) -> None:
    """In a row that names a result, numbers stand in expressions of the template."""
    text = (TEMPLATES / f"{name}.j2").read_text()
    calls = re.findall(r"\{% call row\((.*?)\) %\}\n(.*?)\{% endcall %\}", text, re.DOTALL)
    assert len(calls) == len(OTHERS if name == "claims_of_others" else OURS)
    measured = [body for arguments, body in calls if ".machine," in arguments]
    assert len(measured) > 5
    for body in measured:
        assert figures(re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", body)) <= CONDITIONS, body
