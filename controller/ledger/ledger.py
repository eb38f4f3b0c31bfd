"""Ledger: a pure state machine. A command decides on it, with all that follows, such as a step that
can open. It reads no clock, does no I/O and draws no random number: the same commands at the same
times give the same events, and these, applied to an empty ledger, the same state."""

import json
from copy import copy
from typing import Any

from controller.ledger.codec import codec_of, decode, encode
from controller.ledger.decisions import held_out, hosts, links, membership, mesh, run, seats, steps
from controller.ledger.decisions.commands import Decider
from controller.ledger.events import Event
from controller.ledger.invariants import check, check_counts
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Moment, Task
from paceline.ids import TaskId


class BrokenInvariant(Exception):
    """The ledger would have broken a promise. A bug: never survivable."""


class Ledger(Decider):
    """``checked``: verify the cheap invariants after every event, and raise BrokenInvariant."""

    def __init__(self, *, checked: bool = False) -> None:
        self.state = State()
        self.checked = checked
        self._events: list[Event] = []

    def apply(self, event: Event) -> None:
        """Makes an event of the journal true. Events must come in journal order, each once."""
        event.apply(self.state)
        if self.checked and (problems := "; ".join(check_counts(self.state))):
            raise BrokenInvariant(f"after {event}: {problems}")

    def check(self) -> list[str]:
        """Every invariant, from scratch. One line for each that does not hold; linear in tasks."""
        return check(self.state)

    def take_events(self) -> list[Event]:
        """Events of commands since they were last taken, in order, for the journal."""
        events, self._events = self._events, []
        return events

    def take_garbage(self) -> list[tuple[TaskId, int]]:
        """(task id, attempt) of payloads that are not needed once the events so far are durable."""
        garbage, self.state.garbage = self.state.garbage, []
        return garbage

    def to_snapshot(self) -> dict[str, Any]:
        """The state as JSON-able values; shares nothing with it that changes later."""
        return encode(self.state)

    def begin_snapshot(self) -> dict[str, Any]:
        """Like ``to_snapshot``, at once: ``["tasks"]["records"]`` is a Moment, which encodes a task
        when it is read. To be closed; until then no other snapshot may be begun."""
        book = self.state.tasks
        assert book.moment is None or book.moment.over, "a snapshot is being written"
        rest, tasks = copy(self.state), copy(book)
        tasks.records, rest.tasks = {}, tasks
        data = encode(rest)
        encode_task, _ = codec_of(Task)
        book.moment = data["tasks"]["records"] = Moment(book.records.values(), encode_task)
        return data

    @classmethod
    def from_snapshot(cls, data: dict[str, Any], *, checked: bool = False) -> "Ledger":
        ledger = cls(checked=checked)
        ledger.state = decode(State, data)
        return ledger

    def fingerprint(self) -> str:
        """Equal for equal states, order of everything included."""
        return json.dumps(self.to_snapshot(), separators=(",", ":"))

    # ---- interface of the decisions: Decider -----------------------------------------

    def emit(self, event: Event) -> None:
        self.apply(event)
        self._events.append(event)

    def settle_fleet(self, now: float) -> None:
        hosts.settle_hosts(self, now)
        seats.settle_loans(self, now)
        mesh.settle_mesh(self)
        if seats.settle_seats(self, now):
            mesh.settle_mesh(self)
        steps.settle_step(self, now)
        membership.settle_spares(self)
        links.settle_links(self)
        self.settle_evals(now)

    def settle_evals(self, now: float) -> None:
        held_out.settle_evals(self)
        run.settle_end(self, now)
