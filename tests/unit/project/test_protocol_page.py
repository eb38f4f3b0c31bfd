"""Methods of the services in the protocol's table of keys."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ONLY_READ = {"GetStatus", "WatchEvents", "Why", "NextPlan", "HeldOutRows", "Score"}
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
