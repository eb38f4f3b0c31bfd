"""The ledger and what is around it stay pure and light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import controller.ledger

LEDGER = Path(controller.ledger.__file__).parent
IMPURE = {"time", "datetime", "random", "secrets", "os", "socket", "asyncio", "threading", "redis"}


def test_the_ledger_has_no_clock_no_dice_and_no_io() -> None:
    files = [*LEDGER.rglob("*.py"), LEDGER.parent / "fleet" / "liveness.py"]
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            used = {name.partition(".")[0] for name in names}
            assert not used & IMPURE, f"{file.name} imports {used & IMPURE}"


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("controller.ledger", ["numpy", "grpc", "redis"]),
        ("testbed.simulator.__main__", ["fastapi", "uvicorn"]),
    ],
)
def test_the_ledger_and_the_simulator_import_nothing_heavy(module: str, more: list[str]) -> None:
    code = (
        f"import sys, {module}\n"
        f"heavy = {{'torch', 'transformers', 'datasets', 'vllm', *{more}}}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
