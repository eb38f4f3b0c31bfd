"""Comparison of the faults that the ledger has with those that were injected."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one injection."""

    right: int
    """Faults of the ledger that have the cause that was injected."""
    wrong: int
    """Those with another cause, those that nobody had injected, and injected ones that it does not
    have."""


def verdict(injection: Mapping[str, Any]) -> Verdict:
    left = Counter((e["name"], e["pid"], e["cause"]) for e in injection["expected"])
    injected = left.total()
    right = 0
    for fault in injection["faults"]:
        key = fault["name"], fault["pid"], fault["cause"]
        if left[key] > 0:
            left[key] -= 1
            right += 1
    return Verdict(right, max(injected, len(injection["faults"])) - right)


def attributed_share(injections: Iterable[Mapping[str, Any]], others: int = 0) -> float:
    """Of all faults, those whose cause is the one that was injected; ``others`` came at no
    injection."""
    verdicts = [verdict(injection) for injection in injections]
    right = sum(one.right for one in verdicts)
    return right / max(1, right + others + sum(one.wrong for one in verdicts))


def rows(found: Mapping[str, Any]) -> list[list[object]]:
    """Of each kind: how often, faults with the right cause of all, mean time lost, mean time until
    all was whole."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for injection in found["injections"]:
        kinds[injection["kind"]].append(injection)
    shown = []
    for kind, made in sorted(kinds.items()):
        verdicts = [verdict(injection) for injection in made]
        right = sum(one.right for one in verdicts)
        faults = right + sum(one.wrong for one in verdicts)
        lost_s = sum(f["lost_s"] for i in made for f in i["faults"]) / len(made)
        whole_s = sum(i["whole_again_s"] for i in made) / len(made)
        causes = sorted({e["cause"].replace("_", " ") for i in made for e in i["expected"]})
        shown.append(
            [
                kind,
                ", ".join(causes),
                len(made),
                f"{right} of {faults}",
                f"{lost_s:.1f}",
                f"{whole_s:.0f}",
            ]
        )
    return shown
