"""Differences between two configurations, as text for an error message."""

from __future__ import annotations

import json
from collections.abc import Iterator

from paceline.config.schema import RENAMED


def differences(ours: str, theirs: str) -> str:
    """The fields that differ between two canonical configs: the run's value, then the other's."""
    try:
        run, other = dict(_flat(json.loads(ours))), dict(_flat(json.loads(theirs)))
    except (ValueError, AttributeError):
        return "one of them cannot be read"
    names = sorted(n for n in run.keys() | other.keys() if run.get(n) != other.get(n))
    shown = [
        f"{RENAMED.get(n, n)} is {run.get(n)!r} in the run, {other.get(n)!r} here"
        for n in names[:8]
    ]
    return "; ".join(shown) or "its digest"


def _flat(tree: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
