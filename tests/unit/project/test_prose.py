"""Prose of the project: paths in the documents, first lines of modules, names of classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("docs/architecture.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    named = set(
        re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|txt))`", (ROOT / document).read_text())
    )
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_every_link_between_documents_has_a_target() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
