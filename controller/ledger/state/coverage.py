"""Coverage of the data: tasks that are finished for good, as spans of ordinals, with their lengths
and rewards.

A task is finished for good if it was dropped, or if a checkpoint covers the step that trained it.
The ledger keeps no record of it then; the spans here remain, so that every row can be accounted for
after the journal was trimmed. Neighbouring ordinals merge: a snapshot holds about 16 bytes for each
drop, whatever the number of trained tasks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from controller.ledger.specs import GroupMeta

Spans = list[int]
"""Ascending and flat: [start, end, start, end, ...]; an end is not part of its span."""


def add(spans: Spans, ordinal: int) -> bool:
    """Adds ``ordinal``; False, with nothing changed, if it is there already."""
    at = bisect_right(spans, ordinal)
    if at % 2:
        return False
    joins_left = at > 0 and spans[at - 1] == ordinal
    joins_right = at < len(spans) and spans[at] == ordinal + 1
    if joins_left and joins_right:
        del spans[at - 1 : at + 1]
    elif joins_left:
        spans[at - 1] += 1
    elif joins_right:
        spans[at] -= 1
    else:
        spans[at:at] = [ordinal, ordinal + 1]
    return True


def remove(spans: Spans, ordinal: int) -> None:
    at = bisect_right(spans, ordinal) - 1
    start, end = spans[at], spans[at + 1]
    left = [start, ordinal] if start < ordinal else []
    right = [ordinal + 1, end] if ordinal + 1 < end else []
    spans[at : at + 2] = left + right


def contains(spans: Spans, ordinal: int) -> bool:
    return bisect_right(spans, ordinal) % 2 == 1


def pairs(spans: Spans) -> Iterator[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)


def count(spans: Spans) -> int:
    return sum(end - start for start, end in pairs(spans))


def passed_key(epoch: int, source: int) -> str:
    """``source``: its number."""
    return f"{epoch}.{source}"


@dataclass(slots=True)
class Tally:
    """Sums over groups whose completions the ledger knows."""

    compact = True

    groups: int = 0
    sequences: int = 0
    tokens: int = 0
    """Completion tokens that could be trained."""
    reward_sum: float = 0.0
    """Over sequences."""

    def add(self, group: GroupMeta) -> None:
        self.groups += 1
        self.sequences += group.sequences
        self.tokens += group.tokens
        self.reward_sum += group.reward_mean * group.sequences


@dataclass(slots=True)
class Coverage:
    trained: Spans = field(default_factory=list)
    """Under a checkpoint."""
    dropped: dict[str, Spans] = field(default_factory=dict)
    """By reason."""
    repeated: list[int] = field(default_factory=list)
    """Tasks that were finished more than once. Always empty unless a promise is broken."""
    trained_tally: Tally = field(default_factory=Tally)
    dropped_tally: dict[str, Tally] = field(default_factory=dict)
    masked_tally: Tally = field(default_factory=Tally)
    """Trained groups that lost tokens to their age: whole groups, under a checkpoint."""
    masked_tokens: int = 0
    passed: dict[str, int] = field(default_factory=dict)
    """Rows that the curriculum left out, by ``passed_key``. Their spans are among the trained ones,
    with which they merge: memory grows with the epochs, not with the rows that are left out."""
    recorded_from: int = 0
    """Tasks before this ordinal may have finished under a release that did not record which."""

    def mask(self, group: GroupMeta, tokens: int) -> None:
        """``group`` was trained without ``tokens`` of its tokens, which were too old."""
        self.masked_tally.add(group)
        self.masked_tokens += tokens

    def cover(self, ordinal: int, group: GroupMeta | None) -> None:
        if not add(self.trained, ordinal):
            self.repeated.append(ordinal)
        if group is not None:
            self.trained_tally.add(group)

    def pass_over(self, ordinal: int, key: str) -> None:
        """The curriculum leaves the row of ``ordinal`` out. ``key``: of its epoch and source."""
        if not add(self.trained, ordinal):
            self.repeated.append(ordinal)
        self.passed[key] = self.passed.get(key, 0) + 1

    def drop(self, ordinal: int, reason: str, group: GroupMeta | None) -> None:
        if not add(self.dropped.setdefault(reason, []), ordinal):
            self.repeated.append(ordinal)
        if group is not None:
            self.dropped_tally.setdefault(reason, Tally()).add(group)

    def take_back(self, ordinal: int, reason: str) -> None:
        """The drop no longer holds. Its lengths and rewards stay in the tally: those groups were
        lost."""
        spans = self.dropped[reason]
        remove(spans, ordinal)
        if not spans:
            del self.dropped[reason]

    def finished(self) -> Iterable[tuple[int, int, str]]:
        """(start, end, outcome) of every span; the outcome is ``trained`` or the reason of a drop."""
        yield from ((start, end, "trained") for start, end in pairs(self.trained))
        for reason, spans in self.dropped.items():
            yield from ((start, end, reason) for start, end in pairs(spans))

    def count(self) -> int:
        return count(self.trained) + sum(map(count, self.dropped.values()))
