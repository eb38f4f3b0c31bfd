"""Comparison of the faults that the ledger has with those that were injected."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """Faults that followed one injection, counted."""

    right: int
    """Faults of the ledger that have the cause that was injected."""
    wrong: int
    """Faults with another cause, faults that nobody injected, and injected ones it lacks."""


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
    """Share of all faults whose cause was injected; ``others`` followed no injection."""
    verdicts = [verdict(injection) for injection in injections]
    right = sum(v.right for v in verdicts)
    return right / max(1, right + others + sum(v.wrong for v in verdicts))


def rows(found: Mapping[str, Any]) -> list[list[object]]:
    """Table by kind: times, faults with the right cause, mean time lost, mean time until whole."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for injection in found["injections"]:
        kinds[injection["kind"]].append(injection)
    table = []
    for kind, made in sorted(kinds.items()):
        verdicts = [verdict(injection) for injection in made]
        right = sum(v.right for v in verdicts)
        faults = right + sum(v.wrong for v in verdicts)
        lost_s = sum(f["lost_s"] for i in made for f in i["faults"]) / len(made)
        whole_s = sum(i["whole_again_s"] for i in made) / len(made)
        causes = sorted({e["cause"].replace("_", " ") for i in made for e in i["expected"]})
        table.append(
            [
                kind,
                ", ".join(causes),
                len(made),
                f"{right} of {faults}",
                f"{lost_s:.1f}",
                f"{whole_s:.0f}",
            ]
        )
    return table
