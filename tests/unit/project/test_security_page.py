"""The security page: every test that it names exists where it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_attack_names_tests_that_exist() -> None:
    page = (ROOT / "docs/security.md").read_text()
    table = page.partition("## What an attack meets")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test is named: {row}"
        for file, test in named:
            assert re.search(rf"def {test}\(", (ROOT / "tests" / file).read_text()), (file, test)
