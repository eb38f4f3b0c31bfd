"""Settings that cannot be used, or do nothing: each is named with its place and the remedy."""

import re
from pathlib import Path

import pytest

from paceline.config import ConfigError, load_config
from paceline_launcher.preflight.earlier_run import config_warnings
from tests.fixtures.golden import Golden

MINIMAL = '[model]\npath = "m"\n\n[data]\npath = "d"\n'
GOLDEN = Golden("settings")


def told(case: str, file: Path) -> str:
    """What is said of a file with the lines of ``case``, or with its overrides."""
    overrides = case.startswith("--set ")
    file.write_text(MINIMAL if overrides else f"{MINIMAL}{case}\n")
    try:
        config = load_config(file, re.split(r"\s*--set ", case)[1:] if overrides else ())
    except ConfigError as error:
        return f"refused: {error}".replace(f"{file} ", "").replace(str(file), file.name)
    found = [check for check in config_warnings(config) if check.state == "warn"]
    return "\n".join(["valid", *(f"warning: {check}" for check in found)])


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_a_user_is_told_the_place_the_field_and_the_remedy(case: str, tmp_path: Path) -> None:
    found = told(case, tmp_path / "run.toml")
    GOLDEN.check(case, found)
    # A word of the library that checks, a secret, or a problem over several lines.
    assert "instance of" not in found and "hunter2" not in found
    assert found.startswith("valid") or "\n" not in found
