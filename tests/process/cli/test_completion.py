"""Shell completion: the scripts are the shells' own language, and they complete what there is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_launcher.cli import app
from testbed.patience import patient

NAMED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
"""The shell is named: the one that runs a test is not to be found out."""
VARIABLE = "_PACELINE_COMPLETE"
ROOT = Path(__file__).resolve().parents[3]


def complete(words: str) -> list[str]:
    """What bash would offer for the last of ``words``."""
    count = len(words.split(" "))
    asked = {VARIABLE: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count - 1)}
    shown = CliRunner().invoke(app, [], prog_name="paceline", env=asked)
    return shown.stdout.split()


def test_commands_options_and_values_are_completed(tmp_path: Path) -> None:
    assert complete("paceline lo") == ["logs"]
    assert {"--run-dir", "--follow"} <= set(complete("paceline events --"))
    assert complete("paceline init --algorithm d") == ["dr_grpo", "dapo", "decoupled", "dpo"]
    assert complete("paceline samples --sort st") == ["stalest"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "policy-0.log").touch()
    assert complete(f"paceline logs --run-dir {tmp_path} po") == ["policy-0"]


def test_a_real_bash_completes_with_the_script(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    command = tmp_path / "paceline"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline_launcher "$@"\n')
    command.chmod(0o755)
    lines = [
        'eval "$(paceline --show-completion bash)"',
        "COMP_WORDS=(paceline comp) COMP_CWORD=1",
        "_paceline_completion paceline",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(lines)],
        env={
            **os.environ,
            **NAMED,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout.split() == ["compare"], done.stderr
