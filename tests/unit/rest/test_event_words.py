"""The evidence of a fault is shown with its event."""

import json
from typing import Any

import pytest

from controller.ledger import events as ev
from paceline.observe.event_history import EventHistory
from paceline.observe.vocabulary import DeathCause, MeshEnd


def as_journalled(event: ev.Event) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(ev.to_json(event)))
    return written


@pytest.mark.parametrize(
    ("event", "noticed"),
    [
        *(
            (ev.WorkerDied("p", 1, how, ""), True)
            for how in DeathCause
            if how is not DeathCause.REPLACED
        ),
        *((ev.MeshBroken(1, why), True) for why in MeshEnd if why is not MeshEnd.MEMBERSHIP),
    ],
)
def test_of_a_fault_it_is_said_how_it_was_noticed(event: ev.Event, noticed: bool) -> None:
    history = EventHistory()
    history.add({"position": "2-0", "n": 0, "t": 2.0, **ev.record_of(event, as_journalled(event))})
    told = history.after(None, limit=9)[-1]
    assert bool(told.noticed) == noticed
    assert told.is_fault == noticed


def test_a_leader_that_took_over_is_a_fault_and_one_of_a_resumed_run_is_not() -> None:
    history = EventHistory()
    head = {"type": "TermBegun", "n": 0, "text": "controller-1 leads"}
    history.add({**head, "position": "1-0", "t": 1.0, "severity": "info"})
    history.add({**head, "position": "2-0", "t": 2.0, "severity": "warning", "failover": True})
    started, took_over = history.after(None, limit=9)
    assert (started.severity, started.noticed) == ("info", "")
    assert took_over.severity == "warning" and "lease" in took_over.noticed
    assert history.resumed == [1.0]
