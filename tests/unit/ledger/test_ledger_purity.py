"""The ledger stays pure: it decides by what it is told alone."""

import ast
from pathlib import Path

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
