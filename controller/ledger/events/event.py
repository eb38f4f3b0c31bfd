"""Event base class, the topics that events wake, and their severity."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast, dataclass_transform

from controller.ledger.state.state import State
from paceline.observe.vocabulary import EventType, Severity


class Topic(StrEnum):
    """Long polls of the leader that wait for the same events."""

    LEASE = "lease"  # a task may have become admissible, or the wait for one is over
    ISOLATED = "isolated"  # the same, for the one worker that runs empty; too frequent for all
    PLAN = "plan"  # the plan of a replica may have changed
    VOTE = "vote"  # the outcome of a vote may be known


@dataclass(frozen=True, slots=True)
class Event(ABC):
    """A fact that has been decided: applying it never fails and never decides. A new kind is one
    class in this folder, with its ``apply``. Times are Unix seconds of the leader."""

    wakes = frozenset[Topic]()
    directs = True
    listed = True
    severity = Severity.INFO
    words = ""

    @abstractmethod
    def apply(self, s: State) -> None:
        """Makes the event true of ``s``. Deterministic."""

    def text(self) -> str:
        """One plain sentence for people, subject first, without a full stop; "" if not listed."""
        return self.words.format(self)


LEASES = frozenset({Topic.LEASE, Topic.ISOLATED})
PLANS = frozenset({Topic.PLAN, Topic.VOTE})

TYPES: dict[str, type[Event]] = {}  # Every kind of event by its name in the journal, an EventType

_E = TypeVar("_E", bound=type[Event])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def event(
    *,
    wakes: frozenset[Topic] = frozenset(),
    directs: bool = True,
    listed: bool | Callable[[Any], bool] = True,
    severity: Severity = Severity.INFO,
    warns: Callable[[Any], bool] | None = None,
    words: str = "",
) -> Callable[[_E], _E]:
    """Makes a class a kind of event. ``wakes``: long polls to look again once the event is durable.
    ``directs``: the directive of another worker than the reporting one may depend on it.
    ``listed``: shown to people, as a line of events.jsonl with severity and text. ``warns``: its
    severity is a warning if this holds. ``words``: its text, with the event as {0}."""

    def made(kind: _E) -> _E:
        known: Any = dataclass(frozen=True, slots=True)(kind)
        known.wakes, known.directs, known.words = wakes, directs, words
        known.listed = property(listed) if callable(listed) else listed
        known.severity = severity
        if warns is not None:
            known.severity = property(lambda e: Severity.WARNING if warns(e) else severity)
        TYPES[EventType(known.__name__)] = known
        return cast(_E, known)

    return made


def counts_in_words(counts: Mapping[str, int]) -> str:
    """ "policy=1, rollout=3"."""
    return ", ".join(f"{name}={count}" for name, count in counts.items())


def reason_in_words(reason: str, detail: str = "") -> str:
    """ "peer error: connection reset" for peer_error and its detail."""
    words = reason.replace("_", " ")
    return f"{words}: {detail}" if detail else words
