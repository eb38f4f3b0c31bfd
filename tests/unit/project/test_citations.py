"""Citations of docs/algorithms.md: each number leads to the source that its sentence names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
TEXT, _, LIST = PAGE.partition("## Sources\n")
SOURCES = {
    int(number): " ".join(rest.split())
    for number, rest in re.findall(r"^(\d+)\. (.+(?:\n   .+)*)", LIST, re.MULTILINE)
}
CITATION = re.compile(r"\[(\d+)\](?!\()")


def _plain(text: str) -> str:
    return re.sub(r"[^a-zü0-9]", "", text.lower())


def _passages() -> list[str]:
    """Rows of tables, points of lists and paragraphs."""
    return re.split(r"\n\n|\n(?=[|-] ?)|\n(?=\d+\. )", TEXT)


def test_sources_are_numbered_without_gaps_and_are_all_cited() -> None:
    assert sorted(SOURCES) == list(range(1, len(SOURCES) + 1))
    assert {int(number) for number in CITATION.findall(TEXT)} == set(SOURCES)


def test_no_source_is_listed_twice() -> None:
    papers = re.findall(r"arXiv (\d{4}\.\d{5})", LIST)
    assert sorted(papers) == sorted(set(papers))


def test_a_citation_leads_to_the_source_that_its_sentence_names() -> None:
    """A source begins with the name that it is cited by, and a colon."""
    astray = []
    for passage in _passages():
        for number in map(int, CITATION.findall(passage)):
            name = SOURCES[number].partition(":")[0]
            if _plain(name) not in _plain(passage):
                astray.append(f"[{number}], which is {name}: {' '.join(passage.split())[:80]}")
    assert astray == []


def test_the_page_of_the_objectives_says_nothing_twice() -> None:
    page = (ROOT / "docs" / "objectives.md").read_text()
    table = page.partition("## One of your own")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in row.split(", ")]
    rule = page.partition("## The one rule")[2]
    points = re.findall(r"^- (\w+ \w+)", rule, re.MULTILINE)
    for said in (names, points):
        assert [each for each in said if said.count(each) > 1] == []
