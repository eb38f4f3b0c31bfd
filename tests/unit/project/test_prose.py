"""Prose of the project: paths in the documents, first lines of modules, names of classes."""

from __future__ import annotations

import ast
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


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_every_link_between_documents_has_a_target() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    broken = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", page.read_text()):
            if "://" in target:
                continue
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


PACKAGES = ("paceline", "controller", "policy_worker", "rollout_worker", "scorer_worker")
RIDDLE = re.compile(
    r"(What|Who|Whose|Whether|Where|When|Why|How|Which|From|Does|Do|Is|Are|Has|Can)\b"
)
"""Openings of sentences that hide their subject: a first line is a noun phrase of the field."""
VERBS = (
    "Add|Ask|Build|Call|Check|Collect|Convert|Create|Decide|Deliver|Drop|End|Export|Find|Follow|Form"
    "|Give|Hold|Keep|Lease|Load|Make|Measure|Parse|Print|Provide|Put|Read|Remove|Render|Report|Return"
    "|Run|Send|Serve|Show|Start|Stop|Store|Take|Tell|Turn|Use|Wait|Write"
)
VERB = re.compile(
    rf"Puts? |({VERBS})s? (a|an|the|all|any|each|every|its|what|whether)\b|({VERBS})s \w+s\b"
)
"""Openings with a verb and its object. "Leases of tasks", "Read model" and "Stop strings" are
nouns."""


def modules(*folders: str) -> dict[str, ast.Module]:
    """Parsed modules by path, without generated stubs."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in paths
        if "_pb2" not in path.name
    }


def test_every_module_opens_with_a_noun_phrase() -> None:
    found = {}
    for path, module in modules(*PACKAGES, "testbed", "benchmarks").items():
        text = ast.get_docstring(module) or ""
        if not text or RIDDLE.match(text) or VERB.match(text):
            found[path] = text.partition("\n")[0] or "(no docstring)"
    assert not found, "\n".join(f"{path}: {line}" for path, line in found.items())


@pytest.mark.parametrize(
    "line", ["Leases tasks ahead of the engine", "Put on PYTHONPATH of a fleet", "Writes the data"]
)
def test_a_line_that_opens_with_a_verb_is_no_noun_phrase(line: str) -> None:
    assert VERB.match(line)


def test_no_two_unrelated_classes_have_one_name() -> None:
    where: dict[str, set[str]] = {}
    for path, module in modules(*PACKAGES).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, set()).add(path)
    twice = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert not twice, twice
