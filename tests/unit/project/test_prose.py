"""Prose of the project: paths, links and requests in the documents, and openings of docstrings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = ("paceline", "paceline_launcher", "controller")
PACKAGES += ("policy_worker", "rollout_worker", "scorer_worker")
RIDDLE = re.compile(r"(Of|What|Whether|Those|Why|As|Whose|Which|Where)\b")
"""Openings that hide the subject of a sentence."""


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|txt))`", text))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


WALKS = re.findall(r"^\*\*.+\d+ rooms\.\*\*.*\n\n(?:.+\n)+", ARCHITECTURE, re.MULTILINE)


@pytest.mark.parametrize("number", range(4))
def test_every_room_of_a_walk_is_there_and_is_counted(number: int) -> None:
    walk = WALKS[number]
    rooms = re.findall(r"^(\d+)\. `(\S+):(\w+)`", walk, re.MULTILINE)
    last = int(re.findall(r"(\d+) rooms", walk)[0])
    assert [int(place) for place, _, _ in rooms] == list(range(last - len(rooms) + 1, last + 1))
    assert len({path for _, path, _ in rooms}) == len(rooms) == walk.count("\n") - 2
    for _, path, name in rooms:
        assert re.search(rf"\b(def|function) {name}\(", (ROOT / path).read_text()), (path, name)


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


ONLY_READ = {"GetStatus", "ReadEvents", "ReadGroups", "Why", "NextPlan", "HeldOutRows", "Score"}
STREAMS = {"Session"}
"""Described in a section of its own."""


def test_every_request_that_changes_something_has_its_key_in_the_table() -> None:
    text = "".join(p.read_text() for p in sorted((ROOT / "proto/paceline/v1").glob("*.proto")))
    methods = set(re.findall(r"^  rpc (\w+)\(", text, re.MULTILINE))
    page = (ROOT / "docs/protocol.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert methods >= ONLY_READ | STREAMS
    assert methods - ONLY_READ - STREAMS <= named


def docstrings(module: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of every string that stands alone: docstrings, and notes below a field."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_every_docstring_opens_with_its_subject() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        if "_pb2" not in path.name
        for line, text in docstrings(ast.parse(path.read_text()))
        if RIDDLE.match(text.lstrip())
    ]
    assert not found, "\n".join(found)
